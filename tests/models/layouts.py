"""Models at some layouts: ``layouts.py FOLDER REWARD_MODEL ARCHIVE...``, under torchrun.

Of each ARCHIVE a step of training, with the weights after it, and rewards in bf16; of REWARD_MODEL
the values of a critic. What rank N found is in FOLDER/rankN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_aligner.batch.packed import Group, PackedBatch, Records
from nemo_aligner.checkpoint.nemo.reward_model import (
    load_pretrained,
    load_reward_model,
)
from nemo_aligner.checkpoint.weights.shards import slices_of
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import LORA_TARGETS, OptimConfig, Recompute, SchedulerConfig
from nemo_aligner.data.packing import uniform_rope
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, destroy_layout, initialize_layout
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.models.experts import routers
from nemo_aligner.models.lora import train_adapters_alone
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.shapes.lora import LoraShape
from nemo_aligner.models.step import forward_backward, gather_rewards, infer, infer_values
from nemo_aligner.models.training_wrap import set_routers, wrap_for_training
from nemo_aligner.training.optimizer import build_optimizer
from tests.harness.families import SEQUENCES

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP=2": {"tp": 2},
    "TP=2+SP": {"tp": 2, "sequence_parallel": True},
    "PP=2": {"pp": 2},
    "CP=2": {"cp": 2},
    "CP=2+ring": {"cp": 2, "ring": True},
    "EP=2": {"ep": 2},
    "CP=2, EP=2": {"cp": 2, "ep": 2},
}
# Adam's first update is ``lr * g / (|g| + eps)``. With the default of 1e-8, a weight whose gradient
# is of that size moves by up to the whole ``lr`` on rounding alone. There are about 15 such weights
# in 300,000, and they moved rewards by up to 7e-5. With this epsilon an update is also nearly
# proportional to a small gradient, so weights show a gradient that is wrong by a factor.
EPSILON = 1e-3
IN_BF16 = ("TP=2", "PP=2")  # at the others: serving/engine/test_batch_invariance.py
# What is there of experts.
MIXTURES = [
    "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3", "qwen3_5_moe",
    "qwen3_next", "gpt_oss", "nemotron_h_moe", "gemma4_moe",
]  # fmt: skip
# What is there of linear attention, which context parallelism does not split.
HYBRIDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "nemotron_h_moe"]
# Mixtures that context parallelism splits: a shared expert, groups of experts, attention sinks, and
# heads of two sizes. Routers do not see it.
MIXTURES_OF_CONTEXTS = ["qwen2_moe", "deepseek_v3", "gpt_oss", "gemma4_moe"]
# What is there of layers that read the token's embedding, which only the first stage has.
OF_ONE_STAGE = ["gemma4_small"]
# One case for each kind of attention. CP=2+ring has only these, because the ring is a backend of
# attention. TP=2 and CP=2 also have those of experts: all other code at TP=2 is that of TP=2+SP,
# and at CP=2 that of one process.
ATTENTIONS = [
    "llama3", "llama_dynamic", "mistral_untied_window", "gemma2", "gemma3", "deepseek_v3_untied",
    "gemma4", "gemma4_small", "gpt_oss",
]  # fmt: skip
# Of tests.harness.families, one of each.
CASES = [
    "llama3", "llama_dynamic", "qwen2", "qwen3", "mistral_untied_window", "ministral", "ministral3",
    "smollm3_untied_window", "gemma", "gemma2", "gemma3", "nemotron", "olmo2", "granite",
    "phi3_longrope", "glm4", "exaone4_window", "hunyuan_alpha", "gpt_neox",
    "starcoder2", "cohere2", "apertus", "deepseek_v3_untied", "gemma4", "gemma4_small",
    *dict.fromkeys(HYBRIDS + MIXTURES),
]  # fmt: skip
LORA = LoraShape(4, 8.0, LORA_TARGETS)
LORA_LAYOUTS: dict[str, dict[str, Any]] = {
    **{name: LAYOUTS[name] for name in ("TP=2+SP", "PP=2", "EP=2")},
    "DP=2": {},
}
# One of each kind of layer that has adapters, except plain ones (tests/paths/distributed).
LORA_CASES = [
    "gemma4", "gemma4_small", "gemma4_moe", "nemotron_h", "nemotron_h_moe", "deepseek_v3",
    "gpt_oss", "qwen3_5_moe",
]  # fmt: skip
LENGTHENED = [list(range(3, 3 + length)) for length in (5, 21, 1, 12)]


def batches(
    layout: ParallelLayout | None = None,
    length_dependent_rope: Callable[[int], int] = uniform_rope,
    apart: bool = False,
) -> list[PackedBatch]:
    """Three pairs; those of the first pack, 69 tokens, have a common prefix if rotated alike.

    Of two data parallel ranks the second has one pack, and the first two. Each pair has a pack of
    its own there, and where they are ``apart``.
    """
    is_shared = len({length_dependent_rope(len(each)) for each in SEQUENCES[:2]}) == 1
    groups = [Group(2, 30)] if is_shared else None
    first = PackedBatch.pack(SEQUENCES[:2], Records.of([0], [2]), groups=groups)
    second, third = (
        PackedBatch.pack(SEQUENCES[at : at + 2], Records.of([at // 2], [2]), range(at, at + 2))
        for at in (2, 4)
    )
    if layout is not None and layout.dp > 1:
        return [third] if layout.dp_rank else [first, second]
    if apart:
        return [first, second, third]
    return [first, PackedBatch.pack(SEQUENCES[2:], Records.of([1, 2], [2, 2]), range(2, 6))]


def load(
    archive: Path,
    layout: ParallelLayout,
    precision: Precision = Precision.fp32,
    recompute: Recompute = Recompute.none,
) -> Any:
    kinds = {"precision": precision, "recompute": recompute}
    return load_pretrained(archive, layout, num_attributes=1, **kinds).model


def everyone(rewards: Any, layout: ParallelLayout) -> list[float]:
    return gather_rewards(rewards, batches(layout), (6, 1), layout).flatten().tolist()


def step(
    archive: Path, layout: ParallelLayout, recompute: Recompute = Recompute.none
) -> dict[str, Any]:
    """Rewards before a step and after it, and the norm of its gradient."""
    return step_with_weights(archive, layout, recompute)[0]


def step_with_weights(
    archive: Path, layout: ParallelLayout, recompute: Recompute = Recompute.none
) -> tuple[dict[str, Any], dict[str, list[Part]]]:
    """What ``step`` returns, and the parts of the weights after the step.

    A mixture's routers are trained, with the auxiliary loss, which depends on the packs.
    """
    model = load(archive, layout, recompute=recompute)
    set_routers(model, trained=True, aux_loss_coeff=0.1)
    wrapped = wrap_for_training(model)
    config = OptimConfig(lr=0.01, eps=EPSILON, sched=SchedulerConfig(warmup_steps=1))
    optimizer = build_optimizer(wrapped, config, 1.0, 10)
    wrapped.train()
    wrapped.zero_grad_buffer()
    packs = batches(layout, model.length_dependent_rope, apart=archive.stem in MIXTURES)
    before = forward_backward(wrapped, packs, layout, BradleyTerry().loss)
    update = optimizer.step()
    assert update.applied
    optimizer.finish_update()
    after = infer(wrapped, packs, layout)
    found = {
        "before": everyone(before, layout),
        "grad_norm": update.grad_norm,
        "after": everyone(after, layout),
    }
    return found, parts_of(model)


def lora_steps(archive: Path, layout: ParallelLayout) -> dict[str, list[float]]:
    """The gradients' norms of two steps of adapters, and the rewards after them.

    Before the first step an adapter's B is 0, and so is the gradient of its A.
    """
    how = {"num_attributes": 1, "precision": Precision.fp32}
    model = load_pretrained(archive, layout, lora=LORA, **how).model
    train_adapters_alone(model)
    wrapped = wrap_for_training(model)
    config = OptimConfig(lr=0.01, eps=EPSILON, sched=SchedulerConfig(warmup_steps=1))
    optimizer = build_optimizer(wrapped, config, 1.0, 10)
    wrapped.train()
    packs, norms = batches(layout), []
    for _ in range(2):
        wrapped.zero_grad_buffer()
        forward_backward(wrapped, packs, layout, BradleyTerry().loss)
        norms.append(optimizer.step().grad_norm)
        optimizer.finish_update()
    return {"grad_norms": norms, "after": everyone(infer(wrapped, packs, layout), layout)}


def lora_at_layouts(archives: Sequence[Path]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, sizes in LORA_LAYOUTS.items():
        layout = initialize_layout(**sizes)
        fitting = [path for path in archives if path.stem in LORA_CASES]
        fitting = [path for path in fitting if is_split_by(layout, path.stem)]
        found[name] = {path.stem: lora_steps(path, layout) for path in fitting}
        destroy_layout()
    return found


# What a rank has of a weight: where it begins on each axis, the size of the whole, and its data.
Part = tuple[tuple[int, ...], tuple[int, ...], Tensor]


def parts_of(model: Any) -> dict[str, list[Part]]:
    """The parts of all weights that this rank has, by the names that they are saved by."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    parts: dict[str, list[Part]] = {}
    for entry in nested_values(model.sharded_state_dict(prefix="model.")):
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for tensor in nested_values(built):
            if isinstance(tensor, ShardedTensor):
                data = (
                    tensor.data.detach()
                    .clone()
                    .view(*[1] * tensor.prepend_axis_num, *tensor.data.shape)
                )
                part = (tensor.global_offset, tensor.global_shape, data)
                parts.setdefault(tensor.key, []).append(part)
    return parts


