"""Dry run: describe a training run, with every check that needs no weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
from nemo_aligner.checkpoint.run import RunCheckpoints
from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import torch_dtype
from nemo_aligner.config.model import layout_sizes
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.token_cache import IndexPlace, are_kept
from nemo_aligner.data.training_data import TrainingData, TrainLoader
from nemo_aligner.distributed.layout import LayoutSizes, check_sizes
from nemo_aligner.models.attention.packed import copies_keys, why_gathered
from nemo_aligner.models.attention.segments import chains_of
from nemo_aligner.models.pointwise.choice import choose_kernels
from nemo_aligner.models.pointwise.operations import EAGER
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.training.build import (
    build_data,
    build_loader,
    check_model,
    trained_model_config,
    with_defaults,
)
from nemo_aligner.training.cost import Packs, Plan, attended_keys, parameters
from nemo_aligner.training.memory import GIB, Memory, fullest_stage
from nemo_aligner.training.resume import changes_since, find_latest, new_state
from nemo_aligner.training.run import (
    build_early_stopping,
    check_settings,
    describe_model,
    describe_steps,
    open_checkpoints,
)
from nemo_aligner.utils.console import show_bytes
from nemo_aligner.utils.errors import ConfigError

_STEPS_LOOKED_AT = 20
# Adam's moments and an fp32 copy of each parameter.
_OPTIMIZER_BYTES = 12


def check_run(config: TrainConfig, processes: int) -> str:
    """Describe a run on ``processes`` ranks; no process group is needed.

    All data is read and tokenized, and of the base checkpoint everything but its weights.

    Raises:
        AlignerError: the run would end before its first step: settings, data, base checkpoint or
            layout are unfit, the output cannot be written, or another run lies there.
    """
    check_settings(config)
    names_precision = config.trainer.precision is not None
    config = with_defaults(config)
    path = Path(str(config.pretrained_checkpoint.restore_from_path))
    layout = _layout(config, processes)
    tokenizer, start = read_text_rules(path)
    model_config = trained_model_config(config)
    shape = ModelShape.from_config(model_config)
    check_model(config, shape, layout)
    tokenizer.check_fits(shape.vocab_size)
    data = build_data(config)
    loader = build_loader(config, data, layout.dp, 0, shape.query_key_cost())
    loop = config.trainer.rm
    total_steps = loader.total_steps(loop.max_epochs, loop.max_steps)
    config.model.optim.sched.last_decay_step(total_steps)
    checkpoints = open_checkpoints(config.exp_manager, data)
    build_early_stopping(config.exp_manager, data)
    head_is_new = start is None or config.pretrained_checkpoint.new_head
    num_outputs = data.objective.output_columns.count
    plan = _plan(config, layout, loader, total_steps, num_outputs, shape)
    return "\n".join(
        [
            data.table(),
            describe_model(config, shape, layout, head_is_new=head_is_new),
            describe_steps(config, data, total_steps, loader.imbalance, checkpoints),
            *([] if names_precision or start is not None else _precision_here(config)),
            f"scoring contract: {data.contract.hash}",
            _render_memory(fullest_stage(shape, plan), plan.packs),
            _check_output(config, checkpoints, shape),
            *_resuming(config, data, checkpoints, model_config, total_steps),
            f"The run can begin, on {processes} process{'es' * (processes > 1)}. This dry run read "
            f"no weights and wrote {_written(config)}.",
        ]
    )


def _precision_here(config: TrainConfig) -> list[str]:
    """A line on the precision of this machine, where the run may be meant for another one."""
    if torch.cuda.is_available():
        return []
    return [
        f"precision: {config.precision.value}, as on this machine without a GPU; a GPU would take "
        "bf16 (trainer.precision=bf16 plans for one)"
    ]


def _written(config: TrainConfig) -> str:
    data = config.model.data
    kept = are_kept(data.data_prefix.all_files, IndexPlace(data.index_dir, data.keep_index))
    return "only the tokenized data, which the run will reuse" if kept else "nothing"


def _layout(config: TrainConfig, processes: int) -> LayoutSizes:
    options = config.model
    sizes = layout_sizes(options)
    ring = sizes.pop("ring")
    return LayoutSizes(**sizes, ring=ring, dp=check_sizes(processes, **sizes))


def _plan(
    config: TrainConfig,
    layout: LayoutSizes,
    loader: TrainLoader,
    total_steps: int,
    num_outputs: int,
    shape: ModelShape,
) -> Plan:
    """Cost per rank of the largest packs of the first steps."""
    options, dtype = config.model, torch_dtype(config.precision)
    packs = [loader.plan(step).packs for step in range(min(total_steps, _STEPS_LOOKED_AT))]
    largest = max((pack for of_step in packs for pack in of_step), key=lambda pack: pack.num_tokens)
    sequences = largest.rows.numel()
    return Plan(
        Packs(
            tokens=largest.num_tokens,
            sequences=sequences,
            keys=attended_keys(max(1, largest.num_tokens // sequences)),
            count=max(map(len, packs)),
            kept_keys=_kept_keys(largest),
        ),
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        pp=layout.pp,
        dp=layout.dp,
        sequence_parallel=layout.sequence_parallel,
        ring=layout.ring and why_gathered(shape, dtype) is None,
        precision=config.precision,
        recompute=options.activations_checkpoint_granularity,
        recompute_layers=options.activations_checkpoint_num_layers,
        freeze_layers=options.freeze_layers,
        train_router=options.train_router,
        cpu_offload=options.optim.cpu_offload,
        activations_offload=options.activations_offload,
        num_attributes=num_outputs,
        equal_heads=torch.cuda.is_available() and copies_keys(shape, dtype),
        fused_kernels=choose_kernels(options.pointwise_kernels) is not EAGER,
    )


def _kept_keys(pack: PackedBatch) -> float:
    """Keys per token in a GPU's attention: a prefix counts for each sequence that has it."""
    lengths = pack.cu_seqlens.diff().tolist()
    chains = chains_of(pack.prefixes.tolist(), cached=0)
    seen = sum(lengths[number] for own, chain in enumerate(chains) for number in (*chain, own))
    return seen / pack.num_tokens


