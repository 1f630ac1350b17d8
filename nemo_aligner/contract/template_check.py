"""Checks of a chat template before it is used, by writing conversations with it; and its date.

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
_DATE = "strftime_now"
_DAYS = (datetime(2001, 2, 3), datetime(2034, 11, 30, 13, 47, 59))
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


# 26 July 2024, 00:00, by each of strftime's letters, in English whatever the locale. It is the date
# that Llama 3's templates write where they are not told the day. It is part of contracts.
_FROZEN_DAY = {
    **{"a": "Fri", "A": "Friday", "w": "5", "u": "5", "d": "26", "-d": "26", "e": "26", "j": "208"},
    **{"b": "Jul", "h": "Jul", "B": "July", "m": "07", "-m": "7", "y": "24", "Y": "2024"},
    **{"C": "20", "g": "24", "G": "2024", "U": "29", "V": "30", "W": "30", "-j": "208"},
    **{"D": "07/26/24", "F": "2024-07-26", "x": "07/26/24", "c": "Fri Jul 26 00:00:00 2024"},
    **{"H": "00", "-H": "0", "k": " 0", "I": "12", "-I": "12", "l": "12", "p": "AM", "P": "am"},
    **{"M": "00", "-M": "0", "S": "00", "-S": "0", "f": "000000", "z": "", "Z": ""},
    **{"R": "00:00", "T": "00:00:00", "X": "00:00:00", "r": "12:00:00 AM"},
}


def _frozen_function() -> str:
    """A macro in place of the function; the line break behind it is none of the text."""
    replaced = "".join(f".replace('%{form}','{said}')" for form, said in _FROZEN_DAY.items())
    # Between two %% no letter is meant.
    return (
        f"{{%- macro {_DATE}(format) -%}}{{%- for part in format.split('%%') -%}}"
        f"{{{{ '' if loop.first else '%' }}}}{{{{ part{replaced} }}}}"
        "{%- endfor -%}{%- endmacro %}\n"
    )


@lru_cache(maxsize=8)
def freeze_date(template: str, bos_token: str, eos_token: str, kwargs: str = "") -> str:
    """A template that writes today's date, with 26 July 2024 for every day; others as they are.

    A macro at its beginning takes the place of the function that says the day, for whoever renders
    it. What is done is said in a line, once.
    """
    from nemo_aligner.utils.console import say

    try:
        if _DATE not in variables_of(template):
            return template
        check_it_ends(template, bos_token, eos_token, kwargs)
        if not is_dated(template, bos_token, eos_token, kwargs):
            return template
    except DataError:  # which check_template says
        return template
    say("the chat template writes today's date: it gets 26 July 2024, so that scores stay the same")
    return _frozen_function() + template


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
