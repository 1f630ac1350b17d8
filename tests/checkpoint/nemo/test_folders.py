"""Folders of NeMo, Megatron and our runs: where their settings, tokenizer and weights are."""

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
from nemo_aligner.errors import CheckpointError, DataError
from tests.checkpoint import foreign
from tests.checkpoint.foreign import ITERATION, megatron_lm
from tests.checkpoint.loading import Bomb, Tensors, Theirs, check, edit, import_nemo, load, refuse
from tests.checkpoint.refusals import refusals

STEP = "checkpoints/step_00000100"


def test_folder_with_another_form_of_tokenizer_wants_a_folder(
    theirs: Theirs, tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    source = theirs()
    (source / "ab_tokenizer.model").write_bytes(b"sentencepiece")
    with refusals() as refused:
        for section, message in (
            ({"library": "huggingface", "type": "meta-llama/Llama-3.1-8B"}, "only the name of one"),
            ({"library": "sentencepiece", "model": "nemo:ab_tokenizer.model"}, "got the file"),
        ):
            edit(source, tokenizer=section)
            with refused(section, f"{message}.*nemo-aligner import` takes such a folder"):
                load(source, layout)
    import_nemo(source, tmp_path / "ours.nemo", tokenizer=tokenizer_folder)
    check(load(tmp_path / "ours.nemo", layout).model, tensors)


def test_megatron_lm_without_arguments_wants_a_config(
    theirs: Theirs, tensors: Tensors, layout: Any, tmp_path: Path
) -> None:
    source = theirs(megatron_lm)
    inner = source / ITERATION
    torch.save({"iteration": 123}, inner / "common.pt")
    refuse(source, layout, r"no args of Megatron-LM.*nemo-aligner import` takes a model_config")
    config = tmp_path / "model_config.yaml"
    config.write_text(yaml.safe_dump({**foreign.nemo1_config(), "vocab_size": 320}))
    import_nemo(source, tmp_path / "ours.nemo", config=config)
    check(load(tmp_path / "ours.nemo", layout).model, tensors)

    (inner / "common.pt").unlink()
    metadata = read_metadata(inner)
    for index in [index for index in metadata.storage_data if "common_state" in index.fqn]:
        del metadata.storage_data[index]
    (inner / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(source, layout, r"got neither common\.pt nor common_state")


def test_megatron_lm_arguments_may_lie_among_the_tensors(
    theirs: Theirs, tensors: Tensors, layout: Any
) -> None:
    run = theirs(megatron_lm, among_pieces=True)
    assert not (run / ITERATION / "common.pt").exists()
    for source in (run, run / ITERATION):
        check(load(source, layout).model, tensors)


def test_megatron_lm_arguments_with_code_are_not_run(
    theirs: Theirs, layout: Any, tmp_path: Path
) -> None:
    source = theirs(megatron_lm)
    common = {"args": Namespace(num_layers=Bomb(tmp_path / "executed"))}
    torch.save(common, source / ITERATION / "common.pt")
    refuse(source, layout, r"common\.pt: refused")
    foreign.put_common_among_pieces(source / ITERATION, common)
    refuse(source, layout, r"common_state/shard_0_1: refused")
    assert not (tmp_path / "executed").exists()


def test_folder_that_is_not_nemos_is_told_where_to_go(
    base: Path, layout: Any, tmp_path: Path
) -> None:
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    hf, gguf, adapter = base.with_suffix(".hf"), tmp_path / "model.gguf", tmp_path / "adapter"
    gguf.write_bytes(b"GGUF" + bytes(1000))
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    packed = foreign.pack(hf, tmp_path / "packed.nemo", "w")
    with refusals() as refused:
        for source in (hf, gguf, packed):
            with refused(source.name, r"^.*/\S*: got a .*nemo-aligner convert"):
                load(source, layout)
        for write in (import_nemo, convert_hf_to_nemo):
            with refused(write.__name__, r"adapter: got an adapter.*its base first"):
                write(adapter, tmp_path / "ours.nemo")
        with refused("nowhere", "no such"):
            load(tmp_path / "nowhere.gguf", layout)


def test_tokenizer_that_is_not_text_is_refused(unpacked: Path) -> None:
    from nemo_aligner.text.tokenizer import load_tokenizer

    with refusals(DataError) as refused:
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
            with refused((name, content[:20]), name):
                tokenizer = load_tokenizer(unpacked / "tokenizer")
                _ = tokenizer.fingerprint, tokenizer.chat_template, tokenizer.bos_id
            path.write_bytes(before)


def make_run(folder: Path, *names: str) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def refused_run(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught, open_nemo(path):
        pass
    return str(caught.value)


def test_run_given_for_a_model_names_its_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", f"{STEP}/run_state.json", f"{STEP}/state/common.pt")
    parts = {
        run: "a training run",
        run / "checkpoints": "the checkpoints of a training run",
        run / STEP: "a checkpoint of a training run",
        run / STEP / "state": "a part of a checkpoint of a training run",
    }
    for path, what in parts.items():
        assert refused_run(path) == (
            f"{path}: got {what}, wanted a model; the run has not come to its end: its training "
            f"with trainer.rm.max_steps=100 writes {run}/checkpoints/megatron_gpt.nemo"
        )
    (run / "checkpoints" / "megatron_gpt.nemo").write_text("")
    for path, what in parts.items():
        assert refused_run(path) == (
            f"{path}: got {what}, wanted a model; the run's is {run}/checkpoints/megatron_gpt.nemo"
        )


def test_run_given_for_a_model_names_its_newest_step(tmp_path: Path) -> None:
    steps = [f"checkpoints/step_{step:08d}/run_state.json" for step in (100, 1200, 900)]
    assert "trainer.rm.max_steps=1200 writes" in refused_run(make_run(tmp_path / "first", *steps))
    said = refused_run(make_run(tmp_path / "second"))
    assert said.endswith("the run has not come to its end: it has no checkpoint yet")
    (tmp_path / "config.yaml").write_text("")
    assert "wanted a checkpoint of NeMo or Megatron" in refused_run(tmp_path)
