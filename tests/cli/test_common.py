"""What every verb does around its work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pytest

from nemo_aligner.cli.common import errors_name_flags, fraction, names, positive, run_verb
from nemo_aligner.errors import CheckpointError, ConfigError, DataError


def test_an_error_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(argv: Sequence[str]) -> int:
        raise DataError(f"got {list(argv)}")

    assert run_verb(fails, ["a"]) == 1
    assert run_verb(fails, [], name="script.py") == 1
    assert capsys.readouterr().err == "DataError: got ['a']\nscript.py: got []\n"
    assert run_verb(lambda argv: len(argv), ["a", "b"]) == 2


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("gpu_memory: got 3", "--gpu-memory: got 3"),
        ("model.optim.lr: got 3", "model.optim.lr: got 3"),
        ("other: got 3", "other: got 3"),
        ("nothing fits", "nothing fits"),
    ],
)
def test_an_error_names_the_flag_where_the_key_has_one(said: str, shown: str) -> None:
    options = argparse.Namespace(gpu_memory=3, model=4)
    for kind in (ConfigError, CheckpointError):
        with pytest.raises(kind) as caught, errors_name_flags(options):
            raise kind(said)
        assert str(caught.value) == shown


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
