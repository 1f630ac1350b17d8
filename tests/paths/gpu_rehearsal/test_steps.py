"""A step of every rank of a layout, with each set of installed packages and each kind of GPU.

Checked are collectives that ranks share, waits, kernels' requirements, and memory kept for the
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest

from nemo_aligner.config.model import LORA_TARGETS
from nemo_aligner.models.attention.backends import BACKENDS
from tests.paths.gpu_rehearsal.conftest import Rehearse, Task
from tests.paths.gpu_rehearsal.test_commands import DECISIONS, Seen, ended_well, unexpected

FLASH = ("torch_attn._varlen_attn.default", "aten._flash_attention_forward.default")
LAYERS_AND_PACKS = 2 * 2
WITH_CAP = {"attn_logit_softcapping": 50.0, "window_size": 32, "window_pattern": "alternate"}
OLD_TORCH = {"torch.nn.attention.varlen": None}  # torch 2.8 and 2.9 do not have this module
FLASH_ATTN = {"flash_attn": "tests.paths.gpu_rehearsal.fake_flash_attn"}
NEWER_FLASH = dict.fromkeys(
    ("flash_attn_interface", "flash_attn.cute"), "tests.paths.gpu_rehearsal.fake_newer_flash_attn"
)


def steps(
    sizes: dict[str, Any] | None = None, shape: dict[str, Any] | None = None, **options: Any
) -> Task:
    there = {name: options.pop(name) for name in ("given", "modules") if name in options}
    arguments = {"sizes": sizes or {}, "shape": shape or {}, **options}
    return {"run": "steps", "with": arguments, **there}


LAYOUTS = {
    "tp2+sp+dp2": steps({"tp": 2, "dp": 2, "sequence_parallel": True}),
    "pp2": steps({"pp": 2}),
    "cp2": steps({"cp": 2}, prefix=64),
    "cp2+ring": steps({"cp": 2, "ring": True}, {"window_size": 32}, prefix=64),
}
TP2 = steps({"tp": 2, "sequence_parallel": True})
# Options of a single rank, and differences in its shape.
ALONE = {
    "alone": steps(),
    "prefix": steps(prefix=64),
    "prefix, no groups": steps(shape={"num_query_groups": 4}, prefix=96),
    "selective, prefix": steps(recompute="selective", prefix=64),
    "full": steps(recompute="full"),
    "eager": steps(kernels="eager"),
    "selective, eager": steps(recompute="selective", kernels="eager"),
    "frozen, no groups": steps(shape={"num_query_groups": 4}, freeze_layers=1),
    "window, norms": steps(shape={"window_size": 32, "qk_layernorm": True, "qkv_bias": True}),
}
EXPERTS = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 448,
    "moe_shared_expert_intermediate_size": 896,
    "moe_shared_expert_gate": True,
}
GPT_OSS = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 448,
    "activation": "quick-geglu",
    "activation_func_clamp_value": 7.0,
    "moe_expert_bias": True,
    "moe_router_bias": True,
    "qkv_bias": True,
    "proj_bias": True,
    "softmax_type": "learnable",
    "window_size": 32,
    "window_pattern": "alternate",
}
# Scoring needs the number of rows of each expert, which a fake GPU cannot know.
MIXTURES = {
    "gpt-oss": steps(shape=GPT_OSS, scored=False),
    "gpt-oss, tp2": steps({"tp": 2}, GPT_OSS, scored=False),
    "experts": steps(shape=EXPERTS, scored=False),
    "experts, tp2+sp": steps({"tp": 2, "sequence_parallel": True}, EXPERTS, scored=False),
}
# The first of the two layers has linear attention; packs have two levels of runs of chunks.
DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
FLA = {
    "delta": "flash_linear_attention",
    "modules": dict.fromkeys(
        ("fla", "fla.ops", "fla.ops.gated_delta_rule"), "tests.paths.gpu_rehearsal.fake_fla"
    ),
}
LINEAR = {
    "linear": steps(shape=DELTA_NET, prefix=64),
    "linear by fla": steps(shape=DELTA_NET, prefix=64, **FLA),
    "linear by fla, tp2+sp": steps({"tp": 2, "sequence_parallel": True}, DELTA_NET, **FLA),
}
LORA = {"rank": 8, "alpha": 8.0, "targets": list(LORA_TARGETS)}
ADAPTERS = {
    f"LoRA on {base or 'bf16'}, tp{tp}, {recompute}": steps(
        {"tp": tp, "sequence_parallel": tp > 1},
        {"lora": LORA | ({"base_precision": base} if base else {})},
        recompute=recompute,
    )
    for base, tp, recompute in (
        (None, 2, "none"),
        ("nf4", 1, "none"),
        ("nf4", 1, "full"),
        ("int8", 1, "none"),
        ("fp8", 2, "none"),
    )
}
FOUR_LAYERS = {"num_layers": 4}  # two layers are offloaded
SIX_LAYERS = {"num_layers": 6}  # of two stages, three layers and one
OFFLOADS = {
    "offload": steps(shape=FOUR_LAYERS, offload=True),
    "offload, full": steps(shape=FOUR_LAYERS, offload=True, recompute="full"),
    "offload, tp2+sp": steps({"tp": 2, "sequence_parallel": True}, FOUR_LAYERS, offload=True),
    "offload, pp2": steps({"pp": 2}, SIX_LAYERS, offload=True),
}
UNHEEDED = {
    name: steps(shape=FOUR_LAYERS, offload=True, unheeded=[name])
    for name in ("wait_event", "wait_stream")
}
# Cases for which no kernel exists, so that SDPA computes them.
REFUSED = {
    "Turing": steps(given={"major": 7, "minor": 5}, precision="fp16"),
    "heads of 12": steps(shape={"kv_channels": 12}),
    "heads of 320": steps(shape={"kv_channels": 320}),
    "fp32": steps(precision="fp32"),
    "fp32, prefix": steps(precision="fp32", prefix=64),
    "cap": steps(shape=WITH_CAP),
}
ACCEPTED = {
    "old torch": steps(modules=OLD_TORCH),
    "old torch, prefix": steps(modules=OLD_TORCH, prefix=64),
    "cap by flash-attn": steps(shape=WITH_CAP, modules=FLASH_ATTN),
    "FlashAttention 3": steps(attention="flash_attn_3", modules=NEWER_FLASH, prefix=64),
    "cap by flash-attn-4": steps(shape=WITH_CAP, attention="flash_attn_4", modules=NEWER_FLASH),
}
GRAPHS = {
    "graphs": {"run": "graphs", "with": {"shape": {}, "prefix": 0}},
    "graphs, prefix, window": {
        "run": "graphs",
        "with": {"shape": {"window_size": 32, "qk_layernorm": True}, "prefix": 64},
    },
}
# One in 13 has nearly all pairs of what a case consists of. For the backend that computes sequences
# one by one the old torch changes nothing: each dtype with gradients and without is enough.
ATTENTION: dict[str, Task] = {
    name: {"run": "attention", "with": {"every": every}, "modules": modules}
    for name, every, modules in (
        ("attention", 13, FLASH_ATTN | NEWER_FLASH),
        ("attention, old torch", 61, {**OLD_TORCH, "flash_attn": None}),
    )
}
PLACES: Task = {"run": "places", "with": {}}
# As under ``srun --gpus-per-task=1``.
ONE_GPU: Task = {
    "run": "start",
    "with": {},
    "given": {"visible_devices": 1},
    "environment": {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
    },
}


def seen_of(rehearse: Rehearse, name: str, tasks: dict[str, Task], *stubs: str) -> dict[str, Seen]:
    """The records of each task with these stubs installed; every task must succeed."""
    results = rehearse(f"steps_{name}", list(tasks.values()), stubs)
    return ended_well(dict(zip(tasks, results, strict=True)))


@pytest.fixture(scope="module")
def plain(rehearse: Rehearse) -> dict[str, Seen]:
    kinds = {**LAYOUTS, **ALONE, **MIXTURES, **LINEAR, **REFUSED, **ACCEPTED, **GRAPHS}
    tasks = {**kinds, **ADAPTERS, **OFFLOADS, **UNHEEDED, **ATTENTION, "one GPU": ONE_GPU}
    return seen_of(rehearse, "plain", tasks)


@pytest.fixture(scope="module")
def with_engine(rehearse: Rehearse) -> dict[str, Seen]:
    """Without Apex a model is built all the same."""
    kinds = ALONE | REFUSED | MIXTURES
    tasks = {name: kinds[name] for name in ("alone", "fp32", "gpt-oss")} | {"tp2+sp": TP2}
    return seen_of(rehearse, "engine", {**tasks, "places": PLACES}, "te")


@pytest.fixture(scope="module")
def with_apex(rehearse: Rehearse) -> dict[str, Seen]:
    """It accumulates weight gradients in other kernels, also between stages."""
    tasks = {"tp2+sp": TP2, "pp2": LAYOUTS["pp2"]}
    return seen_of(rehearse, "engine and apex", tasks, "te", "apex")


def differences(by_rank: Sequence[dict[str, list[Any]]]) -> list[str]:
    """Groups whose ranks do not make the same collectives, by order and size."""
    problems = []
    for group in dict.fromkeys(name for rank in by_rank for name in rank):
        with_it = [rank[group] for rank in by_rank if group in rank]
        for number, calls in enumerate(zip_longest(*with_it)):
            if any(call != calls[0] for call in calls):
                problems.append(f"{group}, {number}: {calls}")
                break
    return problems


def test_rehearsed_ranks_make_the_same_collectives_and_wait_for_no_micro_batch(
    plain: dict[str, Seen], with_engine: dict[str, Seen], with_apex: dict[str, Seen]
) -> None:
    wrong = {}
    for stubs, results in (("", plain), ("engine", with_engine), ("apex", with_apex)):
        for name in results.keys() - {"one GPU", "places", *GRAPHS, *ATTENTION}:
            seen = results[name]
            problems = differences(seen["collectives"])
            for rank in seen["ranks"]:
                problems += unexpected({"phases": {"step": rank}}, {"step": DECISIONS["step"]})
            if not any(rank.values() for rank in seen["collectives"]) and len(seen["ranks"]) > 1:
                problems.append("nothing was sent")
            wrong[stubs, name] = problems
    assert not any(wrong.values()), {name: problems for name, problems in wrong.items() if problems}


def test_rehearsed_step_keeps_the_bytes_that_planning_counts(plain: dict[str, Seen]) -> None:
    """With torch's layers: stubs of TransformerEngine cannot tell what its layers keep."""
    wrong = {
        name: (rank["kept"], rank["planned"])
        for name in [*LAYOUTS, *ALONE, *MIXTURES, *LINEAR, *ADAPTERS, *OFFLOADS]
        for rank in plain[name]["ranks"]
        if "kept" in rank
        # Statistics of packs this short are too small to be offloaded.
        and rank["kept"] != pytest.approx(rank["planned"], rel=0.04 if name in OFFLOADS else 0.03)
    }
    assert not wrong
    assert all("kept" in plain[name]["ranks"][0] for name in ALONE)


