"""What an examination of this machine finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """``note`` is good to know; ``missing`` is to be mended before the package works."""

    ok = "ok"
    note = "note"
    missing = "missing"


@dataclass(frozen=True)
class Finding:
    """``name: value``, how good that is, and what to do about it or what it means."""

    name: str
    value: str
    verdict: Verdict = Verdict.ok
    advice: str = ""
