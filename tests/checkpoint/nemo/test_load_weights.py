"""Loading weights into a model: shapes must fit the settings, and all layouts agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from megatron.core import dist_checkpointing
from megatron.core.activations import fast_gelu

from nemo_aligner.checkpoint.importing import import_checkpoint as import_nemo
from nemo_aligner.checkpoint.nemo import reward_model
from nemo_aligner.checkpoint.nemo.archive import open_nemo, unpack
from nemo_aligner.checkpoint.nemo.checksums import CHECKSUMS_NAME
from nemo_aligner.checkpoint.nemo.load_weights import (
    lazy_decoder,
    load_backbone,
    model_shape,
)
from nemo_aligner.checkpoint.nemo.reward_model import (
    load_pretrained,
    load_reward_model,
    save_reward_model,
)
from nemo_aligner.checkpoint.weights.save import save_weights
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import LORA_TARGETS
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.lora import LoraShape, is_of_adapter
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint import foreign
from tests.checkpoint.foreign import Writer, bridge, nemo1, nemo2, zarr_folder
from tests.checkpoint.loading import (
    Tensors,
    Theirs,
    edit,
    head_of,
    load,
    refuse,
    scores,
)
from tests.checkpoint.refusals import check_damages, refusals
from tests.checkpoint.resave import LAYOUTS
from tests.checkpoint.weights.tensors import sharded
from tests.harness import families, tiny
from tests.harness.contracts import Contracts

LORA = LoraShape(3, 6.0, LORA_TARGETS)

# Settings of model_config.yaml that do not fit the weights.
SIZES = [
    {"hidden_size": 10**12},
    {"hidden_size": 2**30},
    {"num_layers": 10**9},
    {"ffn_hidden_size": 10**12},
    {"ffn_hidden_size": 2**30},
    {"num_attention_heads": 2**30},
    {"num_query_groups": 2**30},
    {"kv_channels": 2**30},
    {"vocab_size": 2**30},
    {"make_vocab_size_divisible_by": 2**30},
    {"num_layers": "four"},
    {"num_layers": [4]},
    {"num_attention_heads": 0},
    {"hidden_size": -16},
    {"hidden_size": 16.5},
    {"layernorm_epsilon": float("nan")},
    {"rotary_base": float("inf")},
    {"rotary_percentage": "all"},
    {"activation": ["fast-swiglu"]},
    {"normalization": "batchnorm"},
    {"position_embedding_type": "alibi"},
]


def test_settings_are_checked_before_anything_is_allocated(
    unpacked: Path, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(unpacked, layout)

    def build(*unused: Any, **options: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(reward_model, "build_reward_model", build)
    config = (unpacked / "model_config.yaml").read_text()
    with refusals() as refused:
        for changes in SIZES:
            (unpacked / "model_config.yaml").write_text(config)
            edit(unpacked, **changes)
            with refused(changes, next(iter(changes)) + "|layers of shape|settings imply"):
                load(unpacked, layout)


def test_weights_of_another_model_are_named(
    unpacked: Path, theirs: Theirs, layout: Any, tmp_path: Path
) -> None:
    """Surplus, missing and wrongly prefixed weights are named."""
    norm = "decoder.final_layernorm.weight"
    bias = {"decoder.layers.self_attention.linear_qkv.bias": torch.ones(foreign.LAYERS, 128)}
    with refusals() as refused:
        for write in (nemo1, bridge):
            with refused((write, "more"), r"do not belong to the model.*linear_qkv\.bias"):
                load(theirs(write, f"{write.__name__}_more", bias), layout)
            with refused((write, "fewer"), r"final_layernorm\.weight: got none"):
                load(theirs(write, f"{write.__name__}_fewer", {norm: None}), layout)
        source = theirs(nemo1, "mixed")
        shutil.rmtree(source / "model_weights")
        shutil.move(theirs(nemo2, "nemo2") / "weights", source / "model_weights")
        with refused("prefix", r"model\.embedding.*: got none"):
            load(source, layout)
        shutil.rmtree(unpacked / "model_weights")
        save_weights({"a": sharded(f"model.{norm}", torch.zeros(3))}, unpacked / "model_weights")
        with refused("shape", r"word_embeddings\.weight: got none"):
            load(unpacked, layout)
        with refused("bias", r"has a bias.*nemo-aligner import"):
            load(theirs(nemo1, "bias", head_of(1)), layout)


def ours(folder: Path, tensors: Tensors, tokenizer: Path) -> Path:
    """Write an archive of this package."""
    output = folder.with_suffix(".nemo")
    import_nemo(nemo1(folder, tensors, tokenizer), output)
    return output


@pytest.mark.parametrize("write", [bridge, ours, nemo2, zarr_folder], ids=lambda it: it.__name__)
def test_ranks_get_what_was_written_and_save_it_as_it_was(
    write: Writer, theirs: Theirs, tensors: Tensors, layout: Any, tmp_path: Path
) -> None:
    """At TP=2 and PP=2, from stacked and separate layers; the sums equal those of one process."""
    if write is zarr_folder:
        pytest.importorskip("zarr")
    source = theirs(write)
    done = tiny.run_script("tests/checkpoint/resave.py", str(source), str(tmp_path), processes=2)
    assert done.stdout.count("all ranks know: missing.nemo: there is no checkpoint") == 2 * len(
        LAYOUTS
    )
    assert "in one collective" not in done.stdout
    # The second rank has no C compiler, so no rank may use the C kernels, which round otherwise.
    assert done.stdout.count("kernels are used: False") == 2 * len(LAYOUTS)
    warnings = [line for line in done.stderr.splitlines() if "kernels.c" in line]
    assert len(warnings) == 1
    assert "rank 1: " in warnings[0]
    assert "C compiler" in warnings[0]
    request = load(source, layout).model.sharded_state_dict(prefix="model.")
    alone = json.dumps(save_weights(request, tmp_path / "alone"), sort_keys=True)
    sums = [line for line in done.stdout.splitlines() if "sums: " in line]
    assert [line.partition("sums: ")[2] for line in sums] == [alone] * 2 * len(LAYOUTS)
    for name in LAYOUTS:
        stored = dist_checkpointing.load_plain_tensors(str(tmp_path / name))
        actual = {key.removeprefix("model."): tensor for key, tensor in stored.items()}
        assert actual.keys() == tensors.keys() - {"output_layer.weight"} | {"rm_head.weight"}
        for key in actual.keys() & tensors.keys():
            rows = slice(tiny.SHAPE["vocab_size"] if "embedding" in key else None)
            torch.testing.assert_close(actual[key][rows], tensors[key][rows], rtol=0, atol=0)
            # The rows of padding in ``tensors`` are not 0.
            assert "embedding" not in key or not actual[key][rows.stop :].any()


def test_checkpoint_that_is_opened_has_its_index_read_once(
    index_reads: list[str], layout: Any, tmp_path: Path
) -> None:
    """To train and to score; without checksums every piece is read to be checked, too."""
    path = tiny.ROOT / "tests/paths/compatibility/files/regression.nemo"
    shutil.unpack_archive(path, tmp_path / "folder", "tar")
    (tmp_path / "folder" / "checksums.json").unlink()
    uses = (partial(load, attributes=2), load_reward_model)
    for source, use in product((path, tmp_path / "folder"), uses):
        index_reads.clear()
        use(source, layout=layout)
        assert len(index_reads) == 1
        assert index_reads[0].endswith("model_weights/.metadata")


def test_megatron_config_of_a_gemma_is_that_of_nemo_1(theirs: Theirs, layout: Any) -> None:
    """Bridge's names for Gemma's activation and embedding scaling give NeMo 1's settings."""
    numbers = torch.linspace(-4, 4, 101)
    gelu = torch.nn.functional.gelu(numbers, approximate="tanh")
    torch.testing.assert_close(fast_gelu(numbers), gelu)
    tied = {"output_layer.weight": None}
    expected = load(theirs(nemo1, "a", tied, **foreign.NEMO1_GEMMA), layout).model
    actual = load(theirs(bridge, "b", tied, **foreign.BRIDGE_GEMMA), layout).model
    torch.testing.assert_close(scores(actual, layout), scores(expected, layout), rtol=0, atol=0)


