"""Settings and JSON of untrusted checkpoints are small plain data, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.nemo.open import open_nemo
from tests.checkpoint.loading import load
from tests.checkpoint.refusals import refusals

LAUGHS = "a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


def test_untrusted_settings_are_small_plain_data(unpacked: Path, layout: Any) -> None:
    with refusals() as refused:
        for text, message in (
            (LAUGHS, "unfolds to more than 100000"),
            ("a: &a [*a]", "within itself|recursive"),
            ("a: " + "[" * 2000 + "]" * 2000, "nested deeper|RecursionError"),
            ("a: " + "9" * 5000, "a number of 5000 digits"),
            ("a: 0x" + "f" * 5000, "a number of 5002 digits"),
            ("a: !!python/name:os.system ''", "could not determine a constructor"),
            ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
            ("a: !nemo.run {x: 1}", "could not determine a constructor"),
            ("? [a, b]\n: c", "ConstructorError|wanted"),
            ("x: " + "y" * 2**21, "wanted at most 1048576"),
            ("a: \x00", "ReaderError"),
            ("a: [", r"model_config\.yaml"),
            ("- a list", "got list, wanted a mapping"),
        ):
            (unpacked / "model_config.yaml").write_text(text)
            with refused(text[:40], message):
                load(unpacked, layout)


def test_untrusted_json_is_small_plain_data(unpacked: Path) -> None:
    with refusals() as refused:
        for name, content in (
            ("scoring_contract.json", "[" * 100_000),
            ("scoring_contract.json", "1" * 5000),
            ("scoring_contract.json", "[]"),
            ("model_weights/metadata.json", "[" * 100_000),
            ("checksums.json", "{"),
            ("checksums.json", '{"model_config.yaml": [1]}'),
        ):
            path = unpacked / name
            before = path.read_bytes() if path.exists() else None
            path.write_text(content)
            with (
                refused((name, content[:40]), path.name),
                open_nemo(unpacked) as opened,
            ):
                _ = opened.contract
            path.unlink() if before is None else path.write_bytes(before)
