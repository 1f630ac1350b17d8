"""Stop a run early: after Ctrl-C (SIGINT), SIGTERM, SIGHUP or SIGUSR1, or at its time limit.

The first signal ends the run in an orderly way. During training, the current step is finished and
saved. Before the first step there is nothing to save. After the last step, the model is still
written. A second Ctrl-C ends the process at once.

torchrun starts its workers in other sessions. It forwards Ctrl-C to them as SIGINT, and a second
Ctrl-C as SIGTERM. Without torchrun, srun or the terminal sends each Ctrl-C to every process. So the
same Ctrl-C may arrive twice within milliseconds. Therefore a Ctrl-C counts as the second one only
if it comes at least one second after the first signal.

A program that trains through ``nemo_aligner.train``, such as a notebook, continues after the run.
There Ctrl-C raises KeyboardInterrupt instead of ending the process. Python handles signals only in
the main thread, so a run in another thread leaves all signals to the program.

SIGHUP usually means that the terminal was closed. A run that nohup has started ignores it.

SIGUSR1 means that the sender will start the same command again. The exit code then says whether
the run must be continued. Slurm jobs request this signal before their time is up.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import FrameType

from nemo_aligner.config.training import parse_max_time
from nemo_aligner.utils.console import fit
from nemo_aligner.utils.processes import handled_signals, is_first_rank, is_second_interrupt

_STDOUT, _STDERR = 1, 2
# Seconds after a SIGHUP in which programs that read the output, such as tee, have got it, too.
_HANGUP_S = 0.2
_NAMES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP",
    signal.SIGUSR1: "SIGUSR1",
}
# Exit code of a run that SIGUSR1 stopped. A shell reports the same code for a process that SIGUSR1
# killed.
RESUME_EXIT_CODE = 128 + signal.SIGUSR1
_AT_ONCE = "press Ctrl-C again to exit at once"


class Phase(Enum):
    """Phase of a run. Its value is the message that is printed if a signal arrives in the phase."""

    starting = "stopped before the first step; there is nothing to save"
    training = f"stopping after the current step, which is saved first ({_AT_ONCE})"
    finishing = f"training is over; the model is still written ({_AT_ONCE})"


@dataclass(frozen=True)
class StopReason:
    """Why a run stops.

    Attributes:
        text: the reason for messages, such as ``Ctrl-C``.
        exit_code: exit code of the process.
    """

    text: str
    exit_code: int = 0

    @property
    def is_ctrl_c(self) -> bool:
        """True if the user pressed Ctrl-C."""
        return self.text == _NAMES[signal.SIGINT]

    @property
    def is_signal(self) -> bool:
        """True if a signal stopped the run, rather than its time limit."""
        return self.text in _NAMES.values()

    def __str__(self) -> str:
        return self.text


class SignalHandler:
    """Receives the signals that stop a run, and watches its time limit.

    As a context manager it replaces the process's signal handlers. The training loop reads
    ``reason`` after each step. Before the first step, a signal raises SystemExit at once, with the
    exit code that shells report for the signal (130, 143, 129 or 138).

    With ``in_program``, Ctrl-C before the first step raises KeyboardInterrupt instead. So does a
    second Ctrl-C in any phase.

    Args:
        max_time: time limit of the run, a checked ``DD:HH:MM:SS``; None for no limit.
        clock: returns the current time in seconds.
        in_program: the process continues after the run, as a notebook does.
    """

    def __init__(
        self,
        max_time: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        in_program: bool = False,
    ) -> None:
        self._clock = clock
        self._in_program = in_program
        self._signal_time = 0.0
        self._takes_signals = False
        limit = None if max_time is None else parse_max_time(max_time)
        self._deadline = None if limit is None else clock() + limit
        self._max_time = max_time
        self._phase = Phase.starting
        self._signal: int | None = None
        self._announced: tuple[int, float] | None = None
        self._is_main = is_first_rank()

    @property
    def reason(self) -> StopReason | None:
        """The reason to stop the run after the current step; None if it continues."""
        if self._signal is not None:
            is_restarted = self._signal == signal.SIGUSR1
            name = _NAMES[signal.Signals(self._signal)]
            return StopReason(name, RESUME_EXIT_CODE if is_restarted else 0)
        if self._deadline is not None and self._clock() >= self._deadline:
            return StopReason(f"the time limit (trainer.max_time={self._max_time})")
        return None

    @contextmanager
    def while_training(self) -> Iterator[None]:
        """Set the phase to ``training`` in the ``with`` block, and to ``finishing`` after it."""
        self._phase = Phase.training
        yield
        self._phase = Phase.finishing

    def __enter__(self) -> SignalHandler:
        self._takes_signals = threading.current_thread() is threading.main_thread()
        if not self._takes_signals:
            return self
        # Python calls ``_on_signal`` only between two bytecode instructions, so during a backward
        # pass only after its end. But the interpreter also writes each signal to a socket at once.
        # A thread reads the socket, and tells the user immediately that the run will stop.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        descriptor = self._writer.fileno()
        self._previous_descriptor = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        numbers = handled_signals(_NAMES)
        self._previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        if not self._takes_signals:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        self._writer.close()
        self._watcher.join()
        self._reader.close()
        is_ending = kind in (SystemExit, KeyboardInterrupt)
        if self._signal is not None and self._phase is Phase.starting and not is_ending:
            # If other ranks exit first because of the signal, this rank gets an error that they are
            # gone. Report the signal instead of that error.
            raise self._exit_exception(self._signal) from None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: remember the first as the reason to stop, or raise to end the run now.

        Python calls this in the main thread, possibly only after a long operation.
        """
        if self._signal is None:
            self._signal, self._signal_time = number, self._clock()
            if self._phase is Phase.starting:
                raise self._exit_exception(number)
        elif self._in_program and is_second_interrupt(
            number, self._signal, self._clock() - self._signal_time
        ):
            raise KeyboardInterrupt("interrupted again: unsaved work is lost")

    def _exit_exception(self, number: int) -> BaseException:
        """Build the exception that ends a run before its first step."""
        if self._in_program and number == signal.SIGINT:
            return KeyboardInterrupt(Phase.starting.value)
        return SystemExit(128 + number)

    def _watch(self) -> None:
        """Print a message as soon as a signal arrives; runs in a separate thread.

        Unless ``in_program`` is set, a second Ctrl-C ends the process here.
        """
        while received := self._reader.recv(1):
            number = received[0]
            if number not in _NAMES:
                continue
            if number == signal.SIGHUP:
                time.sleep(_HANGUP_S)
                _discard_closed_outputs()
            if self._announced is None:
                self._announced = number, self._clock()
                self._announce(f"{_NAMES[signal.Signals(number)]}: {self._phase.value}")
                continue
            first, first_time = self._announced
            if is_second_interrupt(number, first, self._clock() - first_time):
                self._announce("interrupted again, exiting at once: unsaved work is lost")
                if not self._in_program:
                    os._exit(128 + signal.SIGINT)

    def _announce(self, text: str) -> None:
        """Print ``text`` to stderr, on the first rank only."""
        if self._is_main:
            start = "\n" if os.isatty(_STDERR) else ""  # new line: a progress bar or ^C may be here
            os.write(_STDERR, f"{start}{fit(text)}\n".encode())


def _discard_closed_outputs() -> None:
    """Discard further output to a closed terminal, or to a pipe whose reader has ended.

    A message would raise an error there, which would end the run before it saves.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for output in (_STDOUT, _STDERR):
        poll = select.poll()
        poll.register(output, 0)  # reports only that the other end is gone
        if poll.poll(0):
            os.dup2(null, output)
    os.close(null)