def test_rehearsed_step_of_lora_needs_the_bytes_that_planning_counts(
    plain: dict[str, Seen],
) -> None:
    """Between steps, and at the peak of a step, when a quantized weight is dequantized."""
    for name in ADAPTERS:
        for rank in plain[name]["ranks"]:
            for moment in ("at rest", "peak"):
                planned = rank[f"planned {moment}"]
                assert rank[moment] == pytest.approx(planned, rel=0.03), (name, moment)


def test_rehearsed_offload_has_two_layers_on_the_gpu_and_no_race(plain: dict[str, Seen]) -> None:
    for name in OFFLOADS:
        for rank in plain[name]["ranks"]:
            assert not rank["races"], name
            if "peak" in rank:
                assert rank["peak"] == pytest.approx(rank["planned peak"], rel=0.05), name
    # Without one kind of wait, memory of another stream is read, overwritten or reused.
    expected = {
        "wait_event": {"reads what another stream writes", "let go while another stream uses it"},
        "wait_stream": {"reads what another stream writes", "writes what another stream writes"},
    }
    for name, kinds in expected.items():
        (rank,) = plain[name]["ranks"]
        assert {kind for kind in kinds for race in rank["races"] if race.endswith(kind)} == kinds


def flash_calls(seen: Seen) -> int:
    """One call a step, by torch's public function or by the operator behind it."""
    (rank,) = seen["ranks"]
    return sum(rank["operations"].get(name, 0) for name in FLASH)


