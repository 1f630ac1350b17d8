"""What this machine has, and what is missing, with the command that brings it."""

from __future__ import annotations

import argparse

from nemo_aligner.cli.parser import Parser

_DOCTOR = """\
What this machine has, and what is missing, with the command that brings it."""


def doctor_parser() -> Parser:
    """The options of ``nemo-aligner doctor``."""
    return Parser("doctor", _DOCTOR)


def run_doctor(options: argparse.Namespace) -> int:
    """0 where nothing is missing that training and scoring need."""
    from nemo_aligner.tools.doctor import Verdict, examine, render

    findings = examine()
    print(render(findings))
    return int(any(finding.verdict is Verdict.missing for finding in findings))