def whole_weights(ranks: Sequence[dict[str, list[Part]]]) -> dict[str, Tensor]:
    """The whole weights of which the ranks have parts. What several have must be the same bits."""
    weights: dict[str, Tensor] = {}
    for key in dict.fromkeys(key for of_rank in ranks for key in of_rank):
        parts = [part for of_rank in ranks for part in of_rank.get(key, [])]
        weight = torch.full(parts[0][1], torch.nan)
        for begin, _, data in parts:
            place = weight[slices_of(begin, data.shape)]
            is_free = place.isnan()
            assert torch.equal(place[~is_free], data[~is_free]), f"{key}: replicas differ"
            place.copy_(data)
        assert not weight.isnan().any(), f"{key}: no rank has a part of it"
        weights[key] = weight
    return weights


def rewards(model: Any, layout: ParallelLayout) -> list[float]:
    return everyone(infer(model, batches(layout, model.length_dependent_rope), layout), layout)


@contextmanager
def recorded_choices(model: Any) -> Iterator[dict[int, list[Tensor]]]:
    """Record the experts ``[T, k]`` that each layer's router chooses, by the layer's number."""
    choices: dict[int, list[Tensor]] = {number: [] for number in routers(model)}

    def recording(number: int, original: Any) -> Callable[[Tensor], Tensor]:
        def choose(scores: Tensor) -> Tensor:
            choices[number].append(original(scores))
            return choices[number][-1]

        return choose

    with _choosing(
        model, {n: recording(n, router._choose) for n, router in routers(model).items()}
    ):
        yield choices


