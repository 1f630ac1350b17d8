"""Every family against transformers: rewards, gradients, features, and 16 bits."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch.packed import Group, PackedBatch, Records
from nemo_aligner.checkpoint import decoder_tensors
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.data.packing import pack_sequences
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.step import forward_backward, infer
from nemo_aligner.models.training_wrap import wrap_for_training
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from tests.harness import families
from tests.harness.families import CASES, GROUPS, SEQUENCES, WINDOW, assert_close
from tests.harness.family_cases import IN_FP64
from tests.models import layouts
from tests.models.test_reward_head import modules_that_are_not_called

FP32, BF16 = Precision.fp32, Precision.bf16
PACKS = {
    "together": [PackedBatch.pack(SEQUENCES)],
    "alone": [PackedBatch.pack([tokens]) for tokens in SEQUENCES],
    "common prefixes": [PackedBatch.pack(SEQUENCES, groups=GROUPS)],
    "one common prefix": [PackedBatch.pack(SEQUENCES, groups=[*[Group(1, 0)] * 2, *GROUPS[1:]])],
}
# The rewards' factors in the sum whose gradients are compared.
OF_REWARDS = torch.linspace(-1, 1, 2 * len(SEQUENCES)).reshape(-1, 2)


@dataclass(frozen=True)
class Case:
    """A model in both worlds, with the same head of two attributes."""

    name: str
    path: Path
    config: dict[str, Any]
    ours: Any
    theirs: Any


def load(path: Path, layout: ParallelLayout, precision: Precision = FP32) -> Any:
    return load_pretrained(path, layout, num_attributes=2, precision=precision).model


@pytest.fixture(scope="module")
def build(layout: ParallelLayout, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each case is made once, when a test first asks for it."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def make(name: str) -> Case:
        path = families.write_base_nemo(folder / f"{name}.nemo", name)
        pretrained = load_pretrained(path, layout, num_attributes=2, precision=FP32)
        theirs = (
            families.classifier(families.hf_config(name))
            .from_pretrained(
                path.with_suffix(".hf"),
                num_labels=2,
                pad_token_id=None,
                dtype=torch.float32,
                attn_implementation="eager",
            )
            .eval()
        )
        with torch.no_grad():
            theirs.score.weight.copy_(pretrained.model.rm_head.weight)
        return Case(name, path, pretrained.config, pretrained.model, theirs)

    return make


def their_rewards(case: Case) -> Tensor:
    # Each by a rotation that has seen no other text: a dynamic one remembers the longest.
    model, rewards = case.theirs.base_model, []
    unused = getattr(model, "rotary_emb", None)
    for tokens in SEQUENCES:
        model.rotary_emb = deepcopy(unused)
        rewards.append(case.theirs(torch.tensor([tokens])).logits)
    model.rotary_emb = unused
    return torch.cat(rewards)


def sharing(case: str) -> str:
    """The way that has the most common prefixes that are rotated alike in all their texts."""
    return "one common prefix" if case == "llama_dynamic" else "common prefixes"


def our_rewards(model: Any, layout: ParallelLayout, how: str = "together") -> Tensor:
    rewards = infer(model, PACKS[how], layout)
    assert rewards is not None
    return rewards


@pytest.mark.parametrize("case", CASES)
def test_family_is_the_model_that_transformers_has(
    case: str, build: Any, layout: ParallelLayout
) -> None:
    """Its rewards, packed in any way; the gradient of every weight; how many there are, and which.

    That weights stored in bf16 lose nothing when they are scored in fp32 is checked by exports.
    """
    made = build(case)
    with torch.no_grad():
        wanted = their_rewards(made)
    assert wanted.std() > 0.02
    for how in ("together", "alone", sharing(case)):
        assert_close(our_rewards(made.ours, layout, how), wanted, 1e-5, how)
    check_gradients(made)

    weights = made.theirs.base_model.named_parameters()
    # ERNIE's bias for the choice of experts is a constant.
    count = sum(weight.numel() for name, weight in weights if "correction_bias" not in name)
    shape = ModelShape.from_config(made.config)
    assert shape.num_parameters() == count
    head = made.ours.rm_head.weight.numel()
    widths = 64, *(size[1] for size in per_layer_table(shape))
    padding = (384 - shape.vocab_size) * sum(widths)
    assert sum(weight.numel() for weight in made.ours.parameters()) == count + head + padding
    check_names(made)


def per_layer_table(shape: ModelShape) -> list[tuple[int, ...]]:
    """The shape of the layers' own embeddings, if the model has them."""
    tensors = decoder_tensors.model_tensors(shape)
    return [size for name, size in tensors.items() if name == decoder_tensors.PER_LAYER_TABLE]