def test_megatron_config_of_layers_that_differ_is_read_by_its_own_names(
    theirs: Theirs, layout: Any
) -> None:
    """Windows, layers without RoPE, and YaRN are read by megatron-core's names."""
    settings = {
        "window_size": [7, 0],
        "window_attn_skip_freq": 2,
        "no_rope_freq": [0, 1, 0, 0],
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 16,
    }
    plain, expected = (
        scores(load(theirs(nemo1, name, **more), layout).model, layout)
        for name, more in (("a", {}), ("b", {**settings, "scale_positional_embedding": False}))
    )
    more = {**settings, "rope_scaling": False, "scale_factor": None}
    actual = scores(load(theirs(bridge, "c", **more), layout).model, layout)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert (actual - plain).abs().max() > 1e-2


# Settings of NeMo 2 and Megatron-Bridge that this package does not implement.
NOT_BUILT = [
    ({"rotary_interleaved": True}, "rotary_interleaved: got True"),
    ({"num_moe_experts": 8}, "num_moe_experts: got 8"),
    ({"multi_latent_attention": True}, "multi_latent_attention: got True"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: got 50.0"),
    ({"query_pre_attn_scalar": 224}, "query_pre_attn_scalar: got 224"),
    ({"use_mup": True}, "use_mup: got True"),
    ({"rotary_base_per_layer": [1e4, 1e6]}, "rotary_base_per_layer: got"),
    (
        {"_target_": "nemo.collections.llm.Gemma2Config2B", "query_pre_attn_scalar": 256},
        "_target_: got 'Gemma2Config2B'",
    ),
    ({"activation_func": foreign.function("torch.nn.functional.gelu")}, "activation_func"),
    ({"normalization": "BatchNorm"}, "normalization: got 'BatchNorm'"),
    ({"add_bias_linear": True}, "add_bias_linear: got True"),
    ({"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
    ({"num_layers": 5}, "4 layers of shape.*imply 5"),
    ({"num_query_groups": None}, "linear_qkv"),
    ({"seq_length": None}, "max_position_embeddings|NoneType|None"),
]
# NeMo 1 also sets fields of megatron-core's ``TransformerConfig``, at the top or in a section.
SECTION = "mcore_customization_config"
NOT_BUILT_OF_NEMO_1 = [
    ({"softmax_scale": 0.1}, r"model_config\.yaml: softmax_scale: got 0\.1"),
    ({SECTION: {"query_pre_attn_scalar": 224}}, f"{SECTION}: query_pre_attn_scalar: got 224"),
    ({SECTION: {"no_rope_freq": 2}}, f"{SECTION}: no_rope_freq: got 2"),
    ({SECTION: [1]}, f"{SECTION}: got .*wanted a mapping"),
]


def test_megatron_config_of_what_is_not_built_is_refused(theirs: Theirs, layout: Any) -> None:
    second, first = theirs(nemo2, "nemo2"), theirs(nemo1, "nemo1")
    with refusals() as refused:
        for changes, pattern in NOT_BUILT:
            (second / "context/model.yaml").write_text(foreign.nemo2_settings(**changes))
            with refused(changes, pattern):
                load(second, layout)
        for changes, pattern in NOT_BUILT_OF_NEMO_1:
            edit(first, **foreign.nemo1_config(**changes))
            with refused(changes, pattern):
                load(first, layout)
            edit(first, softmax_scale=None)
    edit(first, **{SECTION: {"num_microbatches_per_virtual_pipe": 4}})  # changes no hidden state
    load(first, layout)


@pytest.fixture(scope="module")
def with_lora(layout: Any, contracts: Contracts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a reward model with LoRA whose matrices are all random, and none zero."""
    place = tmp_path_factory.mktemp("lora")
    base = tiny.write_base_nemo(place / "base.nemo")
    loaded = load_pretrained(base, layout, num_attributes=1, precision=Precision.fp32, lora=LORA)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if is_of_adapter(name):
                parameter.normal_()
    contract = build_contract(contracts.config(), loaded.tokenizer, Precision.fp32)
    path = place / "rm.nemo"
    save_reward_model(path, loaded.model, loaded.config, loaded.tokenizer, contract)
    return path


def test_lora_is_loaded_as_it_was_saved(with_lora: Path, layout: Any, tmp_path: Path) -> None:
    loaded = load_reward_model(with_lora, layout)
    path = tmp_path / "again.nemo"
    save_reward_model(path, loaded.model, loaded.config, loaded.tokenizer, loaded.contract)
    again = load_reward_model(path, layout)
    actual, expected = (dict(pretrained.model.named_parameters()) for pretrained in (again, loaded))
    assert actual.keys() == expected.keys()
    assert sum(map(is_of_adapter, actual)) == 4 * 2 * 4  # layers, A and B, linear layers
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert all(expected[name].any() for name in expected if is_of_adapter(name))


def test_save_that_fails_leaves_no_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(weights: object, folder: Path, arrived: None) -> None:
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(bytes(1000))
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(reward_model, "save_weights", fail)
    model: Any = SimpleNamespace(sharded_state_dict=lambda prefix: {})
    tokenizer: Any = SimpleNamespace(save=lambda folder: None)
    with pytest.raises(CheckpointError, match="the disk is full"):
        save_reward_model(tmp_path / "rm.nemo", model, {}, tokenizer, None)
    assert not list(tmp_path.iterdir())


def test_lora_is_folded_into_weights_that_are_read_without_a_model(
    with_lora: Path, layout: Any
) -> None:
    weights = dict(load_reward_model(with_lora, layout).model.named_parameters())
    stems = {name.partition("adapter.")[0] for name in weights if is_of_adapter(name)}
    assert len(stems) == 4 * 4  # layers, linear layers
    with open_nemo(with_lora) as folder:
        _, layers = lazy_decoder(folder, ModelShape.from_config(folder.config))
        for stem in stems:
            parts = ("weight", "adapter.linear_in.weight", "adapter.linear_out.weight")
            plain, low, high = (weights[stem + part].detach() for part in parts)
            number = stem.split(".")[2]
            key = "model." + stem.replace(f".{number}.", ".", 1) + "weight"
            actual = layers[key][int(number)].read()
            torch.testing.assert_close(
                actual,
                plain + 6.0 / 3 * high @ low,
                msg=lambda message, stem=stem: f"{stem}: {message}",
            )


def test_lora_settings_that_do_not_fit_the_matrices_are_refused(
    with_lora: Path, layout: Any, tmp_path: Path, scratch: Path
) -> None:
    def section(**changes: Any) -> Callable[[Path], object]:
        return lambda folder: edit(folder, lora={**LORA.to_config(), **changes})

    def without(folder: Path) -> None:
        config = yaml.safe_load((folder / "model_config.yaml").read_text())
        del config["lora"]
        (folder / "model_config.yaml").write_text(yaml.safe_dump(config))

    folder = unpack(with_lora, lambda name: name.name != CHECKSUMS_NAME)
    damages = [
        (section(rank=4), r"adapter\.linear_in\.weight: got 4 layers of shape"),
        (section(rank=2**31), r"the settings imply 4 layers of shape \[2147483648, 64\]"),
        (section(rank="3"), r"nemo_.*: model_config\.yaml: lora\.rank: got '3'"),
        (section(targets=["linear_qkv"]), "tensors do not belong to the model"),
        (lambda folder: edit(folder, lora={}), "lora: got {}, wanted rank, alpha and targets"),
        (without, "tensors do not belong to the model that the settings describe"),
    ]
    check_damages(folder, damages, lambda folder: load_reward_model(folder, layout))
    base = unpack(with_lora.with_name("base.nemo"), lambda name: name.name != CHECKSUMS_NAME)
    edit(base, lora=LORA.to_config())
    refuse(base, layout, r"linear_in\.weight: got 0 layers of shape")


def test_stored_tensor_that_the_model_has_no_place_for_is_named(
    layout: Any, tmp_path: Path
) -> None:
    """A model that was built without a bias, say, would give other rewards than the archive's."""
    families.write_base_nemo(tmp_path / "base.nemo", "gpt_oss")
    with open_nemo(tmp_path / "base.nemo") as folder:
        shape = replace(model_shape(folder), proj_bias=False)
        model = build_reward_model(shape, layout, num_attributes=1, precision=Precision.fp32)
        name = r"model\.decoder\.layers\.self_attention\.linear_proj\.bias"
        with pytest.raises(CheckpointError, match=f"{name}: the model has no place for it, nor"):
            load_backbone(model, folder)