def test_rehearsed_kernel_is_called_once_a_layer_and_pack_or_not_at_all(
    plain: dict[str, Seen],
) -> None:
    """Also that of torch 2.8 and 2.9 with shared prefixes, and flash-attn's with a cap."""
    calls = {name: flash_calls(plain[name]) for name in [*ALONE, *REFUSED, *ACCEPTED]}
    again = {"selective, prefix", "selective, eager", "full"}  # and once more in the backward pass
    for name in again:
        assert calls.pop(name) > LAYERS_AND_PACKS
    assert calls == {name: 0 if name in REFUSED else LAYERS_AND_PACKS for name in calls}
    for name in ("FlashAttention 3", "cap by flash-attn-4"):
        assert FLASH[0] not in plain[name]["ranks"][0]["operations"]  # torch's own function
    alone = plain["one GPU"]  # a process that sees one GPU uses it
    assert alone["device"] == "cuda:0"


def test_rehearsed_attention_backends_of_a_gpu_all_run(plain: dict[str, Seen]) -> None:
    """With flash-attn and a new torch; and with only torch 2.8, whose kernel has no windows."""
    on_gpu = {backend.name for backend in BACKENDS if not backend.name.startswith(("C", "ring"))}
    cases, of_old_torch = (
        {name for name, count in plain[task]["cases"].items() if count} for task in ATTENTION
    )
    assert cases == on_gpu
    assert of_old_torch == {"torch's varlen operator", "one by one"}


