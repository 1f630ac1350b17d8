"""Settings, tokenizer and weights in folders of NeMo, Megatron, and this package's runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.importing import import_checkpoint as import_nemo
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint import foreign
from tests.checkpoint.foreign import ITERATION, megatron_lm
from tests.checkpoint.loading import Bomb, Tensors, Theirs, check, edit, load, refuse
from tests.checkpoint.refusals import refusals
from tests.checkpoint.weights.test_store_index import edited_index

STEP = "checkpoints/step_00000100"


def test_folder_with_another_form_of_tokenizer_wants_a_folder(
    theirs: Theirs, tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    source = theirs()
    (source / "ab_tokenizer.model").write_bytes(b"sentencepiece")
    with refusals() as refused:
        for section, message in (
            (
                {"library": "huggingface", "type": "meta-llama/Llama-3.1-8B"},
                "only the name of a tokenizer",
            ),
            ({"library": "sentencepiece", "model": "nemo:ab_tokenizer.model"}, "got the file"),
        ):
            edit(source, tokenizer=section)
            with refused(section, f"{message}.*nemo-aligner import`"):
                load(source, layout)
    import_nemo(source, tmp_path / "ours.nemo", tokenizer=tokenizer_folder)
    check(load(tmp_path / "ours.nemo", layout).model, tensors)


def test_folder_whose_settings_name_no_tokenizer_has_its_own(unpacked: Path, layout: Any) -> None:
    edit(unpacked, tokenizer={})
    assert load(unpacked, layout).tokenizer.vocab_size > 0


def test_megatron_lm_without_arguments_wants_a_config(
    theirs: Theirs, tensors: Tensors, layout: Any, tmp_path: Path
) -> None:
    source = theirs(megatron_lm)
    inner = source / ITERATION
    torch.save({"iteration": 123}, inner / "common.pt")
    refuse(source, layout, r"no args of Megatron-LM.*nemo-aligner import` a model_config")
    config = tmp_path / "model_config.yaml"
    config.write_text(yaml.safe_dump({**foreign.nemo1_config(), "vocab_size": 320}))
    import_nemo(source, tmp_path / "ours.nemo", config=config)
    check(load(tmp_path / "ours.nemo", layout).model, tensors)

    (inner / "common.pt").unlink()
    with edited_index(inner) as metadata:
        stored = metadata.storage_data
        metadata.storage_data = {i: stored[i] for i in stored if "common_state" not in i.fqn}
    refuse(source, layout, r"neither common\.pt nor common_state")


def test_megatron_lm_arguments_may_lie_among_the_tensors_and_are_never_code(
    theirs: Theirs, tensors: Tensors, layout: Any, tmp_path: Path
) -> None:
    run = theirs(megatron_lm, among_shards=True)
    assert not (run / ITERATION / "common.pt").exists()
    for source in (run, run / ITERATION):
        check(load(source, layout).model, tensors)
    common = {"args": Namespace(num_layers=Bomb(tmp_path / "executed"))}
    foreign.put_common_among_shards(run / ITERATION, common)
    refuse(run, layout, r"common_state/shard_0_1: cannot be read safely")
    (run / ITERATION / "__9_0.distcp").unlink()
    refuse(run, layout, r"__9_0\.distcp: common_state/shard_0_1: cannot be read")
    torch.save(common, run / ITERATION / "common.pt")
    refuse(run, layout, r"common\.pt: cannot be read safely")
    assert not (tmp_path / "executed").exists()


def test_folder_that_is_not_nemos_is_told_where_to_go(
    base: Path, layout: Any, tmp_path: Path
) -> None:
    hf, adapter = base.with_suffix(".hf"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    packed = foreign.pack(hf, tmp_path / "packed.nemo", "w")
    with refusals() as refused:
        message = r"^.*/\S*: got a .*nemo-aligner convert"
        with refused("packed", message):
            load(packed, layout)
        with refused("import", message):
            import_nemo(hf, tmp_path / "ours.nemo")
        for write in (import_nemo, convert_hf_to_nemo):
            with refused(write.__name__, r"adapter: got an adapter.*its base first"):
                write(adapter, tmp_path / "ours.nemo")
        with refused("nowhere", "there is no checkpoint"):
            load(tmp_path / "nowhere.gguf", layout)


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


def test_run_given_for_a_model_names_its_model_or_newest_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", f"{STEP}/run_state.json", f"{STEP}/state/common.pt")
    model = f"{run}/checkpoints/megatron_gpt.nemo"
    parts = {
        run: "a training run, ",
        run / "checkpoints": "the checkpoints of a training run, ",
        run / STEP: "a checkpoint of a training run, ",
        run / STEP / "state": "a part of a checkpoint of a training run, ",
    }
    for advice in ("trainer.rm.max_steps=100", "Pass the run's model"):
        for path, description in parts.items():
            message = refused_run(path)
            assert message.startswith(f"{path}: this is {description}")
            assert advice in message
            assert message.endswith(model)
        (run / "checkpoints" / "megatron_gpt.nemo").write_text("")
    steps = [f"checkpoints/step_{step:08d}/run_state.json" for step in (100, 1200, 900)]
    assert "trainer.rm.max_steps=1200" in refused_run(make_run(tmp_path / "second", *steps))
    assert "it has no checkpoint yet" in refused_run(make_run(tmp_path / "third"))
    (tmp_path / "config.yaml").write_text("")
    assert "wanted a checkpoint of NeMo or Megatron" in refused_run(tmp_path)
