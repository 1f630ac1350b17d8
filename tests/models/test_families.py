"""Every family against transformers: rewards, gradients, features, and layouts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch import PackedBatch
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.errors import CheckpointError
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.parallel.layout import ParallelLayout
from tests import families, tiny
from tests.families import CASES, GROUPS, SEQUENCES, WINDOW
from tests.models import family_layouts

FP32 = Precision.fp32
LAYOUT_CASES = (
    "llama3", "qwen2", "qwen3", "mistral_untied_window", "gemma", "gemma2", "nemotron"
)  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES)


@dataclass(frozen=True)
class Case:
    """A model in both worlds, with the same head of two attributes."""

    name: str
    path: Path
    config: dict[str, Any]
    ours: Any
    theirs: Any


@pytest.fixture(scope="module")
def build(layout: ParallelLayout, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each case is made once, when a test first asks for it."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def make(name: str) -> Case:
        from transformers import AutoModelForSequenceClassification

        from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained

        path = families.write_base_nemo(folder / f"{name}.nemo", name)
        pretrained = load_pretrained(path, layout, num_attributes=2, precision=FP32)
        theirs = AutoModelForSequenceClassification.from_pretrained(
            path.with_suffix(".hf"),
            num_labels=2,
            pad_token_id=None,
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()
        with torch.no_grad():
            theirs.score.weight.copy_(pretrained.model.rm_head.weight)
        return Case(name, path, pretrained.config, pretrained.model, theirs)

    return make


def their_rewards(case: Case) -> Tensor:
    return torch.cat([case.theirs(torch.tensor([tokens])).logits for tokens in SEQUENCES])


def our_rewards(model: Any, layout: ParallelLayout, how: str = "together") -> Tensor:
    from nemo_aligner.models.step import infer

    if how == "alone":
        batches = [PackedBatch.pack([tokens]) for tokens in SEQUENCES]
    elif how == "together":
        batches = [PackedBatch.pack(SEQUENCES)]
    else:
        batches = [PackedBatch.pack(SEQUENCES, groups=GROUPS)]
    rewards = infer(model, batches, layout)
    assert rewards is not None
    return rewards


def assert_close(found: Tensor, wanted: Tensor, relative: float) -> None:
    """Within ``relative`` of how large ``wanted`` is."""
    scale = float(wanted.abs().max())
    assert scale > 0
    torch.testing.assert_close(found, wanted, atol=relative * scale, rtol=0)


@every_case
@pytest.mark.parametrize("how", ["alone", "together", "common prefixes"])
def test_rewards_are_those_of_transformers(
    case: str, how: str, build: Any, layout: ParallelLayout
) -> None:
    made = build(case)
    with torch.no_grad():
        wanted = their_rewards(made)
    assert wanted.std() > 0.02
    assert_close(our_rewards(made.ours, layout, how), wanted, 1e-5)


@every_case
def test_gradients_are_those_of_transformers(case: str, build: Any) -> None:
    """Of every weight, with common prefixes, in the buffer of Megatron's wrapper."""
    from nemo_aligner.models.trainable import wrap_for_training

    made = build(case)
    weights = torch.linspace(-1, 1, 2 * len(SEQUENCES)).reshape(-1, 2)
    made.theirs.zero_grad()
    (their_rewards(made) * weights).sum().backward()
    wrapped = wrap_for_training(made.ours)
    wrapped.zero_grad_buffer()
    batch = PackedBatch.pack(SEQUENCES, groups=GROUPS)
    (wrapped(batch) * weights).sum().backward()
    ours = {name: weight.main_grad for name, weight in made.ours.named_parameters()}
    assert_close(ours.pop("rm_head.weight"), made.theirs.score.weight.grad, 1e-4)
    for name, wanted in their_gradients(made).items():
        found = ours.pop(name)
        assert_close(found[: wanted.shape[0]], wanted, 1e-4)
    assert not ours


def their_gradients(case: Case) -> dict[str, Tensor]:
    """By the name of our parameter."""
    theirs = {name: weight.grad for name, weight in case.theirs.named_parameters()}
    found = {}
    for rule, layer in find_family(CASES[case.name]["model_type"]).rules(case.config):
        if rule.megatron == "output_layer.weight":
            continue
        grads = [theirs[name] for name in rule.hf]
        # What a rule adds to a weight is no part of its gradient.
        zeros = rule.join([torch.zeros_like(grad) for grad in grads], case.config)
        name = rule.megatron.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        prefix = "" if layer is None else f"decoder.layers.{layer}."
        found[prefix + name] = rule.join(grads, case.config) - zeros
    return found