def check_names(made: Case) -> None:
    """The table of a decoder's weights is what the model itself saves, without its padding."""
    shape = ModelShape.from_config(made.config)
    entries = made.ours.sharded_state_dict(metadata={"non_homogeneous_layers": True}).values()
    wanted = {
        entry.key: tuple(entry.data.shape)
        for entry in entries
        if entry.key != decoder_tensors.HEAD and "_extra_state" not in entry.key
    }
    for name in wanted.keys() & {*decoder_tensors.VOCABULARY_TENSORS}:
        wanted[name] = (shape.vocab_size, *wanted[name][1:])
    layers = {
        f"{decoder_tensors.LAYERS}{layer}.{name}": size
        for layer in range(shape.num_layers)
        for name, size in decoder_tensors.layer_tensors(shape.of_layer(layer + 1)).items()
    }
    assert decoder_tensors.model_tensors(shape) | layers == wanted


def check_gradients(made: Case) -> None:
    """Of every weight, with common prefixes, in the buffer of Megatron's wrapper."""
    weights, near = OF_REWARDS, 1e-4 if made.name in IN_FP64 else 1e-5
    made.theirs.zero_grad()
    (their_rewards(made) * weights).sum().backward()
    wrapped = wrap_for_training(made.ours)
    wrapped.zero_grad_buffer()
    (wrapped(PACKS[sharing(made.name)][0]) * weights).sum().backward()
    ours = {name: weight.main_grad for name, weight in made.ours.named_parameters()}
    assert_close(ours.pop("rm_head.weight"), made.theirs.score.weight.grad, near, "head")
    for name, wanted in their_gradients(made).items():
        assert_close(ours.pop(name)[: wanted.shape[0]], wanted, near, name)
    assert not ours


@pytest.mark.parametrize("case", [*IN_FP64, "nemotron_h"])
def test_family_has_the_gradients_of_transformers_in_fp64(
    case: str, build: Any, layout: ParallelLayout
) -> None:
    made, ours = build(case), families.widen(load(build(case).path, layout))
    wide = replace(made, ours=ours, theirs=deepcopy(made.theirs).double())
    wide.theirs.config._experts_implementation = "eager"
    ours.rm_head.weight.data.copy_(wide.theirs.score.weight)
    with families.in_fp64():
        (their_rewards(wide) * OF_REWARDS).sum().backward()
        (ours(PACKS[sharing(case)][0]) * OF_REWARDS).sum().backward()
    for name, wanted in their_gradients(wide).items():
        assert_close(ours.get_parameter(name).grad[: wanted.shape[0]], wanted, 1e-10, name)


def their_gradients(case: Case) -> dict[str, Tensor]:
    """By the name of our parameter."""
    family = find_family(CASES[case.name]["model_type"])
    weights = case.theirs.named_parameters()
    grads = {name: weight.grad for name, weight in weights if weight.grad is not None}
    theirs = families.single_experts(family, case.config, grads)
    found = {}
    for rule, layer in family.rules(case.config):
        if rule.megatron in ("output_layer.weight", "mlp.router.expert_bias"):
            continue
        if rule.hf[0] not in theirs:  # constants have no gradient
            continue
        grads = [theirs[name] for name in rule.hf]
        # What a rule adds to a weight is no part of its gradient.
        zeros = rule.join([torch.zeros_like(grad) for grad in grads], case.config)
        name = rule.megatron.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        prefix = "" if layer is None else f"decoder.layers.{layer}."
        found[prefix + name] = rule.join(grads, case.config) - zeros
    return found


