"""Checks of a chat template before it is used, by writing conversations with it.

An untrusted template may not end: Jinja's sandbox keeps it from files and code, but not from loops,
nor from asking for all memory. So it is first run in a process of its own.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from datetime import datetime
from functools import lru_cache

from nemo_aligner.contract.template_probe import TemplateReading
from nemo_aligner.contract.templates import (
    BUILT_IN_TEMPLATES,
    KWARGS_KEY,
    PROBE,
    TEMPLATE_KEY,
    end_of_turn,
    find_frames,
    names_in,
    render,
    variables_of,
    write_probe,
)
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import ConfigError, DataError, short, shown

# Variables that the caller of a template sets, and no setting may replace.
_GIVEN = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "strftime_now",
    "raise_exception",
)
_DAYS = (datetime(2001, 2, 3), datetime(2034, 11, 30))
_CPU_SECONDS = 5
_BYTES = 2**30
_TIMEOUT_SECONDS = 120  # of a machine that is busy; CPU time is what ends the trial


def check_template(template: str, setting: str, tokenizer: Tokenizer, kwargs: str = "") -> None:
    """Refuse a template whose text would be wrong, or another one tomorrow.

    ``kwargs`` are the contract's ``chat_template_kwargs``.

    Raises:
        ConfigError: it depends on the date, does not write a question and its answer, writes BOS
            twice, or writes nothing, or the same thing twice, after the reply; with what to set. Or
            it does not read one of ``kwargs``.
    """
    where, built_in = f"{TEMPLATE_KEY}: {setting}", ", ".join(BUILT_IN_TEMPLATES)
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    try:
        _check_kwargs(template, kwargs)
        check_it_ends(template, bos, eos, kwargs)
        if is_dated(template, bos, eos, kwargs):
            raise ConfigError(
                f"{where}: its text depends on the date, so scores change from day to day; set "
                f"it to one of {built_in}, or to a file of it with the date written out"
            )
        text = write_probe(template, bos, eos, kwargs)
    except DataError as error:
        raise ConfigError(f"{where}: {error}; set it to one of {built_in}, or a file") from error
    for part in (message["content"] for message in PROBE):
        if part not in text:
            raise ConfigError(
                f"{where}: it writes {shown(text)}, without the conversation's {part!r}; set it to "
                f"one of {built_in}, or to a file of a chat template"
            )
    if bos and tokenizer.encode(text)[:2] == [tokenizer.bos_id] * 2:
        raise ConfigError(
            f"{where}: it writes BOS ({bos!r}) twice; set it to a file of it with one"
        )
    end = "".join(end_of_turn(template, bos, eos, kwargs).split())
    if not end:
        raise ConfigError(
            f"{where}: it writes nothing after the reply, so a complete one looks like one that "
            f"was cut off; set it to one of {built_in}, or to a file of it that ends a turn"
            + ("" if eos else " (plain and zephyr end with EOS, which this tokenizer lacks)")
        )
    if end[: len(end) // 2] * 2 == end:
        raise ConfigError(
            f"{where}: it ends the reply twice ({short(end)}); set it to a file that does once"
        )


def _check_kwargs(template: str, kwargs: str) -> None:
    """Raises ConfigError: the template does not read one of them, or is given it anyway."""
    known = sorted(variables_of(template).difference(_GIVEN))
    for name in json.loads(kwargs or "{}"):
        if name not in known:
            raise ConfigError(
                f"{KWARGS_KEY}: got {name!r:.60}, which the chat template ignores; wanted "
                + (", ".join(known) or "none, as it reads none")
            )


def is_dated(template: str, bos_token: str, eos_token: str, kwargs: str = "") -> bool:
    """True if a template writes the date, and so another text tomorrow."""
    texts = {write_probe(template, bos_token, eos_token, kwargs, day.strftime) for day in _DAYS}
    return len(texts) > 1


@lru_cache(maxsize=8)
def check_it_ends(template: str, bos_token: str, eos_token: str, kwargs: str = "") -> None:
    """Render short conversations by ``template`` elsewhere, with calls of tools, too.

    Raises:
        DataError: it cannot be, or not within 5 s and 1 GiB.
    """
    where = os.pathsep.join(filter(None, sys.path))
    try:
        trial = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps([template, bos_token, eos_token, kwargs]).encode(),
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            env={**os.environ, "PYTHONPATH": where},
        )
        problem, status = trial.stdout.decode("utf-8", "replace"), trial.returncode
    except subprocess.TimeoutExpired:
        problem, status = "", -1
    if status < 0:
        raise DataError(
            "the chat template cannot write this conversation: it takes more than "
            f"{_CPU_SECONDS} s or {_BYTES >> 20} MiB"
        )
    if problem:
        raise DataError(problem)
    if status:
        raise DataError(f"the chat template cannot be tried: {trial.stderr[-1000:]!r}")


def _main() -> None:
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_DATA, _BYTES),
    ):
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit, most))
    given = json.load(sys.stdin)
    try:
        if not is_dated(*given):  # or it is refused for that
            template, *rest = given
            find_frames(lambda turns: render(template, turns, *rest))
            reading = TemplateReading(
                lambda text: render(template, text, *rest), names_in(template)
            )
            reading.try_all()
    except DataError as error:
        sys.stdout.buffer.write(str(error).encode("utf-8", "replace"))


if __name__ == "__main__":
    _main()