FEATURES = [
    ("llama3", {"scale_positional_embedding": False}),
    ("llama_linear", {"seq_len_interpolation_factor": None}),
    ("llama", {"rotary_base": 20000.0}),
    ("llama", {"rotary_percentage": 0.5}),
    ("llama", {"activation": "geglu"}),
    ("qwen2", {"qkv_bias": False}),
    ("qwen2_untied_window", {"window_size": None}),
    ("qwen3", {"qk_layernorm": False}),
    ("mistral_untied_window", {"window_size": None}),
    ("mistral_untied_window", {"window_size": WINDOW + 1}),
    ("mistral_untied_window", {"window_size": WINDOW - 1}),
    ("mistral_untied_window", {"window_pattern": "alternate"}),
    ("gemma", {"apply_embedding_scaling": False}),
    ("gemma", {"layernorm_zero_centered_gamma": False}),
    ("gemma", {"activation": "swiglu"}),
    ("gemma2", {"post_layernorms": False}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": None}),
    ("gemma2", {"window_size": None}),
    ("gemma2", {"window_pattern": "all"}),
    ("nemotron", {"rotary_percentage": 1.0}),
    ("nemotron", {"normalization": "rmsnorm"}),
]


@pytest.mark.parametrize(("case", "changes"), FEATURES, ids=str)
def test_a_feature_that_is_off_moves_rewards(
    case: str, changes: dict[str, Any], build: Any, layout: ParallelLayout
) -> None:
    """So that the tests above would see it."""
    made = build(case)
    changed = other(made, changes, layout)
    right = our_rewards(made.ours, layout)
    moved = (our_rewards(changed, layout) - right).abs().max() / right.abs().max()
    assert moved > 1e-2


def other(case: Case, changes: dict[str, Any], layout: ParallelLayout) -> Any:
    """The same weights in a model of a changed config."""
    from nemo_aligner.models.reward_model import build_reward_model

    shape = ModelShape.from_config({**case.config, **changes})
    model = build_reward_model(shape, layout, num_attributes=2, precision=FP32)
    model.load_state_dict(case.ours.state_dict(), strict=False)
    return model


def test_windows_read_as_nemo_writes_them(build: Any, layout: ParallelLayout) -> None:
    made = build("mistral_untied_window")
    same = other(made, {"window_size": [WINDOW - 1, 0]}, layout)
    assert torch.equal(our_rewards(same, layout), our_rewards(made.ours, layout))
    assert ModelShape.from_config({**made.config, "window_size": [-1, 0]}).window_size is None


def test_plain_gammas_are_the_same_model(build: Any, layout: ParallelLayout) -> None:
    """As somebody else's Gemma may have them."""
    made = build("gemma2")
    same = other(made, {"layernorm_zero_centered_gamma": False}, layout)
    with torch.no_grad():
        for name, weight in same.named_parameters():
            if "layernorm" in name:
                weight += 1
    assert_close(our_rewards(same, layout), our_rewards(made.ours, layout), 1e-5)


@every_case
def test_parameters_are_counted(case: str, build: Any) -> None:
    made = build(case)
    count = sum(weight.numel() for name, weight in made.theirs.model.named_parameters())
    assert ModelShape.from_config(made.config).num_parameters() == count
    head = sum(weight.numel() for name, weight in made.ours.named_parameters() if "rm_head" in name)
    padding = (384 - tiny.SHAPE["vocab_size"]) * 64  # type: ignore[operator]
    assert sum(weight.numel() for weight in made.ours.parameters()) == count + head + padding


def test_bf16_scales_embeddings_as_transformers_does(build: Any, layout: ParallelLayout) -> None:
    from nemo_aligner.models.reward_model import build_reward_model

    made = build("gemma")
    shape = ModelShape.from_config({**made.config, "hidden_size": 72, "kv_channels": 32})
    model = build_reward_model(shape, layout, num_attributes=1, precision=Precision.bf16)
    assert model._embedding_scale == float(torch.tensor(72**0.5).bfloat16()) != 72**0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_moe_experts": 8}, "num_moe_experts: got 8, wanted None or 0"),
        ({"activation": "gelu"}, "activation: got 'gelu', wanted fast-swiglu or"),
        ({"normalization": "layernorm"}, "normalization: got 'layernorm'"),
        ({"bias": True}, "bias: got True, wanted False"),
        ({"transformer_block_type": "post_ln"}, "transformer_block_type: got 'post_ln'"),
        ({"rotary_interleaved": True}, "rotary_interleaved: got True"),
        ({"window_size": 0}, "window_size: got 0, wanted a number of keys above 0"),
        ({"window_size": [3, 3]}, r"window_size: got \[3, 3\]"),
        ({"window_pattern": "odd"}, "window_pattern: got 'odd', wanted all or alternate"),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping: got 0, wanted a number above 0"),
        ({"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar: got 'x'"),
        ({"qkv_bias": "yes"}, "qkv_bias: got 'yes', wanted False or True or None"),
        ({"num_layers": 2.5}, r"num_layers: got 2\.5, wanted a whole number above 0"),
        ({"rotary_base": float("nan")}, "rotary_base: got nan, wanted a number above 0"),
        ({"num_query_groups": 4}, "num_query_groups: got 4, wanted a divisor of the 2 attention"),
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any], message: str) -> None:
    config = {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    ModelShape.from_config(config)
    with pytest.raises(CheckpointError, match=message):
        ModelShape.from_config({**config, **changes})


@every_case
def test_bf16_is_near(case: str, build: Any, layout: ParallelLayout) -> None:
    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained

    made = build(case)
    model = load_pretrained(made.path, layout, num_attributes=2, precision=Precision.bf16).model
    assert {weight.dtype for weight in model.decoder.parameters()} == {torch.bfloat16}
    assert_close(our_rewards(model, layout), our_rewards(made.ours, layout), 0.1)


@pytest.mark.parametrize("case", ["llama", "gemma2", "nemotron"])
def test_weights_in_bf16_lose_nothing(case: str, layout: ParallelLayout, tmp_path: Path) -> None:
    """Converted as they are, and scored in fp32."""
    from transformers import AutoModel, AutoModelForCausalLM

    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained

    source, path = tmp_path / "tiny.hf", tmp_path / "tiny.nemo"
    families.write_hf_checkpoint(source, case)
    AutoModelForCausalLM.from_pretrained(source).bfloat16().save_pretrained(source)
    convert_hf_to_nemo(source, path)
    ours = load_pretrained(path, layout, num_attributes=1, precision=FP32).model
    backbone = AutoModel.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        states = [backbone(torch.tensor([ids])).last_hidden_state[0, -1] for ids in SEQUENCES]
        wanted = torch.stack(states) @ ours.rm_head.weight.T
    assert_close(our_rewards(ours, layout), wanted, 1e-5)


@pytest.mark.parametrize("case", ["mistral_untied_window", "gemma2", "nemotron", "qwen3"])
@pytest.mark.parametrize("recompute", [Recompute.full, Recompute.selective])
def test_recomputation_changes_no_gradient(
    case: str, recompute: Recompute, build: Any, layout: ParallelLayout
) -> None:
    path = build(case).path
    plain, again = (family_layouts.step(path, layout, how) for how in (Recompute.none, recompute))
    assert again == {key: pytest.approx(value, rel=1e-6) for key, value in plain.items()}


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "gemma2", "nemotron"])
def test_added_query_groups_add_nothing(case: str, build: Any, layout: ParallelLayout) -> None:
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    made = build(case)
    padded = made.path.with_suffix(".padded.nemo")
    convert_hf_to_nemo(made.path.with_suffix(".hf"), padded, tensor_parallel=4)
    alone, with_groups = (family_layouts.step(path, layout) for path in (made.path, padded))
    assert with_groups == {key: pytest.approx(value, rel=1e-5) for key, value in alone.items()}


@pytest.mark.slow
def test_layouts_train_alike(build: Any, layout: ParallelLayout, tmp_path: Path) -> None:
    """Rewards, gradient norm, and rewards after a step, of every family, against one process.

    What each layout saved after it is the same model.
    """
    paths = [build(case).path for case in LAYOUT_CASES]
    script = "tests/models/family_layouts.py"
    done = tiny.run_script(script, str(tmp_path), *map(str, paths), processes=2, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    for path in paths:
        alone = family_layouts.step(path, layout)
        assert alone["after"] != pytest.approx(alone["before"], abs=1e-3)
        for name in family_layouts.LAYOUTS:
            there = found[name][path.stem]
            said = f"{path.stem} at {name}"
            assert there["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5), said
            there["saved"] = family_layouts.rewards_of(path, tmp_path / name / path.stem, layout)
            for when, wanted in (("before", "before"), ("after", "after"), ("saved", "after")):
                size = max(map(abs, alone[wanted]))
                # Adam divides a gradient by its own size, and so its rounding, which is the
                # processor's: 1.2e-5 was seen.
                near = 1e-5 if when == "before" else 2e-5
                assert there[when] == pytest.approx(alone[wanted], abs=near * size), (said, when)