def test_rehearsed_segments_with_a_prefix_get_the_kernel_of_those_without(
    plain: dict[str, Seen],
) -> None:
    """The memory-efficient kernel aligns its causal mask to the last key, so no mask is passed."""
    (rank,) = plain["fp32, prefix"]["ranks"]
    texts = 4 * LAYERS_AND_PACKS
    for operation in ("_efficient_attention_forward", "_efficient_attention_backward"):
        assert rank["operations"][f"aten.{operation}.default"] == texts


def test_rehearsed_graphs_capture_nothing_that_waits(plain: dict[str, Seen]) -> None:
    """Nothing reads host memory either, since a replay would read it again."""
    for name in GRAPHS:
        seen = plain[name]
        assert seen["why"] is None
        assert seen["captured"]["waits"] == [], name
        assert seen["captured"]["bytes_to_gpu"] == 0
        # For each of four kinds of packs the first one runs without a graph.
        assert (seen["replayed"], seen["eager"]) == (8, 4)
        # Both when captured and when replayed; in two steps also the backward pass.
        assert seen["captured"]["parts"] == 4 + 8 + 2


def test_rehearsed_layers_launch_fused_kernels_between_their_products(
    plain: dict[str, Seen],
) -> None:
    """The final norm adds one for each pack."""
    packs = LAYERS_AND_PACKS // 2

    def launched(name: str) -> dict[str, int]:
        (rank,) = plain[name]["ranks"]
        return {key: count for key, count in rank["operations"].items() if "triton" in key}

    norms, layer_launches = 2 * LAYERS_AND_PACKS + packs, LAYERS_AND_PACKS
    assert launched("alone") == {
        "triton _norm_forward": norms,
        "triton _norm_backward": norms,
        "triton _rotate": 2 * layer_launches,
        "triton _silu_forward": layer_launches,
        "triton _silu_backward": layer_launches,
    }
    assert launched("eager") == {}
    # Queries and keys are normed between the split and RoPE.
    assert "triton _rotate" not in launched("window, norms")


