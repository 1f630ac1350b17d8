"""The time of a step by the cost model, against what was measured and between plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.planning.cost import (
    Packs,
    Plan,
    even_packs,
    expert_parameters,
    pack_flops,
    parameters,
)
from nemo_aligner.planning.memory import fullest_stage, offloaded_bytes
from nemo_aligner.planning.presets import preset
from nemo_aligner.planning.step_time import (
    HOST_SECONDS_PER_LAYER,
    UPDATE_SHARE,
    Machine,
    pack_time,
    peak_bandwidth,
    peak_flops,
    step_time,
)

H100 = Machine(989e12, None, intra_node=450e9, inter_node=50e9, memory=3.35e12)
# docs/benchmarks.md: a step of 73,150 tokens in bf16, in packs whose tokens attend to 583 keys on
# average.
_TOKENS, _KEYS = 73150, 582.6
# Hidden size, layers, number of packs, fused kernels, seconds.
MEASURED = [
    (2048, 16, 5, False, 0.8197),
    (2048, 16, 5, True, 0.6942),
    (2048, 16, 3, True, 0.6876),
    (4096, 8, 5, False, 1.2379),
    (4096, 8, 5, True, 1.1350),
    (1024, 24, 5, False, 0.4727),
]
# Small products reach less: the plan is 11% too short.
NARROW = (1024, 24, 5, True, 0.4185)


def llama(layers: int, hidden: int) -> ModelShape:
    """The model of ``benchmarks/synthetic.py``."""
    return ModelShape.from_config(llama_config(layers, hidden))


def llama_config(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 3 * hidden,
        "num_attention_heads": hidden // 64,
        "num_query_groups": max(2, hidden // 256),
        "kv_channels": 64,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    }


def test_step_time_is_that_of_the_measured_steps() -> None:
    errors = {}
    for hidden, layers, packs, fused, seconds in [*MEASURED, NARROW]:
        plan = Plan(Packs(_TOKENS // packs, 80 // packs, _KEYS, packs), fused_kernels=fused)
        planned = step_time(llama(layers, hidden), plan, H100).total
        errors[hidden, packs, fused] = planned / seconds - 1
    assert errors.pop((1024, 5, True)) == pytest.approx(-0.11, abs=0.02)
    assert max(map(abs, errors.values())) < 0.05, errors


def test_small_layers_take_the_host_s_time_and_large_ones_the_gpu_s() -> None:
    plan = Plan(even_packs(4, 1024, 8192))
    small, large = llama(24, 1024), llama(8, 4096)
    faster = replace(H100, flops=2 * H100.flops, memory=2 * H100.memory)
    assert pack_time(small, plan, 0, H100) == pytest.approx(24 * HOST_SECONDS_PER_LAYER)
    assert pack_time(small, plan, 0, faster) == pack_time(small, plan, 0, H100)
    computed = pack_time(large, plan, 0, H100)
    assert pack_time(large, plan, 0, faster) == pytest.approx(computed / 2)


def test_copies_of_activations_hide_behind_computation_as_far_as_it_goes() -> None:
    shape, _ = preset("8B")
    plain = Plan(even_packs(4, 1024, 8192), recompute=Recompute.full)
    offloaded = replace(plain, activations_offload=True)
    states = 8192 * 30 * shape.hidden_size * 2  # of all layers but two
    assert offloaded_bytes(shape, offloaded, 0) == states
    machine = replace(H100, host=50e9)
    assert step_time(shape, offloaded, machine) == step_time(shape, plain, machine)
    # By a slow bus: one way beside the forward pass, the other beside the rest.
    slow = replace(machine, host=1e9)
    seconds = pack_time(shape, plain, 0, slow)
    assert step_time(shape, offloaded, slow).host == pytest.approx(2 * states / 1e9 - seconds)


def test_offloaded_activations_are_on_the_host_and_two_layers_on_the_gpu() -> None:
    shape, _ = preset("8B")
    plain = Plan(even_packs(4, 1024, 8192))
    here, there = (
        fullest_stage(shape, plain),
        fullest_stage(shape, replace(plain, activations_offload=True)),
    )
    layer = here.activations - fullest_stage(replace(shape, num_layers=31), plain).activations
    assert there.host == pytest.approx(30 * layer)
    assert here.activations - there.activations == pytest.approx(30 * layer)
    assert there.transient - here.transient == pytest.approx(layer, rel=0.3)
    moments = fullest_stage(shape, replace(plain, cpu_offload=True))
    assert moments.host == 8 * parameters(shape, plain, 0)


def test_state_of_experts_is_split_over_the_ranks_that_have_a_copy_of_them() -> None:
    config = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 512}
    shape = ModelShape.from_config({**llama_config(4, 1024), **config})
    packs = Packs(tokens=1000, sequences=10, keys=50)
    times = []
    for ep, copies in ((1, 4), (2, 2), (4, 1)):
        plan = Plan(packs, dp=4, ep=ep, cpu_offload=True)
        experts, trained = expert_parameters(shape, plan, 0), parameters(shape, plan, 0)
        assert experts * ep == 4 * 8 * 3 * 1024 * 512
        updated = (trained - experts) / 4 + experts / copies
        time = step_time(shape, plan, H100)
        moved = 8 * trained + 54 * updated
        assert time.update == pytest.approx(moved / (UPDATE_SHARE * 3.35e12))
        assert time.host == pytest.approx(16 * updated / H100.host)
        times.append(time)
    # A rank has fewer experts, and as much more of their state: what crosses the bus is the same.
    assert times[0].host == pytest.approx(times[1].host) == pytest.approx(times[2].host)


def test_an_assumed_efficiency_takes_the_place_of_the_measured_shares() -> None:
    plan = Plan(Packs(tokens=1000, sequences=10, keys=50, count=8))
    time = step_time(llama(4, 1024), plan, replace(H100, efficiency=0.5))
    assert time.update == 0
    flops = pack_flops(llama(4, 1024), plan, 0).total
    assert time.total == pytest.approx(8 * flops / (0.5 * 989e12))


def test_peaks_go_by_the_name_of_the_gpu() -> None:
    bf16, fp32 = Precision.bf16, Precision.fp32
    peaks = {
        ("NVIDIA H100", bf16): 989e12,
        ("NVIDIA H100", fp32): 67e12,
        ("NVIDIA H100 PCIe", Precision.fp16): 756e12,
        ("NVIDIA H100 80GB HBM3", bf16): 989e12,
        ("NVIDIA A100-SXM4-80GB", bf16): 312e12,
        ("NVIDIA B200", bf16): 2250e12,
        ("NVIDIA B200", fp32): None,
        ("NVIDIA GB200", bf16): 2500e12,
        ("NVIDIA GH100 480GB", bf16): 989e12,
        ("NVIDIA GeForce RTX 3060", bf16): None,
    }
    assert {key: peak_flops(*key) for key in peaks} == peaks
    assert peak_bandwidth("NVIDIA H100 80GB HBM3") == 3.35e12
    assert peak_bandwidth("NVIDIA GeForce RTX 3060") is None
