"""When a run is to stop: its time is up, or Ctrl-C (SIGINT), SIGTERM or SIGUSR1 came.

The first signal ends the run in good order: while it trains, the step is finished and saved; before
the first step there is nothing to save, and after the last the model is still written. A second
Ctrl-C leaves at once.

torchrun, its workers in sessions of their own, passes Ctrl-C on as SIGINT, and a second one as
SIGTERM; srun and a terminal without a launcher reach every process themselves. The same Ctrl-C may
so come twice within milliseconds, and only what comes a second later is a second one.

A program that trains by ``nemo_aligner.train``, such as a notebook, goes on afterwards: there
Ctrl-C raises KeyboardInterrupt where it would end the process. Python delivers signals to the main
thread alone, so a run in another thread leaves them to the program.

Who sends SIGUSR1 means to start the same command again, and is told by the exit code whether there
is anything left to do. It is the signal that jobs under Slurm ask for before their time is up.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import FrameType

from nemo_aligner.training.loggers import parse_max_time
from nemo_aligner.utils.console import fit
from nemo_aligner.utils.processes import is_first_rank

_STDERR = 2
_SECOND_AFTER = 1.0
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}
# Exit code that a shell gives to a process ended by the signal.
RESUME_EXIT_CODE = 128 + signal.SIGUSR1
_AT_ONCE = "Ctrl-C again leaves at once"


class Phase(Enum):
    """Phase of a run; the value is what the first signal prints then."""

    starting = "stopped before the first step; there is nothing to save"
    training = f"stopping after the current step, which is saved first ({_AT_ONCE})"
    finishing = f"training is over; the model is still written ({_AT_ONCE})"


@dataclass(frozen=True)
class StopReason:
    """Why a run stops, as a person is told, and what its process ends with once all is saved."""

    text: str
    exit_code: int = 0

    @property
    def is_ctrl_c(self) -> bool:
        return self.text == _NAMES[signal.SIGINT]

    @property
    def is_signal(self) -> bool:
        return self.text in _NAMES.values()

    def __str__(self) -> str:
        return self.text


class SignalHandler:
    """Why this process should stop after its step; None to go on.

    As a context manager it takes the signals over. While the run starts a signal raises SystemExit
    with the exit code that shells give it (130, 143, 138). With ``in_program`` Ctrl-C raises
    KeyboardInterrupt then, and so does a second one later on.
    """

    def __init__(
        self,
        max_time: str | None = None,
        now: Callable[[], float] = time.monotonic,
        in_program: bool = False,
    ) -> None:
        self._now = now
        self._in_program = in_program
        self._when = 0.0
        self._takes_signals = False
        self._deadline = None if max_time is None else now() + parse_max_time(max_time)
        self._max_time = max_time
        self._phase = Phase.starting
        self._signal: int | None = None
        self._told: tuple[int, float] | None = None
        self._is_main = is_first_rank()

    @property
    def reason(self) -> StopReason | None:
        """Reason to stop, None to go on."""
        if self._signal is not None:
            is_to_go_on = self._signal == signal.SIGUSR1
            name = _NAMES[signal.Signals(self._signal)]
            return StopReason(name, RESUME_EXIT_CODE if is_to_go_on else 0)
        if self._deadline is not None and self._now() >= self._deadline:
            return StopReason(f"the time limit (trainer.max_time={self._max_time})")
        return None

    @contextmanager
    def while_training(self) -> Iterator[None]:
        """Mark the block as the run's steps; what follows is the end of the run."""
        self._phase = Phase.training
        yield
        self._phase = Phase.finishing

    def __enter__(self) -> SignalHandler:
        self._takes_signals = threading.current_thread() is threading.main_thread()
        if not self._takes_signals:
            return self
        # Python's handlers run between two of its instructions, and a backward pass is one: the
        # interpreter also writes the signal to a socket, which a thread can read meanwhile.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        descriptor = self._writer.fileno()
        self._previous_descriptor = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        self._previous = {each: signal.signal(each, self._on_signal) for each in _NAMES}
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        if not self._takes_signals:
            return
        for each, handler in self._previous.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        self._writer.close()
        self._watcher.join()
        self._reader.close()
        ended = kind in (SystemExit, KeyboardInterrupt)
        if self._signal is not None and self._phase is Phase.starting and not ended:
            # Others left first, and what this rank raised is that they are gone.
            raise self._end_of(self._signal) from None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._when = number, self._now()
            if self._phase is Phase.starting:
                raise self._end_of(number)
        elif self._in_program and self._is_second(number, self._signal, self._when):
            raise KeyboardInterrupt("interrupted again: unsaved work is lost")

    def _end_of(self, number: int) -> BaseException:
        if self._in_program and number == signal.SIGINT:
            return KeyboardInterrupt(Phase.starting.value)
        return SystemExit(128 + number)

    def _watch(self) -> None:
        """Tell of every signal as it comes; in a thread of its own."""
        while received := self._reader.recv(1):
            number = received[0]
            if number not in _NAMES:
                continue
            if self._told is None:
                self._told = number, self._now()
                self._tell(f"{_NAMES[signal.Signals(number)]}: {self._phase.value}")
            elif self._is_second(number, *self._told):
                self._tell("interrupted again, exiting at once: unsaved work is lost")
                if not self._in_program:
                    os._exit(128 + signal.SIGINT)

    def _is_second(self, number: int, first: int, when: float) -> bool:
        # Some schedulers repeat SIGTERM.
        is_wish = signal.SIGINT in (number, first)
        return is_wish and self._now() - when >= _SECOND_AFTER

    def _tell(self, text: str) -> None:
        if self._is_main:
            start = "\n" if os.isatty(_STDERR) else ""  # a bar, or ^C, may stand there
            os.write(_STDERR, f"{start}{fit(text)}\n".encode())
