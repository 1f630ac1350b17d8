"""Every door that others' checkpoints come in by gives the model that was written."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from nemo_aligner.batch import PackedBatch
from nemo_aligner.config.common import Precision
from nemo_aligner.errors import AlignerError, CheckpointError, ConfigError
from tests import tiny
from tests.checkpoint import strangers

SEQUENCES = [list(range(3, 3 + length)) for length in (5, 40, 1, 17)]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base.nemo"
    return tiny.write_base_nemo(path, tie_word_embeddings=False, rope_parameters=strangers.ROPE)


@pytest.fixture(scope="module")
def tensors(base: Path, layout: Any) -> Tensors:
    return strangers.tensors_of(base)


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Path:
    folder = base.parent / "tokenizer"
    folder.mkdir()
    for file in base.with_suffix(".hf").glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(base.with_suffix(".hf") / "chat_template.jinja", folder)
    return folder


def load(path: Path, layout: Any, attributes: int = 1) -> Any:
    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained

    return load_pretrained(path, layout, num_attributes=attributes, precision=Precision.fp32)


def check(model: Any, tensors: Tensors) -> None:
    """Every parameter is the tensor that was written for it; padding is not looked at."""
    metadata = {"non_homogeneous_layers": True}
    wanted = strangers.per_layer(tensors)
    seen = set()
    for entry in model.sharded_state_dict(metadata=metadata).values():
        if "rm_head" in entry.key or "_extra_state" in entry.key:
            continue
        rows = tiny.SHAPE["vocab_size"] if "embedding" in entry.key else None
        torch.testing.assert_close(entry.data[:rows], wanted[entry.key][:rows], rtol=0, atol=0)
        seen.add(entry.key)
    assert seen == wanted.keys() - {"output_layer.weight", "rm_head.weight", "rm_head.bias"}


def import_nemo(source: Path, output: Path, **options: Any) -> str:
    from nemo_aligner.checkpoint.importing import ImportOptions, import_checkpoint

    return import_checkpoint(source, output, ImportOptions(**options))


def nemo1(folder: Path, tensors: Tensors, tokenizer: Path) -> Path:
    strangers.write_nemo1(folder, tensors, tokenizer)
    return folder


def nemo1_tar(folder: Path, tensors: Tensors, tokenizer: Path) -> Path:
    strangers.write_nemo1(folder, tensors, tokenizer)
    return strangers.pack(folder, folder.with_suffix(".nemo"), "w")


def nemo1_tar_gz(folder: Path, tensors: Tensors, tokenizer: Path) -> Path:
    strangers.write_nemo1(folder, tensors, tokenizer)
    return strangers.pack(folder, folder.with_suffix(".nemo"), "w:gz")


def nemo2(folder: Path, tensors: Tensors, tokenizer: Path) -> Path:
    strangers.write_nemo2(folder, tensors, tokenizer)
    return folder


def bridge(folder: Path, tensors: Tensors, tokenizer: Path) -> Path:
    return strangers.write_bridge(folder, tensors, tokenizer)


def bridge_run(folder: Path, tensors: Tensors, tokenizer: Path) -> Path:
    strangers.write_bridge(folder, tensors, tokenizer)
    return folder


def megatron_lm(folder: Path, tensors: Tensors, tokenizer: Path) -> Path:
    strangers.write_megatron_lm(folder, tensors, tokenizer)
    return folder


DOORS = [nemo1, nemo1_tar, nemo1_tar_gz, nemo2, bridge, bridge_run, megatron_lm]
Door = Callable[[Path, Tensors, Path], Path]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_the_model_is_the_one_that_was_written(
    door: Door, tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    from nemo_aligner.models.step import infer

    source = door(tmp_path / "theirs", tensors, tokenizer)
    loaded = load(source, layout)
    check(loaded.model, tensors)
    assert loaded.tokenizer.chat_template == tiny.CHATML
    summary = import_nemo(source, tmp_path / "ours.nemo")
    assert "a base model" in summary
    ours = load(tmp_path / "ours.nemo", layout)
    check(ours.model, tensors)
    stored = strangers.tensors_of(tmp_path / "ours.nemo")
    output_layer = tensors["output_layer.weight"][: tiny.SHAPE["vocab_size"]]
    torch.testing.assert_close(stored["output_layer.weight"][: len(output_layer)], output_layer)
    assert stored.keys() == tensors.keys()
    batch = [PackedBatch.pack(SEQUENCES, range(4), 1)]
    # Not the weights alone: the settings make the same model of them, rope scaling included.
    reference = load(nemo1(tmp_path / "reference", tensors, tokenizer), layout)
    wanted = infer(reference.model, batch, layout)
    for model in (loaded.model, ours.model):
        torch.testing.assert_close(infer(model, batch, layout), wanted, rtol=0, atol=0)


def test_the_settings_are_those_of_the_converter(
    base: Path, tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    """The forms of one model read as the same shape, and that as Hugging Face's conversion."""
    import dataclasses

    from nemo_aligner.checkpoint.nemo.open import open_nemo
    from nemo_aligner.models.shape import ModelShape

    with open_nemo(base, with_weights=False) as folder:
        wanted = ModelShape.from_config(folder.config)
    for door in (nemo1, nemo2, bridge, megatron_lm):
        source = door(tmp_path / door.__name__, tensors, tokenizer)
        with open_nemo(source, with_weights=False) as folder:
            shape = ModelShape.from_config(folder.config)
        rows = strangers.PADDED if door is megatron_lm else wanted.vocab_size
        assert shape == dataclasses.replace(wanted, vocab_size=rows), door.__name__