def test_rehearsed_gradients_of_a_prefix_are_summed_by_one_kernel(plain: dict[str, Seen]) -> None:
    """One for keys and one for values. Torch's backward of an index would sort it in each layer."""
    (rank,) = plain["prefix"]["ranks"]
    assert rank["operations"]["aten._embedding_bag_forward_only.default"] == 2 * LAYERS_AND_PACKS
    assert rank["operations"]["aten.sort.stable"] == LAYERS_AND_PACKS // 2


def test_rehearsed_weight_gradients_are_added_by_their_products(plain: dict[str, Seen]) -> None:
    """Four matrices a layer; in fp32 the matmul is a plain one."""
    for name, product in (("alone", "aten.addmm.dtype_out"), ("fp32", "aten.addmm_.default")):
        (rank,) = plain[name]["ranks"]
        assert rank["operations"][product] == 4 * LAYERS_AND_PACKS


def test_rehearsed_experts_are_multiplied_by_one_kernel(plain: dict[str, Seen]) -> None:
    """Forward, and backward to rows and weights; two matmuls a layer. Outputs are summed by one."""
    for name in ("experts", "gpt-oss"):
        (rank,) = plain[name]["ranks"]
        for kernel in ("_sum_outputs", "_output_gradients"):
            assert rank["operations"][f"triton {kernel}"] == LAYERS_AND_PACKS
    for name in MIXTURES:
        for rank in plain[name]["ranks"]:
            assert rank["operations"]["aten._grouped_mm.default"] == 3 * 2 * LAYERS_AND_PACKS


def test_rehearsed_flash_linear_attention_is_called_once_a_layer_and_level(
    plain: dict[str, Seen],
) -> None:
    """Once more in the backward pass, which recomputes the layer, and never in a validation."""
    packs = LAYERS_AND_PACKS // 2
    levels = {"linear": 0, "linear by fla": 2, "linear by fla, tp2+sp": 1}
    for name, count in levels.items():
        for rank in plain[name]["ranks"]:
            operations = rank["operations"]
            calls = [
                operations.get(f"triton gated_delta_rule_{part}", 0)
                for part in ("forward", "backward")
            ]
            assert calls == [2 * packs * count, packs * count], name


def test_transformer_engine_s_layers_are_for_16_bits(with_engine: dict[str, Seen]) -> None:
    """fp32 matmuls use TF32."""
    modules = {name: with_engine[name]["ranks"][0]["engine_modules"] for name in ("alone", "fp32")}
    assert modules["alone"] > 0
    assert modules["fp32"] == 0
    assert flash_calls(with_engine["alone"]) == LAYERS_AND_PACKS
    assert flash_calls(with_engine["fp32"]) == 0


def test_transformer_engine_s_layers_have_a_place_for_every_tensor(
    with_engine: dict[str, Seen],
) -> None:
    """Where they do not, as for the bias of gpt-oss' output projection, torch's layers are used."""
    differing = with_engine["places"]["differing"]
    assert {"llama", "qwen2", "nemotron", "mixtral"} <= differing.keys()
    assert not any(differing.values()), differing
    assert with_engine["gpt-oss"]["ranks"][0]["engine_modules"] == 0