@contextmanager
def replayed_choices(model: Any, choices: Mapping[int, Sequence[Tensor]]) -> Iterator[None]:
    """Let routers choose the experts that ``recorded_choices`` recorded of the same packs.

    Where two experts' scores nearly tie, rounding decides which one is chosen, and the output with
    the other expert is not close.
    """
    rows = {number: iter(chosen) for number, chosen in choices.items()}
    with _choosing(model, {n: partial(lambda it, scores: next(it), it) for n, it in rows.items()}):
        yield


@contextmanager
def _choosing(model: Any, functions: Mapping[int, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Replace how routers choose experts, ``scores [T, E] -> [T, k]``, by the layer's number."""
    replaced = {number: router for number, router in routers(model).items() if number in functions}
    for number, router in replaced.items():
        router._choose = functions[number]
    yield
    for router in replaced.values():
        del router._choose  # the class's method is visible again


def load_critic(archive: Path, layout: ParallelLayout) -> GPTRewardModel:
    """The model as a critic, whose head reads every token."""
    loaded = load_pretrained(
        archive, layout, num_attributes=2, precision=Precision.fp32, reads_every_token=True
    )
    return loaded.model


def critic(archive: Path, layout: ParallelLayout) -> dict[str, Any]:
    """A critic's values, and the rewards of all beginnings."""
    beginnings = [sequence[:end] for sequence in LENGTHENED for end in range(1, len(sequence) + 1)]
    alike = [[*range(30, 50), 7], [*range(30, 50), 8, 9]]
    packs = [
        PackedBatch.pack(LENGTHENED),
        PackedBatch.pack(alike, Records.of([0], [2]), groups=[Group(2, 20)]),
    ]
    model = load_reward_model(archive, layout).model
    return {
        "rewards": infer(model, [PackedBatch.pack(beginnings)], layout),
        "with_prefix": infer(model, packs[1:], layout),
        "values": infer_values(load_critic(archive, layout), packs, layout),
    }


def received_late(layout: ParallelLayout) -> list[bool]:
    """Whether what one stage sends, and goes on, is what the other one receives afterwards."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    from nemo_aligner.distributed.collectives import PipelineMessages

    shapes = [(100_000, 1, 8), (3, 1, 8)]
    config = ModelParallelConfig(
        pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, variable_seq_lengths=True
    )
    messages = PipelineMessages(config, shapes, torch.float32)
    sent = [torch.arange(shape[0] * 8.0).view(shape) for shape in shapes]
    got = []
    if layout.is_first_stage:
        for tensor in sent:
            messages.send_forward(tensor, False)
    dist.barrier()
    if layout.is_last_stage:
        got = [messages.recv_forward(shape, False) for shape in shapes]
    messages.finish()
    return [torch.equal(*pair) for pair in zip(got, sent, strict=True)] if got else []


def is_split_by(layout: Any, case: str) -> bool:
    """Whether a case is trained at a layout, which may be given by its sizes alone."""
    if layout.ring and case not in ATTENTIONS:
        return False
    is_plain = case not in {*ATTENTIONS, *MIXTURES, *HYBRIDS}
    if is_plain and layout.pp == 1 and not layout.sequence_parallel and layout.tp * layout.cp > 1:
        return False
    if layout.cp > 1 and case in MIXTURES and case not in MIXTURES_OF_CONTEXTS:
        return False
    is_one_stage = layout.pp == 1 or case not in OF_ONE_STAGE
    has_experts = layout.ep == 1 or case in MIXTURES
    return is_one_stage and has_experts and (layout.cp == 1 or case not in HYBRIDS)


def main(folder: str, reward_model: str, *archives: str) -> None:
    with launch(60.0) as world:
        found: dict[str, dict[str, Any]] = {}
        weights: dict[tuple[str, str], dict[str, list[Part]]] = {}
        on_rank: dict[str, Any] = {"weights": weights}
        for name, sizes in LAYOUTS.items():
            layout = initialize_layout(**sizes)
            found[name] = {}
            for archive in map(Path, archives):
                if not is_split_by(layout, archive.stem):
                    continue
                got, weights[name, archive.stem] = step_with_weights(archive, layout)
                if name in IN_BF16:
                    model = load(archive, layout, Precision.bf16)
                    with recorded_choices(model) as got["choices"]:
                        got["bf16"] = rewards(model, layout)
                found[name][archive.stem] = got
            if layout.ep > 1:
                destroy_layout()
                continue
            values = critic(Path(reward_model), layout)
            if layout.is_last_stage and layout.tp_rank == 0:
                on_rank[name] = values
            if layout.pp > 1:
                on_rank["received"] = received_late(layout)
            destroy_layout()
        on_rank["lora"] = lora_at_layouts([*map(Path, archives)])
        torch.save({**on_rank, "families": found}, Path(folder, f"rank{world.rank}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
