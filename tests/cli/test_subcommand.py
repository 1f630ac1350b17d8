from __future__ import annotations

from nemo_aligner.subcommand import show_command


def test_a_command_is_shown_as_one_would_type_it() -> None:
    assert show_command("score", ["a b"], "$ ") == "$ nemo-aligner score 'a b'"
    long = 70 * "x"
    assert show_command("train", ["a=1", f"b={long}"], "$ ") == (
        f"$ nemo-aligner train \\\n      a=1 \\\n      b={long}"
    )


def test_an_option_stays_with_its_value() -> None:
    long = 70 * "x"
    assert show_command("export", ["--input", long, "--merge"]) == (
        f"nemo-aligner export \\\n    --input {long} \\\n    --merge"
    )