def test_texts_that_are_rotated_differently_share_no_prefix(
    build: Any, layout: ParallelLayout
) -> None:
    """A pack in which they do is refused; ``pack_sequences`` makes none."""
    made = build("llama_dynamic")
    with pytest.raises(ValueError, match="different RoPE share a prefix"):
        our_rewards(made.ours, layout, "common prefixes")
    rotations = [made.ours.length_dependent_rope(tokens) for tokens in (51, 52, 53, 54)]
    assert rotations == [0, 0, 53, 54]
    made = build("phi3_longrope")
    assert [made.ours.length_dependent_rope(tokens) for tokens in (13, 14, 15, 16)] == [0, 0, 1, 1]
    # 13 tokens are shared by the first two, and by the three longer ones.
    texts = [[*range(3, 3 + 13), *rest] for rest in ([20], [21], [22, 23], [22, 24], [25] * 40)]
    (pack,) = pack_sequences(texts, 200, None, made.ours.length_dependent_rope)
    assert pack.num_tokens == sum(map(len, texts)) - 3 * 13
    got = infer(made.ours, [pack], layout)
    assert got is not None
    alone = infer(made.ours, [PackedBatch.pack([texts[row]]) for row in pack.rows], layout)
    assert_close(got, alone, 1e-5)
    without_long = {key: each for key, each in made.config.items() if "_long" not in key}
    with pytest.raises(ConfigError, match="seq_length: got 35, wanted at most 14"):
        our_rewards(other(replace(made, config=without_long), {}, layout), layout)


FEATURES = [
    ("llama3", {"scale_positional_embedding": False}),
    ("llama_linear", {"seq_len_interpolation_factor": None}),
    ("llama_dynamic", {"dynamic_rope_factor": None}),
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
    ("olmo2", {"post_layernorms": False}),
    ("olmo2", {"pre_layernorms": True}),
    ("olmo2", {"qk_layernorm": False}),
    ("exaone4", {"qk_layernorm": False}),
    ("granite", {"embedding_multiplier": 1.0}),
    ("granite", {"residual_multiplier": 1.0}),
    ("granite", {"query_pre_attn_scalar": None}),
    ("olmo3", {"rotary_base_local": None}),
    ("olmo3", {"window_attn_skip_freq": None}),
    ("olmo3", {"position_embedding_type": "rope"}),
    ("exaone4_window", {"no_rope_freq": None}),
    ("phi3_longrope", {"position_embedding_type": "rope"}),
    ("phi3_longrope", {"longrope_attention_factor": 1.0}),
    ("phi3_longrope", {"longrope_long_factor": [1.0, 1.5, 2.0, 2.5]}),
    ("phi3_longrope", {"longrope_original_max_position_embeddings": 16}),
    ("phi3_window", {"window_size": None}),
    ("phi3_window", {"rotary_percentage": 1.0}),
    ("glm", {"qkv_bias": False}),
    ("glm4", {"post_layernorms": False}),
    ("llama_yarn", {"position_embedding_type": "rope"}),
    ("llama_yarn", {"yarn_attention_factor": 1.0}),
    ("llama_yarn", {"yarn_beta_fast": 32.0}),
    ("qwen2_yarn", {"yarn_correction_range_round_to_int": True}),
    ("qwen2_yarn", {"yarn_mscale": None}),
    ("ministral", {"window_attn_skip_freq": 4}),
    ("ministral", {"window_attn_skip_freq": None}),
    ("ministral3", {"llama_4_scaling_beta": None}),
    ("smollm3", {"no_rope_freq": None}),
    ("smollm3_untied_window", {"no_rope_freq": [0, 0, 1, 1]}),
    ("gemma3", {"rotary_base_local": None}),
    ("gemma3", {"window_attn_skip_freq": None}),
    ("gemma3", {"seq_len_interpolation_factor": None}),
    ("nemotron", {"rotary_percentage": 1.0}),
    ("nemotron", {"normalization": "rmsnorm"}),
    ("hunyuan", {"qk_norm_after_rope": False}),
    ("apertus", {"activation": "gelu"}),
    ("apertus", {"qk_layernorm": False}),
    ("cohere", {"normalization": "rmsnorm"}),
    ("cohere2", {"no_rope_freq": None}),
    ("cohere2", {"window_attn_skip_freq": None}),
    ("gpt_neox", {"parallel_residual": False}),
    ("gpt_neox", {"bias": False}),
    ("gpt_neox", {"rotary_percentage": 1.0}),
    ("gpt_neox_sequential", {"activation": "squared-relu"}),
    ("starcoder2", {"normalization": "layernorm1p"}),
    ("starcoder2", {"window_size": None}),
    ("hunyuan_alpha", {"rotary_base": 100.0}),
    ("gpt_oss", {"softmax_type": "vanilla"}),
    ("gpt_oss", {"proj_bias": False}),
    ("gpt_oss", {"moe_expert_bias": False}),
    ("gpt_oss", {"moe_router_bias": False}),
    ("gpt_oss", {"activation_func_clamp_value": None}),
    ("gpt_oss", {"activation_func_clamp_value": None, "activation": "swiglu"}),
    ("gpt_oss", {"window_pattern": "all"}),
    ("nemotron_h", {"no_rope_freq": None}),
    ("nemotron_h", {"mamba_conv_bias": False}),
    ("nemotron_h_moe", {"mamba_time_step_min": 0.5}),
]


