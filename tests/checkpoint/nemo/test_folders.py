"""Folders of NeMo and Megatron: whose they are, their settings, and their tokenizers."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.checkpoint.weights.index import read_metadata
from nemo_aligner.errors import CheckpointError
from tests.checkpoint import foreign
from tests.checkpoint.foreign import (
    bridge,
    megatron_lm,
    nemo1,
    nemo2,
)
from tests.checkpoint.loading import (
    Tensors,
    check,
    import_nemo,
    load,
)


def test_the_settings_are_those_of_the_converter(
    base: Path, tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    """The forms of one model read as the same shape, and that as Hugging Face's conversion."""
    import dataclasses

    from nemo_aligner.models.shape import ModelShape

    with open_nemo(base, with_weights=False) as folder:
        wanted = ModelShape.from_config(folder.config)
    for write in (nemo1, nemo2, bridge, megatron_lm):
        source = write(tmp_path / write.__name__, tensors, tokenizer_folder)
        with open_nemo(source, with_weights=False) as folder:
            shape = ModelShape.from_config(folder.config)
        rows = foreign.PADDED if write is megatron_lm else wanted.vocab_size
        assert shape == dataclasses.replace(wanted, vocab_size=rows), write.__name__


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"library": "huggingface", "type": "meta-llama/Llama-3.1-8B"}, "only the name of one"),
        ({"library": "sentencepiece", "model": "nemo:ab_tokenizer.model"}, "got the file"),
    ],
)
def test_another_form_of_tokenizer_wants_a_folder(
    section: dict,
    message: str,
    tensors: Tensors,
    tokenizer_folder: Path,
    layout: Any,
    tmp_path: Path,
) -> None:
    config = foreign.write_nemo1(tmp_path / "theirs", tensors, tokenizer_folder)
    text = yaml.safe_dump({**config, "tokenizer": section})
    (tmp_path / "theirs" / "model_config.yaml").write_text(text)
    (tmp_path / "theirs" / "ab_tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(
        CheckpointError, match=f"{message}.*nemo-aligner import` takes such a folder"
    ):
        load(tmp_path / "theirs", layout)
    import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo", tokenizer=tokenizer_folder)
    check(load(tmp_path / "ours.nemo", layout).model, tensors)


def test_common_pt_without_arguments_wants_a_config(
    base: Path, tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    inner = foreign.write_megatron_lm(tmp_path / "theirs", tensors, tokenizer_folder)
    torch.save({"iteration": 123}, inner / "common.pt")
    with pytest.raises(
        CheckpointError, match=r"no args of Megatron-LM.*nemo-aligner import` takes a model_config"
    ):
        load(tmp_path / "theirs", layout)
    config = tmp_path / "model_config.yaml"
    config.write_text(yaml.safe_dump({**foreign.nemo1_config(), "vocab_size": 320}))
    import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo", config=config)
    check(load(tmp_path / "ours.nemo", layout).model, tensors)


@pytest.mark.parametrize("tracked", [True, False])
def test_arguments_may_lie_among_the_tensors(
    tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path, tracked: bool
) -> None:
    inner = foreign.write_megatron_lm(
        tmp_path / "theirs", tensors, tokenizer_folder, among_pieces=True
    )
    assert not (inner / "common.pt").exists()
    source = tmp_path / "theirs" if tracked else inner
    check(load(source, layout).model, tensors)


def test_arguments_nowhere_want_a_config(
    tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    inner = foreign.write_megatron_lm(tmp_path / "theirs", tensors, tokenizer_folder)
    (inner / "common.pt").unlink()
    metadata = read_metadata(inner)
    for index in [index for index in metadata.storage_data if "common_state" in index.fqn]:
        del metadata.storage_data[index]
    (inner / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"got neither common\.pt nor common_state"):
        load(tmp_path / "theirs", layout)


def test_what_is_not_nemos_is_told_where_to_go(base: Path, layout: Any, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    gguf, adapter = tmp_path / "model.gguf", tmp_path / "adapter"
    gguf.write_bytes(b"GGUF" + bytes(1000))
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    packed = foreign.pack(base.with_suffix(".hf"), tmp_path / "packed.nemo", "w")
    for source in (base.with_suffix(".hf"), gguf, packed):
        with pytest.raises(CheckpointError, match=r"^.*/\S*: got a .*nemo-aligner convert"):
            load(source, layout)
    for write in (import_nemo, convert_hf_to_nemo):
        with pytest.raises(CheckpointError, match=r"adapter: got an adapter.*its base first"):
            write(adapter, tmp_path / "ours.nemo")
    with pytest.raises(CheckpointError, match="no such"):
        load(tmp_path / "nowhere.gguf", layout)


@pytest.mark.parametrize("among_pieces", [False, True])
def test_a_namespace_with_code_is_not_run(
    tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path, among_pieces: bool
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "executed",)

    inner = foreign.write_megatron_lm(tmp_path / "theirs", tensors, tokenizer_folder)
    common = {"args": Namespace(num_layers=Bomb())}
    torch.save(common, inner / "common.pt")
    if among_pieces:
        foreign.put_common_among_pieces(inner, common)
    with pytest.raises(CheckpointError, match=r"common(\.pt|_state/shard_0_1): refused"):
        load(tmp_path / "theirs", layout)
    assert not (tmp_path / "executed").exists()


def test_a_tokenizer_that_is_not_text_is_refused(unpacked: Path) -> None:
    from nemo_aligner.errors import DataError
    from nemo_aligner.text.tokenizer import Tokenizer, load_tokenizer

    def use(tokenizer: Tokenizer) -> None:
        _ = tokenizer.fingerprint, tokenizer.chat_template, tokenizer.bos_id

    for name, content in (
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"bos_token": 5}'),
        ("tokenizer_config.json", b"\xff"),
        ("chat_template.jinja", b"\xff"),
    ):
        path = unpacked / "tokenizer" / name
        before = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(DataError, match=name):
            use(load_tokenizer(unpacked / "tokenizer"))
        path.write_bytes(before)
