"""Untrusted settings, JSON and tokenizers are small plain data, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.safe_load import read_yaml
from nemo_aligner.contract.tokenizer import load_tokenizer
from nemo_aligner.utils.errors import CheckpointError, DataError
from tests.checkpoint.fuzzing import LAUGHS
from tests.checkpoint.loading import load
from tests.checkpoint.refusals import check_damages, overwrite

SETTINGS: list[tuple[bytes | str, str]] = [
    (LAUGHS, "expand to more than 100000"),
    ("a: &a [*a]", "contains itself|recursive"),
    ("a: " + "[" * 2000 + "]" * 2000, "nested deeper|RecursionError"),
    ("a: " + "[" * 60 + "]" * 60, "nested deeper"),
    (b"a: \xff", r"model_config\.yaml: .*utf-8"),
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
]


def test_untrusted_settings_are_small_plain_data(unpacked: Path, layout: Any) -> None:
    damages = [(overwrite("model_config.yaml", text), pattern) for text, pattern in SETTINGS]
    check_damages(unpacked, damages, lambda folder: load(folder, layout))


def test_untrusted_settings_may_have_a_long_text_but_not_repeat_it(tmp_path: Path) -> None:
    path, text = tmp_path / "settings.yaml", "y" * 500_000
    path.write_text(f"a: {text}")
    assert read_yaml(path, "settings") == {"a": text}
    path.write_text(f"a: &a {text}\nb: [*a, *a]")
    with pytest.raises(
        CheckpointError, match="settings: its aliases expand to more than 100000 values"
    ):
        read_yaml(path, "settings")


def test_untrusted_json_is_small_plain_data(unpacked: Path) -> None:
    def read_contract(folder: Path) -> None:
        with open_nemo(folder) as opened:
            _ = opened.contract

    files = [
        ("scoring_contract.json", "[" * 100_000),
        ("scoring_contract.json", "1" * 5000),
        ("scoring_contract.json", "[]"),
        ("scoring_contract.json", '{"a": ' + "[" * 60 + "]" * 60 + "}"),
        ("model_weights/metadata.json", "[" * 100_000),
        ("checksums.json", "{"),
        ("checksums.json", '{"model_config.yaml": [1]}'),
    ]
    damages = [(overwrite(*file), Path(file[0]).name) for file in files]
    check_damages(unpacked, damages, read_contract)


def test_untrusted_tokenizer_is_text(unpacked: Path) -> None:
    def read_tokenizer(folder: Path) -> None:
        tokenizer = load_tokenizer(folder)
        _ = tokenizer.fingerprint, tokenizer.chat_template, tokenizer.bos_id

    files = [
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"bos_token": 5}'),
        ("tokenizer_config.json", b"\xff"),
        ("chat_template.jinja", b"\xff"),
    ]
    damages = [(overwrite(*file), file[0]) for file in files]
    check_damages(unpacked / "tokenizer", damages, read_tokenizer, DataError)
