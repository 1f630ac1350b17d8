"""Options are read, and wrong ones told."""

from __future__ import annotations

import argparse

import pytest

from nemo_aligner.cli.parser import Parser, fraction, names, positive

Captured = pytest.CaptureFixture[str]


def options_of(*argv: str) -> argparse.Namespace:
    parser = Parser("try", "Tries.")
    parser.add_argument("--gpu-memory", type=int, default=3)
    parser.add_argument("things", nargs="*")
    return parser.parse(argv)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpu-memry=3"], "got --gpu-memry=3, which is not known; did you mean --gpu-memory?"),
        (["--wholly-other"], "got --wholly-other, which is not known"),
        (["--gpu-memory", "x"], "argument --gpu-memory: invalid int value: 'x'"),
    ],
)
def test_a_wrong_flag_is_two_lines_and_exit_code_2(
    argv: list[str], said: str, capsys: Captured
) -> None:
    with pytest.raises(SystemExit) as end:
        options_of(*argv)
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        f"nemo-aligner try: {said}\nnemo-aligner try --help lists what there is\n"
    )


def test_flags_may_stand_between_arguments() -> None:
    options = options_of("a=1", "--gpu-memory", "5", "b=2", "--debug")
    assert (options.things, options.gpu_memory, options.debug) == (["a=1", "b=2"], 5, True)


def test_names_are_stripped() -> None:
    assert names("help, style ,length") == ("help", "style", "length")
    assert names("a,,b") == ("a", "", "b")
    assert names(" ") == ()


def test_numbers_are_checked() -> None:
    assert (fraction("0.25"), positive("12")) == (0.25, 12)
    for text in ("0", "1", "-0.5"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"got {text}, wanted"):
            fraction(text)
    for text in ("0", "-1", "2.5", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"got '{text}', wanted"):
            positive(text)
