"""Settings and JSON that anyone may have written are small plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.errors import CheckpointError
from tests.checkpoint.loading import (
    refuse,
)

LAUGHS = "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "unfolds to more than 100000"),
        ("a: &a [*a]", "within itself|recursive"),
        ("a: " + "[" * 2000 + "]" * 2000, "nested deeper|RecursionError"),
        ("a: " + "9" * 5000, "a number of 5000 digits"),
        ("a: 0x" + "f" * 5000, "a number of 5002 digits"),
        ("a: !!python/name:os.system ''", "could not determine a constructor"),
        ("a: !nemo.run {x: 1}", "could not determine a constructor"),
        ("? [a, b]\n: c", "ConstructorError|wanted"),
        ("x: " + "y" * 2**21, "wanted at most 1048576"),
        ("a: \x00", "ReaderError"),
    ],
    ids=["laughs", "cycle", "deep", "digits", "hex", "tag", "own_tag", "key", "long", "control"],
)
def test_settings_are_small_plain_data(
    text: str, message: str, unpacked: Path, layout: Any
) -> None:
    (unpacked / "model_config.yaml").write_text(text)
    refuse(unpacked, layout, message)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("scoring_contract.json", "[" * 100_000),
        ("scoring_contract.json", "1" * 5000),
        ("scoring_contract.json", "[]"),
        ("model_weights/metadata.json", "[" * 100_000),
        ("checksums.json", "{"),
        ("checksums.json", '{"model_config.yaml": [1]}'),
    ],
)
def test_json_is_small_plain_data(name: str, content: str, unpacked: Path, layout: Any) -> None:
    (unpacked / name).write_text(content)
    with (
        pytest.raises(CheckpointError, match=name.rpartition("/")[2]),
        open_nemo(unpacked) as opened,
    ):
        _ = opened.contract
