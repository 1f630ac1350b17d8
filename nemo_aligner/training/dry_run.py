"""Dry run: run every check of a training run that needs no weights, and describe the run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import torch_dtype
from nemo_aligner.config.model import layout_sizes
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.token_cache import IndexPlace, are_kept
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.distributed.layout import LayoutSizes, check_sizes
from nemo_aligner.models.attention.backends import copies_keys, why_gathered
from nemo_aligner.models.attention.choice import check_attention_choice
from nemo_aligner.models.attention.segments import chains_of
from nemo_aligner.models.delta_choice import check_delta_choice
from nemo_aligner.models.pointwise.choice import choose_kernels
from nemo_aligner.models.pointwise.operations import EAGER
from nemo_aligner.models.quantized import uses_triton
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.planning.cost import Packs, Plan, attended_keys, parameters
from nemo_aligner.planning.memory import GIB, Memory, fullest_stage
from nemo_aligner.planning.quantized import base_precision
from nemo_aligner.training.describe import describe_model, describe_steps
from nemo_aligner.training.prepare import (
    PreparedRun,
    check_settings,
    open_run_folder,
    prepare_run,
)
from nemo_aligner.training.resume import RunFolder, changes_since
from nemo_aligner.utils.console import show_bytes
from nemo_aligner.utils.errors import ConfigError

_STEPS_TO_INSPECT = 20
# Bytes of a checkpoint's optimizer state per parameter: Adam's two moments and an fp32 weight.
_OPTIMIZER_BYTES = 12


def check_run(config: TrainConfig, processes: int) -> str:
    """Check a training run on ``processes`` ranks and describe it, without a process group.

    This reads and tokenizes all data. It reads all of the base checkpoint except the weights.

    Raises:
        AlignerError: the run would fail before its first step: settings, data, base checkpoint or
            layout are invalid, or the output folder is not writable or holds another run.
    """
    check_settings(config)
    names_precision = config.trainer.precision is not None
    run = prepare_run(config, _layout(config, processes))
    config, start = run.config, run.base.contract
    folder = open_run_folder(run)
    head_is_new = start is None or config.pretrained_checkpoint.new_head
    plan = _plan(run)
    return "\n".join(
        [
            run.data.table(),
            describe_model(run, head_is_new=head_is_new),
            describe_steps(run, folder.checkpoints),
            *([] if names_precision or start is not None else _describe_precision(config)),
            f"scoring contract: {run.data.contract.hash}",
            _render_memory(fullest_stage(run.shape, plan), plan.packs),
            _check_output(config, run.shape, folder),
            *_describe_start(folder, run.total_steps),
            f"The run can begin, on {processes} process{'es' * (processes > 1)}. This dry run read "
            f"no weights and wrote {_describe_written(run)}.",
        ]
    )


def _describe_precision(config: TrainConfig) -> list[str]:
    """Describe the default precision of this machine, if it would be another one on a GPU.

    A user may check a run on a machine without a GPU and train on another one.
    """
    if torch.cuda.is_available():
        return []
    return [
        f"precision: {config.precision.value}, because this machine has no GPU; on a GPU it would "
        "be bf16 (trainer.precision=bf16 plans for one)"
    ]


def _describe_written(run: PreparedRun) -> str:
    """Describe which files the dry run has written."""
    data = run.config.model.data
    is_kept = are_kept(run.data.paths, IndexPlace(data.index_dir, data.keep_index))
    return "only the tokenized data, which the run will reuse" if is_kept else "nothing"


def _layout(config: TrainConfig, processes: int) -> LayoutSizes:
    """Compute the sizes of the parallel layout of a run on ``processes`` ranks."""
    options = config.model
    sizes = layout_sizes(options)
    ring = sizes.pop("ring")
    return LayoutSizes(**sizes, ring=ring, dp=check_sizes(processes, **sizes))


def _plan(run: PreparedRun) -> Plan:
    """Build the plan from which the memory is estimated, with the packs of the first steps.

    The plan counts every pack as if it were as large as the largest one.
    """
    config, layout, shape = run.config, run.layout, run.shape
    options, dtype = config.model, torch_dtype(config.precision)
    attention = options.attention_kernels
    check_attention_choice(attention, shape, dtype, current_device())
    check_delta_choice(options.linear_attention_kernels, shape, dtype, current_device())
    steps = range(min(run.total_steps, _STEPS_TO_INSPECT))
    packs = [run.loader.plan(step).packs for step in steps]
    all_packs = (pack for step_packs in packs for pack in step_packs)
    largest = max(all_packs, key=lambda pack: pack.num_tokens)
    sequences = largest.rows.numel()
    return Plan(
        Packs(
            tokens=largest.num_tokens,
            sequences=sequences,
            keys=attended_keys(max(1, largest.num_tokens // sequences)),
            count=max(map(len, packs)),
            kept_keys=_keys_per_token(largest),
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
        num_attributes=run.data.objective.output_columns.count,
        equal_heads=torch.cuda.is_available() and copies_keys(shape, dtype, attention),
        fused_kernels=choose_kernels(options.pointwise_kernels) is not EAGER,
        fused_dequantization=base_precision(shape) is not None and uses_triton(current_device()),
    )


def _keys_per_token(pack: PackedBatch) -> float:
    """Compute how many keys per token the attention kernel of a GPU receives for ``pack``.

    The keys of a shared prefix count once for the prefix, and once for each sequence that begins
    with it.
    """
    lengths = pack.cu_seqlens.diff().tolist()
    chains = chains_of(pack.prefixes.tolist(), cached=0)
    num_keys = sum(
        lengths[segment] for index, chain in enumerate(chains) for segment in (*chain, index)
    )
    return num_keys / pack.num_tokens


def _render_memory(memory: Memory, packs: Packs) -> str:
    """Describe the estimated memory of the rank that needs the most, by kind."""
    unit, name = (GIB, "GiB") if memory.total >= GIB else (2**20, "MiB")
    parts = ("weights", "gradients", "optimizer", "activations", "transient")
    listed = ", ".join(f"{part} {getattr(memory, part) / unit:.2f}" for part in parts)
    host = f"{memory.host / unit:.2f} {name} of page-locked host memory; " if memory.host else ""
    return (
        f"estimated memory of the fullest rank: {memory.total / unit:.2f} {name} ({listed})\n"
        f"  {host}with packs of {packs.tokens} tokens, the largest of the first steps; CUDA, NCCL "
        "and fragmentation come on top of this"
    )


def _check_output(config: TrainConfig, shape: ModelShape, run: RunFolder) -> str:
    """Check that the run's folder is writable, and compare its free space with the checkpoints.

    Raises:
        ConfigError: the folder is not writable.
    """
    folder = Path(config.exp_manager.explicit_log_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"exp_manager.explicit_log_dir: got {config.exp_manager.explicit_log_dir}, wanted a "
            f"folder to write to: {existing} is "
            f"{'not writable' if existing.is_dir() else 'not a folder'}"
        )
    size = 4 if config.precision is Precision.fp32 else 2
    saved = shape.num_parameters()
    if shape.lora is not None:  # LoRA: checkpoints have no frozen weights
        saved = parameters(shape, Plan(Packs(1, 1, 1)), 0, trainable=True)
    checkpoint_bytes = saved * (size + _OPTIMIZER_BYTES)
    count = run.checkpoints.count_on_disk(run.fresh, run.latest)
    free = shutil.disk_usage(existing).free
    note = "" if count * checkpoint_bytes <= free else ": TOO LITTLE for them"
    return (
        f"output: {config.exp_manager.explicit_log_dir}; a checkpoint takes up to "
        f"{show_bytes(checkpoint_bytes)}, and up to {count} exist at once; {show_bytes(free)} are "
        f"free{note}"
    )


def _describe_start(folder: RunFolder, total_steps: int) -> list[str]:
    """Describe at which step the run would start, and what has changed since its checkpoint."""
    latest = folder.latest
    if latest is None:
        return ["begins: a new run, at step 1"]
    step = latest.state.step
    if step >= total_steps:
        begins = (
            f"begins: after step {step} of {latest.path}, the last step; only the model will be "
            "written"
        )
    else:
        begins = f"begins: after step {step} of {latest.path}, with {total_steps - step} steps left"
    return [begins, *changes_since(latest, folder.fresh, folder.checkpoints.monitor)]