def _render_memory(memory: Memory, packs: Packs) -> str:
    parts = ("weights", "gradients", "optimizer", "activations", "transient")
    listed = ", ".join(f"{part} {getattr(memory, part) / GIB:.2f}" for part in parts)
    host = f", and {memory.host / GIB:.2f} GiB of page-locked host memory" if memory.host else ""
    return (
        f"memory of the fullest rank, by arithmetic: {memory.total / GIB:.2f} GiB ({listed})"
        f"{host}, with packs of {packs.tokens} tokens, the largest of the first steps; CUDA, NCCL "
        "and fragmentation come on top"
    )


def _check_output(config: TrainConfig, checkpoints: RunCheckpoints, shape: ModelShape) -> str:
    """Folder that a run writes to, and how much it writes."""
    folder = Path(config.exp_manager.explicit_log_dir)
    existing = next(
        each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()
    )
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"exp_manager.explicit_log_dir: got {folder}, wanted a folder to write to: {existing} "
            f"is {'not writable' if existing.is_dir() else 'no folder'}"
        )
    size = 4 if config.precision is Precision.fp32 else 2
    saved = shape.num_parameters()
    if shape.lora is not None:  # the weights beside it are not saved
        saved = parameters(shape, Plan(Packs(1, 1, 1)), 0, trainable=True)
    one = saved * (size + _OPTIMIZER_BYTES)
    # The best, the newest, and one that is being written.
    most = config.exp_manager.checkpoint_callback_params.save_top_k + 2
    free = shutil.disk_usage(existing).free
    note = "" if most * one <= free else ": TOO FEW for them"
    return (
        f"output: {folder}; a checkpoint takes up to {show_bytes(one)}, and up to {most} exist "
        f"at once; {show_bytes(free)} are free{note}"
    )


def _resuming(
    config: TrainConfig,
    data: TrainingData,
    checkpoints: RunCheckpoints,
    model_config: dict[str, object],
    total_steps: int,
) -> list[str]:
    fresh = new_state(config, model_config, data)
    latest = find_latest(checkpoints, config, fresh, data)
    if latest is None:
        return ["begins: a new run, at step 1"]
    step = latest.state.step
    if step >= total_steps:
        begins = (
            f"begins: after step {step} of {latest.path}, the last: only the model will be written"
        )
    else:
        begins = f"begins: after step {step} of {latest.path}, with {total_steps - step} steps left"
    return [begins, *changes_since(latest, fresh)]