def test_family_feature_that_is_off_moves_rewards(build: Any, layout: ParallelLayout) -> None:
    """So that the test above would see it."""
    unmoved = []
    for case, changes in FEATURES:
        made = build(case)
        right = our_rewards(made.ours, layout)
        moved = (our_rewards(other(made, changes, layout), layout) - right).abs().max()
        if not moved / right.abs().max() > 1e-2:
            unmoved.append((case, changes))
    assert not unmoved


def other(case: Case, changes: dict[str, Any], layout: ParallelLayout) -> Any:
    """The same weights in a model of a changed config."""
    shape = ModelShape.from_config({**case.config, **changes})
    model = build_reward_model(shape, layout, num_attributes=2, precision=FP32)
    model.load_state_dict(case.ours.state_dict(), strict=False)
    return model


def test_family_config_as_others_write_it(build: Any, layout: ParallelLayout) -> None:
    """Windows as NeMo has them, and gammas that are not centred at zero, as in no Gemma of ours."""
    made = build("mistral_untied_window")
    same = other(made, {"window_size": [WINDOW - 1, 0]}, layout)
    assert torch.equal(our_rewards(same, layout), our_rewards(made.ours, layout))
    assert ModelShape.from_config({**made.config, "window_size": [-1, 0]}).window_size is None

    made = build("gemma2")
    same = other(made, {"layernorm_zero_centered_gamma": False}, layout)
    with torch.no_grad():
        for name, weight in same.named_parameters():
            if "layernorm" in name:
                weight += 1
    assert_close(our_rewards(same, layout), our_rewards(made.ours, layout), 1e-5)


def test_gemma_scales_embeddings_in_bf16_as_transformers_does(
    build: Any, layout: ParallelLayout
) -> None:
    config = {**build("gemma").config, "hidden_size": 72, "kv_channels": 32}
    shape = ModelShape.from_config(config)
    model = build_reward_model(shape, layout, num_attributes=1, precision=BF16)
    torch.nn.init.ones_(model.embedding.word_embeddings.weight)
    seen: list[Tensor] = []
    model.decoder.register_forward_pre_hook(
        lambda module, given, named: seen.append(named["hidden_states"]), with_kwargs=True
    )
    our_rewards(model, layout)
    wanted = float(torch.tensor(72**0.5).bfloat16())
    assert wanted != 72**0.5
    assert set(seen[0].flatten().tolist()) == {wanted}