def test_a_gemma_of_megatron_bridge_is_nemo_1s(
    tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    """Bridge calls the GELU with tanh fast_gelu, and scales embeddings by the provider's class."""
    from megatron.core.activations import fast_gelu

    from nemo_aligner.models.step import infer

    numbers = torch.linspace(-4, 4, 101)
    gelu = torch.nn.functional.gelu(numbers, approximate="tanh")
    torch.testing.assert_close(fast_gelu(numbers), gelu)
    tied = {key: tensor for key, tensor in tensors.items() if key != "output_layer.weight"}
    strangers.write_nemo1(tmp_path / "a", tied, tokenizer, **strangers.NEMO1_GEMMA)
    strangers.write_bridge(tmp_path / "b", tied, tokenizer, **strangers.BRIDGE_GEMMA)
    wanted, got = load(tmp_path / "a", layout), load(tmp_path / "b", layout)
    check(got.model, tied)
    batch = [PackedBatch.pack(SEQUENCES, range(4), 1)]
    scores = [infer(loaded.model, batch, layout) for loaded in (wanted, got)]
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=0)


def test_the_vocabulary_is_of_whoever_says_it(
    tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    strangers.write_nemo1(tmp_path / "a", tensors, tokenizer)
    strangers.write_nemo1(tmp_path / "b", tensors, tokenizer, override_vocab_size=strangers.PADDED)
    from_tokenizer = import_nemo(tmp_path / "a", tmp_path / "a.nemo")
    assert "vocabulary of 320, by its tokenizer" in from_tokenizer
    given = import_nemo(tmp_path / "b", tmp_path / "b.nemo")
    assert "vocabulary of 384, by override_vocab_size" in given
    for name, size in (("c", None), ("d", 320)):
        strangers.write_megatron_lm(tmp_path / name, tensors, tokenizer, vocab_size=size)
        said = import_nemo(tmp_path / name, tmp_path / f"{name}.nemo")
        wanted = "384, by padded_vocab_size" if size is None else "320, by vocab_size"
        assert f"vocabulary of {wanted}" in said


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"library": "huggingface", "type": "meta-llama/Llama-3.1-8B"}, "only the name of one"),
        ({"library": "sentencepiece", "model": "nemo:ab_tokenizer.model"}, "got the file"),
    ],
)
def test_another_form_of_tokenizer_wants_a_folder(
    section: dict, complaint: str, tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    config = strangers.write_nemo1(tmp_path / "theirs", tensors, tokenizer)
    text = yaml.safe_dump({**config, "tokenizer": section})
    (tmp_path / "theirs" / "model_config.yaml").write_text(text)
    (tmp_path / "theirs" / "ab_tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(CheckpointError, match=f"{complaint}.*--tokenizer FOLDER_OR"):
        load(tmp_path / "theirs", layout)
    import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo", tokenizer=tokenizer)
    check(load(tmp_path / "ours.nemo", layout).model, tensors)


def test_a_tokenizer_may_be_one_of_the_hub(
    hub: Callable[..., Any], tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    asked = hub(tokenizer)
    theirs = tmp_path / "theirs"
    strangers.write_nemo1(theirs, tensors, tokenizer)
    shutil.rmtree(theirs / f"{strangers.HEX}_tokenizer")
    import_nemo(theirs, tmp_path / "ours.nemo", tokenizer="some-org/Base")
    assert asked["name"] == "some-org/Base"
    assert asked["allow_patterns"] == ["*.json", "*.jinja"]
    check(load(tmp_path / "ours.nemo", layout).model, tensors)
    with pytest.raises(CheckpointError, match=r"theirs: got no tokenizer\.json"):
        import_nemo(theirs, tmp_path / "again.nemo", tokenizer=theirs)


def test_common_pt_without_arguments_wants_a_config(
    base: Path, tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    inner = strangers.write_megatron_lm(tmp_path / "theirs", tensors, tokenizer)
    torch.save({"iteration": 123}, inner / "common.pt")
    with pytest.raises(CheckpointError, match=r"no args of Megatron-LM.*--config"):
        load(tmp_path / "theirs", layout)
    config = tmp_path / "model_config.yaml"
    config.write_text(yaml.safe_dump({**strangers.nemo1_config(), "vocab_size": 320}))
    import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo", config=config)
    check(load(tmp_path / "ours.nemo", layout).model, tensors)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
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
        ({"activation_func": strangers.function("torch.nn.functional.gelu")}, "activation_func"),
        ({"normalization": "BatchNorm"}, "normalization: got 'BatchNorm'"),
        ({"add_bias_linear": True}, "bias: got True"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
        ({"num_layers": 5}, "4 layers of shape.*want 5"),
        ({"num_query_groups": None}, "linear_qkv"),
        ({"seq_length": None}, "max_position_embeddings|NoneType|None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_models_are_refused(
    changes: dict, complaint: str, tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    strangers.write_nemo2(tmp_path / "theirs", tensors, tokenizer, **changes)
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path / "theirs", layout)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"softmax_scale": 0.1}, r"model_config\.yaml: softmax_scale: got 0\.1"),
        (
            {"mcore_customization_config": {"query_pre_attn_scalar": 224}},
            "mcore_customization_config: query_pre_attn_scalar: got 224",
        ),
        ({"mcore_customization_config": [1]}, "mcore_customization_config: got .*wanted a mapping"),
    ],
    ids=["field", "section", "list"],
)
def test_what_nemo_1_hands_to_megatron_core_is_refused(
    changes: dict, complaint: str, tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    """NeMo 1 sets fields of ``TransformerConfig`` by their names; a schedule changes no result."""
    strangers.write_nemo1(tmp_path / "theirs", tensors, tokenizer, **changes)
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path / "theirs", layout)
    harmless = {"mcore_customization_config": {"num_microbatches_per_virtual_pipe": 4}}
    config = tmp_path / "model_config.yaml"
    config.write_text(yaml.safe_dump(strangers.nemo1_config(**harmless)))
    import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo", config=config)


def test_what_is_not_nemos_is_shown_its_door(base: Path, layout: Any, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    gguf, adapter = tmp_path / "model.gguf", tmp_path / "adapter"
    gguf.write_bytes(b"GGUF" + bytes(1000))
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    packed = strangers.pack(base.with_suffix(".hf"), tmp_path / "packed.nemo", "w")
    for source in (base.with_suffix(".hf"), gguf, packed):
        with pytest.raises(CheckpointError, match=r"^.*/\S*: got a .*convert_hf_to_nemo\.py"):
            load(source, layout)
    for door in (import_nemo, convert_hf_to_nemo):
        with pytest.raises(CheckpointError, match=r"adapter: got an adapter.*its base first"):
            door(adapter, tmp_path / "ours.nemo")
    with pytest.raises(CheckpointError, match="no such"):
        load(tmp_path / "nowhere.gguf", layout)


@pytest.mark.parametrize("door", [nemo1, bridge], ids=lambda door: door.__name__)
def test_a_tensor_too_few_or_too_many_is_named(
    door: Door, tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    bias = {"decoder.layers.self_attention.linear_qkv.bias": torch.ones(strangers.LAYERS, 128)}
    more = door(tmp_path / "more", {**tensors, **bias}, tokenizer)
    with pytest.raises(CheckpointError, match=r"no place in the model.*linear_qkv\.bias"):
        load(more, layout)
    name = "decoder.final_layernorm.weight"
    few = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=r"final_layernorm\.weight: got none"):
        load(door(tmp_path / "fewer", few, tokenizer), layout)


def test_nothing_under_the_prefix_is_nothing(
    tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    """NeMo 1 settings over NeMo 2 weights would leave a model as it was drawn."""
    strangers.write_nemo1(tmp_path / "theirs", tensors, tokenizer)
    shutil.rmtree(tmp_path / "theirs" / "model_weights")
    strangers.save(tmp_path / "theirs" / "model_weights", tensors, "module.")
    with pytest.raises(CheckpointError, match=r"model\.embedding.*: got none"):
        load(tmp_path / "theirs", layout)


def test_a_namespace_with_code_is_not_run(
    tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "executed",)

    inner = strangers.write_megatron_lm(tmp_path / "theirs", tensors, tokenizer)
    torch.save({"args": Namespace(num_layers=Bomb())}, inner / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt: refused"):
        load(tmp_path / "theirs", layout)
    assert not (tmp_path / "executed").exists()


def head_of(attributes: int) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {
        "rm_head.weight": torch.randn(attributes, 64, generator=generator) * 0.1,
        "rm_head.bias": torch.randn(attributes, generator=generator),
    }


@pytest.mark.parametrize(
    ("attributes", "settings"),
    [
        (1, {}),
        (3, {"reward_model_type": "regression", "regression": {"num_attributes": 3}}),
        (
            3,
            {
                "reward_model_type": "regression",
                "regression": {
                    "num_attributes": 3,
                    "merge_attributes": True,
                    "attribute_weights": [0.3, 0.7, -1.0],
                },
                "reward_standardization": {"enable": True, "mean": 0.5, "std": 2.0},
            },
        ),
        (2, {"regression": {"num_attributes": 2, "merge_attributes": True}}),
    ],
    ids=["ranking", "regression", "merged_and_standardized", "merged_evenly"],
)
def test_a_nemo_aligner_reward_model_scores_as_it_did(
    attributes: int,
    settings: dict,
    tensors: Tensors,
    tokenizer: Path,
    layout: Any,
    tmp_path: Path,
) -> None:
    """Against NeMo-Aligner's own formula on the last hidden state of the same decoder."""
    from nemo_aligner.models.step import infer
    from nemo_aligner.scoring.scorer import load_scorer

    head = head_of(attributes)
    folder = tmp_path / "theirs"
    strangers.write_nemo1(folder, {**tensors, **head}, tokenizer, **settings)
    archive = strangers.pack(folder, tmp_path / "theirs.nemo", "w:gz")
    import_nemo(archive, tmp_path / "ours.nemo", template="tokenizer")

    scorer = load_scorer(tmp_path / "ours.nemo", layout, micro_batch_tokens=256)
    chat = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "yes"}]
    texts = ["the cat sleeps", chat]
    got = torch.from_numpy(scorer.score(texts))

    # The hidden states: an identity as the head. NeMo-Aligner applies no rope scaling.
    plain = {**tensors, "rm_head.weight": torch.eye(64)}
    strangers.write_nemo1(tmp_path / "plain", plain, tokenizer, scale_positional_embedding=False)
    decoder = load(tmp_path / "plain", layout, attributes=64)
    ids = [scorer.contract.encode(decoder.tokenizer, text).token_ids for text in texts]
    assert ids[0] == decoder.tokenizer.encode("the cat sleeps")  # no BOS, no EOS
    hidden = infer(decoder.model, [PackedBatch.pack(ids, range(2), 1)], layout)[:, 0]
    wanted = hidden @ head["rm_head.weight"].T + head["rm_head.bias"]
    regression = settings.get("regression", {})
    if regression.get("merge_attributes"):
        weights = regression.get("attribute_weights", [1 / attributes] * attributes)
        wanted = (wanted @ torch.tensor(weights))[:, None]
    standard = settings.get("reward_standardization")
    if standard:
        wanted = (wanted - standard["mean"]) / standard["std"]
    assert (wanted[0] - wanted[1]).abs().min() > 0.01
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_scaling_is_kept_where_it_is_asked_for(
    tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    from nemo_aligner.checkpoint.nemo.open import open_nemo

    strangers.write_nemo1(tmp_path / "theirs", {**tensors, **head_of(1)}, tokenizer)
    for keep in (False, True):
        path = tmp_path / f"{keep}.nemo"
        said = import_nemo(tmp_path / "theirs", path, template="none", keep_scaling=keep)
        assert ("scale_positional_embedding is switched off" in said) is not keep
        with open_nemo(path, with_weights=False) as folder:
            assert folder.config["scale_positional_embedding"] is keep
            assert folder.contract is not None
            assert folder.contract["template"] == ""


def test_a_config_stands_for_the_archives_own(
    tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    """For reward models that were trained with rotary_base 10000, whatever their settings say."""
    from nemo_aligner.checkpoint.nemo.open import open_nemo

    stored = {**tensors, **head_of(1)}
    standard = {"enable": True, "mean": 1.0, "std": 2.0}
    settings = {"rotary_base": 500000.0, "reward_standardization": standard}
    strangers.write_nemo1(tmp_path / "theirs", stored, tokenizer, **settings)
    archive = strangers.pack(tmp_path / "theirs", tmp_path / "theirs.nemo", "w")
    strangers.write_nemo1(
        tmp_path / "wanted", stored, tokenizer, **{**settings, "rotary_base": 10000.0}
    )
    config = tmp_path / "wanted" / "model_config.yaml"
    import_nemo(archive, tmp_path / "a.nemo", template="tokenizer", config=config)
    import_nemo(tmp_path / "wanted", tmp_path / "b.nemo", template="tokenizer")
    with (
        open_nemo(tmp_path / "a.nemo", with_weights=False) as got,
        open_nemo(tmp_path / "b.nemo", with_weights=False) as wanted,
    ):
        assert got.config["rotary_base"] == 10000.0
        assert got.config == wanted.config
        assert got.contract is not None
        assert got.contract == wanted.contract


@pytest.mark.parametrize(
    ("settings", "options", "kind", "complaint"),
    [
        ({"use_avg_pool": True}, {}, CheckpointError, "use_avg_pool: got true"),
        ({"output_sequence": True}, {}, CheckpointError, "output_sequence: got true"),
        (
            {"regression": {"merge_attributes": True, "attribute_weights": [1.0, 2.0, 3.0]}},
            {},
            CheckpointError,
            r"attribute_weights: got \[1.0, 2.0, 3.0\], wanted 2 numbers",
        ),
        ({}, {}, ConfigError, "template: a reward model"),
        ({}, {"template": "tokenizer", "attributes": ("a",)}, ConfigError, "attributes: got"),
        ({}, {"template": "tokenizer", "attributes": ("a", "")}, ConfigError, "attributes: got"),
    ],
    ids=["pool", "critic", "weights", "no_template", "names", "empty_name"],
)
def test_a_head_that_would_change_is_refused(
    settings: dict,
    options: dict,
    kind: type[AlignerError],
    complaint: str,
    tensors: Tensors,
    tokenizer: Path,
    layout: Any,
    tmp_path: Path,
) -> None:
    strangers.write_nemo1(tmp_path / "theirs", {**tensors, **head_of(2)}, tokenizer, **settings)
    with pytest.raises(kind, match=complaint):
        import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


@pytest.mark.parametrize(
    "options",
    [{"template": "tokenizer"}, {"attributes": ("a",)}, {"keep_scaling": True}],
    ids=lambda options: next(iter(options)),
)
def test_a_base_model_takes_no_options_of_a_reward_model(
    options: dict, tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    strangers.write_nemo1(tmp_path / "theirs", tensors, tokenizer)
    name = next(iter(options))
    with pytest.raises(ConfigError, match=f"theirs: got {name}, .*a base model"):
        import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo", **options)
    assert not (tmp_path / "ours.nemo").exists()


def test_the_script_names_attributes(
    tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    strangers.write_nemo1(tmp_path / "theirs", {**tensors, **head_of(3)}, tokenizer)
    script, options = "scripts/import_nemo.py", ["--input", str(tmp_path / "theirs")]
    options += ["--output", str(tmp_path / "ours.nemo"), "--template", "none", "--attributes"]
    failed = tiny.run_script(script, *options, "help,,length", check=False)
    assert failed.returncode == 1
    assert "attributes: got ['help', '', 'length'], wanted 3" in failed.stderr
    done = tiny.run_script(script, *options, "help, style ,length")
    assert "a reward model of help, style, length" in done.stdout


def test_a_bias_is_not_dropped_on_the_way_to_training(
    tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    strangers.write_nemo1(tmp_path / "theirs", {**tensors, **head_of(1)}, tokenizer)
    with pytest.raises(CheckpointError, match=r"has a bias.*import_nemo\.py"):
        load(tmp_path / "theirs", layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_zarr(
    dtype: torch.dtype, tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    pytest.importorskip("zarr")
    pytest.importorskip("ml_dtypes")
    cast = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    path = zarr_folder(tmp_path / "theirs", cast, tokenizer)
    check(load(path, layout).model, {key: tensor.float() for key, tensor in cast.items()})
    archive = strangers.pack(path, tmp_path / "theirs.nemo", "w")
    import_nemo(archive, tmp_path / "ours.nemo")
    check(
        load(tmp_path / "ours.nemo", layout).model,
        {key: tensor.float() for key, tensor in cast.items()},
    )


def zarr_folder(folder: Path, tensors: Tensors, tokenizer: Path) -> Path:
    strangers.write_nemo1(folder, tensors, tokenizer)
    shutil.rmtree(folder / "model_weights")
    strangers.write_zarr(folder / "model_weights", tensors)
    return folder


def test_zarr_without_its_package_says_what_to_install(
    tensors: Tensors,
    tokenizer: Path,
    layout: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    path = zarr_folder(tmp_path / "theirs", tensors, tokenizer)
    with pytest.raises(CheckpointError, match=r"packages zarr and ml_dtypes \(extra \[zarr\]\)"):
        load(path, layout)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda array: (array / "1.0").unlink(), "pieces|no such file"),
        (lambda array: (array / "1.0").write_bytes(b"x"), "got 1 bytes"),
        (lambda array: edit_header(array, dtype="|O"), "wanted a plain array"),
        (lambda array: edit_header(array, filters=[{"id": "pickle"}]), "wanted a plain array"),
        (lambda array: edit_header(array, compressor={"id": "pickle"}), "wanted a plain array"),
        (lambda array: edit_header(array, shape=[10**9, 64]), "pieces"),
    ],
    ids=["missing", "cut", "objects", "filter", "codec", "shape"],
)
def test_damaged_zarr_is_refused(
    damage: Callable[[Path], None],
    complaint: str,
    tensors: Tensors,
    tokenizer: Path,
    layout: Any,
    tmp_path: Path,
) -> None:
    path = zarr_folder(tmp_path / "theirs", tensors, tokenizer)
    array = path / "model_weights" / "model.decoder.layers.mlp.linear_fc1.layer_norm_weight"
    damage(array)
    with pytest.raises(CheckpointError, match=complaint):
        load(path, layout)


def edit_header(array: Path, **changes: Any) -> None:
    import json

    header = json.loads((array / ".zarray").read_text())
    (array / ".zarray").write_text(json.dumps({**header, **changes}))


@pytest.mark.parametrize("door", [bridge, nemo2, zarr_folder], ids=lambda door: door.__name__)
def test_ranks_share_what_came_in(
    door: Door, tensors: Tensors, tokenizer: Path, layout: Any, tmp_path: Path
) -> None:
    """At TP=2 and at PP=2, from layers stacked and apart."""
    from megatron.core import dist_checkpointing

    from tests.checkpoint.resave import LAYOUTS

    if door is zarr_folder:
        pytest.importorskip("zarr")
    source = door(tmp_path / "theirs", tensors, tokenizer)
    tiny.run_script("tests/checkpoint/resave.py", str(source), str(tmp_path), processes=2)
    for name in LAYOUTS:
        got = dist_checkpointing.load_plain_tensors(str(tmp_path / name))
        for key, tensor in tensors.items():
            if key != "output_layer.weight":
                rows = slice(tiny.SHAPE["vocab_size"] if "embedding" in key else None)
                found = got[f"model.{key}"][rows]
                torch.testing.assert_close(found, tensor[rows], rtol=0, atol=0)
