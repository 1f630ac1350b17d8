"""Is this machine fit for training and serving, and what does it lack?

Nothing is imported before it is asked for, and nothing need work: that is what is asked about.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from nemo_aligner.diagnostics.finding import Finding, Verdict
from nemo_aligner.diagnostics.installed import flash_attention, gpu_packages, import_torch, packages
from nemo_aligner.diagnostics.machine import compiler, gpus, port, processor, space

_WIDTH = 80
_INDENT = 10


def examine() -> list[Finding]:
    """Packages, devices, memory, disk, port and compiler, in the order in which to read them."""
    torch = import_torch()
    has_gpu = torch is not None and torch.cuda.is_available()
    return [
        *packages(),
        *gpus(torch),
        *gpu_packages(),
        *([flash_attention()] if has_gpu else []),
        *processor(has_gpu),
        *space(),
        port(),
        compiler(has_gpu),
    ]


def render(findings: Sequence[Finding]) -> str:
    """A line for each finding, its advice below it, and what they come to; at most 80 columns."""
    lines = []
    for each in findings:
        mark = "" if each.verdict is Verdict.ok else each.verdict.value.upper()
        lines += _wrapped(f"{each.name}: {each.value}", f"{mark:<{_INDENT}}")
        lines += _wrapped(f"-> {each.advice}", " " * _INDENT) if each.advice else []
    missing = sum(each.verdict is Verdict.missing for each in findings)
    notes = sum(each.verdict is Verdict.note for each in findings)
    return "\n".join([*lines, f"missing: {missing}, notes: {notes}"])


def _wrapped(text: str, beginning: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=beginning,
        subsequent_indent=" " * (_INDENT + 3),
        break_on_hyphens=False,
    )