# What a model_config.yaml may ask for and is not built: the key, and what was got and wanted.
NOT_BUILT = [
    ({"moe_num_experts": 8}, "got 8, wanted None or 0"),
    ({"activation": "reglu"}, "got 'reglu', wanted fast-swiglu or"),
    ({"normalization": "batchnorm"}, "got 'batchnorm'"),
    ({"bias": "yes"}, "got 'yes', wanted False or True"),
    ({"transformer_block_type": "post_ln"}, "got 'post_ln'"),
    ({"rotary_interleaved": True}, "got True"),
    ({"rope_fp32": True}, "got True, wanted None or products or tables"),
    ({"window_size": 0}, "got 0, wanted a number of keys above 0"),
    ({"window_size": [3, 3]}, "got [3, 3]"),
    ({"window_pattern": "odd"}, "got 'odd', wanted all or alternate"),
    ({"window_attn_skip_freq": 0}, "got 0, wanted a number N for every N-th layer, or 0 or 1 for"),
    ({"no_rope_freq": [0, 1, 0]}, "got [0, 1, 0], wanted a number N for every N-th layer, or 0 or"),
    ({"no_rope_freq": [0, 2]}, "got [0, 2]"),
    ({"attn_logit_softcapping": 0}, "got 0, wanted a number above 0"),
    ({"query_pre_attn_scalar": "x"}, "got 'x'"),
    ({"qkv_bias": "yes"}, "got 'yes', wanted False or True or None"),
    ({"pre_layernorms": 0.5}, "got 0.5, wanted True or False or None"),
    ({"residual_multiplier": -1.0}, "got -1.0, wanted a number above 0"),
    ({"zero_query_groups": 2}, "got 2, wanted a whole number from 0 to 1"),
    ({"num_layers": 2.5}, "got 2.5, wanted a whole number above 0"),
    ({"rotary_base": float("nan")}, "got nan, wanted a number above 0"),
    ({"num_query_groups": 4}, "got 4, wanted a divisor of the 2 attention"),
]


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8}
# And what one key forbids beside another.
NOT_TOGETHER = [
    (
        {"window_size": 4, "window_pattern": "alternate", "window_attn_skip_freq": 2},
        "wanted only one of",
    ),
    ({"num_moe_experts": 4, "moe_router_topk": 5}, "moe_router_topk: got 5, wanted a whole number"),
    ({"num_moe_experts": 4, "moe_router_topk": 2}, "moe_ffn_hidden_size: got None, wanted a"),
    (
        {**EXPERTS, "post_layernorms": True},
        "num_moe_experts: got 4 together with post_layernorms",
    ),
    ({"bias": True, "num_moe_experts": 4}, "bias: got True together with num_moe_experts=4"),
    (
        {"parallel_residual": True, "post_layernorms": True},
        "parallel_residual: got True together with post_layernorms=True",
    ),
    (
        {"parallel_residual": True, "pre_layernorms": False},
        "parallel_residual: got True together with pre_layernorms=False",
    ),
    ({"one_norm_per_layer": True}, "one_norm_per_layer: got True without parallel_residual"),
    (
        {"normalization": "layernorm_without_bias", "qk_layernorm": True},
        "got layernorm_without_bias together with qk_layernorm=True",
    ),
    ({**EXPERTS, "moe_layer_freq": [1]}, "moe_layer_freq: got [1], wanted a number N for every"),
    ({**EXPERTS, "moe_layer_freq": [0, 0]}, "moe_layer_freq: got no layer with experts"),
    (
        {**EXPERTS, "moe_router_score_function": "sqrt"},
        "moe_router_score_function: got 'sqrt', wanted softmax or sigmoid",
    ),
    (
        {**EXPERTS, "moe_router_enable_expert_bias": 1},
        "moe_router_enable_expert_bias: got 1, wanted true or false",
    ),
    (
        {**EXPERTS, "moe_router_num_groups": 3, "moe_router_group_topk": 2},
        "moe_router_num_groups: got 3, wanted a divisor of the 4 experts",
    ),
    (
        {**EXPERTS, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
        "moe_router_num_groups: got 4, wanted a divisor of the 4 experts that leaves at least 2",
    ),
    (
        {**EXPERTS, "moe_router_num_groups": 2, "moe_router_group_topk": 3},
        "moe_router_group_topk: got 3, wanted a whole number from 1 to 2",
    ),
    (
        {**EXPERTS, "moe_router_topk_scaling_factor": 0},
        "moe_router_topk_scaling_factor: got 0, wanted a number above 0",
    ),
    ({"hybrid_override_pattern": "*"}, "hybrid_override_pattern: got '*', wanted one of M * - E"),
    ({"hybrid_override_pattern": 2}, "hybrid_override_pattern: got 2, wanted one of M * - E"),
    ({"hybrid_override_pattern": "*E"}, "got '*E' with num_moe_experts=None, wanted experts"),
    ({"hybrid_override_pattern": "*-", "bias": True}, "got '*-' together with bias=True"),
    ({"hybrid_override_pattern": "M-"}, "mamba_num_heads: got None, wanted"),
    ({"position_embedding_type": "yarn"}, "yarn_rotary_scaling_factor: got nan"),
    ({"position_embedding_type": "yarn", "rotary_base": 1}, "rotary_base: got 1.0, wanted more"),
]


def test_model_config_of_what_is_not_built_is_refused() -> None:
    config = {
        "num_layers": 2,
        "hidden_size": 16,
        "ffn_hidden_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    ModelShape.from_config(config)
    for changes, said in NOT_BUILT:
        with pytest.raises(CheckpointError) as caught:
            ModelShape.from_config({**config, **changes})
        (key,) = changes
        assert f"{key}: {said}" in str(caught.value)
    for changes, said in NOT_TOGETHER:
        with pytest.raises(CheckpointError, match=re.escape(said)):
            ModelShape.from_config({**config, **changes})


def watch(model: Any) -> dict[str, set[torch.dtype]]:
    """The dtypes of what goes into layers, and into their products."""
    seen: dict[str, set[torch.dtype]] = {"layers": set(), "products": set()}

    def note(name: str) -> Any:
        return lambda module, given, named: seen[name].add((*given, *named.values())[0].dtype)

    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(note("layers"), with_kwargs=True)
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(note("products"), with_kwargs=True)
        # A layer of a hybrid model has only one of them.
        both = (layer.self_attention, "linear_qkv"), (layer.mlp, "linear_fc1")
        for each in (getattr(module, name) for module, name in both if hasattr(module, name)):
            each.register_forward_pre_hook(note("products"), with_kwargs=True)
            each.infer = lambda x, infer=each.infer: seen["products"].add(x.dtype) or infer(x)
    return seen


@pytest.mark.parametrize("case", CASES)
def test_family_in_16_bits_is_near_and_its_stream_in_fp32(
    case: str, build: Any, layout: ParallelLayout
) -> None:
    """In scoring the residual stream is fp32, and products are not.

    Tokens go to the experts that they have in fp32. Otherwise one whose scores nearly tie can go
    to another expert in 16 bits.
    """
    made = build(case)
    with layouts.recorded_choices(made.ours) as choices:
        wanted = our_rewards(made.ours, layout, sharing(case))
    for precision in (Precision.bf16, Precision.fp16) if case in layouts.CASES else (BF16,):
        model = load(made.path, layout, precision)
        seen, dtype = watch(model), model.config.params_dtype
        assert dtype is torch.bfloat16 or precision is not BF16
        check_dtypes(model, made)
        assert model.rm_head.weight.dtype is torch.float32
        with layouts.replayed_choices(model, choices):
            rewards = our_rewards(model, layout, sharing(case))
        assert_close(rewards, wanted, 0.1, precision)
        assert seen == {"layers": {torch.float32}, "products": {dtype}}


def check_dtypes(model: Any, made: Case) -> None:
    """All weights have the model's dtype, but routers that transformers keeps in fp32."""
    is_kept = "gate.weight" in made.theirs._keep_in_fp32_modules_strict
    for name, weight in model.decoder.named_parameters():
        is_fp32 = is_kept and name.endswith("mlp.router.weight")
        assert weight.dtype is (torch.float32 if is_fp32 else model.config.params_dtype), name


@pytest.mark.parametrize(
    "case",
    [
        "mistral_untied_window",
        "gemma2",
        "nemotron",
        "qwen3",
        "olmo2",
        "granite",
        "hunyuan",
        "gpt_neox",
        "cohere",
        "apertus",
    ],
)
def test_family_recomputed_has_the_same_gradients_and_a_stream_in_bf16(
    case: str, build: Any, layout: ParallelLayout
) -> None:
    """In training the stream takes no more memory than the weights' dtype asks for."""

    def loss(rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        return rewards.square().sum(), torch.tensor(rewards.size(0))

    path = build(case).path
    plain = layouts.step(path, layout)
    for how in Recompute:
        if how is not Recompute.none:
            again = layouts.step(path, layout, how)
            assert again == {key: pytest.approx(plain[key], rel=1e-6) for key in plain}, how
        model = layouts.load(path, layout, BF16, how)
        seen = watch(model)
        wrapped = wrap_for_training(model)
        wrapped.train()
        forward_backward(wrapped, layouts.batches(), layout, loss)
        assert seen == {"layers": {torch.bfloat16}, "products": {torch.bfloat16}}, how
        assert all(weight.main_grad.abs().max() > 0 for weight in model.decoder.parameters())


@pytest.mark.parametrize(
    "case", ["qwen2", "qwen3", "qwen3_5", "gemma2", "nemotron", "olmo2", "hunyuan", "gpt_neox"]
)
def test_family_with_added_query_groups_trains_alike(
    case: str, build: Any, layout: ParallelLayout
) -> None:
    made = build(case)
    padded = made.path.with_suffix(".padded.nemo")
    convert_hf_to_nemo(made.path.with_suffix(".hf"), padded, tensor_parallel=4)
    alone, with_groups = (layouts.step(path, layout) for path in (made.path, padded))
    assert with_groups == {key: pytest.approx(alone[key], rel=1e-5) for key in alone}


def test_family_has_every_module_called_that_has_weights(build: Any) -> None:
    """Between data parallel ranks Megatron waits for updated weights as their module is called."""
    pack = PackedBatch.pack(SEQUENCES)
    unseen = {name: modules_that_are_not_called(build(name).ours, pack) for name in CASES}
    assert not any(unseen.values()), unseen
