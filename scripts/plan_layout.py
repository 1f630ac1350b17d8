"""Which parallel layouts fit on so many GPUs, what a GPU then holds, and how fast it might be.

    python scripts/plan_layout.py --params 8B --gpus 8
    python scripts/plan_layout.py --config base.nemo --gpus 64 --gpu-memory 141 --seq-length 4096

Nothing is measured here: nemo_aligner/planning/ counts what a step computes,
sends and holds. The memory was held against real steps (docs/performance.md); the speed rests on
what --tflops, --mfu, --intra-node and --inter-node assume. A step has --global-batch-size pairs of
two sequences of --seq-length tokens that share nothing, which is the most that the settings allow.
Where memory is short, layers are recomputed, as few of each pipeline stage as it takes. With more
than one number of GPUs the best layout of each is shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_aligner.errors import AlignerError, ConfigError

if TYPE_CHECKING:
    from nemo_aligner.models.shape import ModelShape
    from nemo_aligner.planning.cost import Plan
    from nemo_aligner.planning.planner import Candidate, Planner

GIB = 2**30
# layers, hidden, ffn, heads, query groups, channels of a head, vocabulary
SHAPES = {
    "1B": ("Llama 3.2 1B", 16, 2048, 8192, 32, 8, 64, 128256),
    "3B": ("Llama 3.2 3B", 28, 3072, 8192, 24, 8, 128, 128256),
    "7B": ("Llama 2 7B", 32, 4096, 11008, 32, 32, 128, 32000),
    "8B": ("Llama 3 8B", 32, 4096, 14336, 32, 8, 128, 128256),
    "13B": ("Llama 2 13B", 40, 5120, 13824, 40, 40, 128, 32000),
    "70B": ("Llama 3 70B", 80, 8192, 28672, 64, 8, 128, 128256),
    "405B": ("Llama 3 405B", 126, 16384, 53248, 128, 8, 128, 128256),
}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    try:
        shape, name = _shape(arguments)
        planner = _planner(shape, arguments)
        print(_heading(name, planner, arguments), flush=True)
        if len(arguments.gpus) == 1:
            _show_layouts(planner, arguments.gpus[0], arguments.top)
        else:
            _show_best(planner, arguments.gpus)
    except AlignerError as error:
        sys.exit(f"plan_layout.py: {error}")


def _planner(shape: ModelShape, options: argparse.Namespace) -> Planner:
    """The options, with the settings' own defaults.

    Raises:
        ConfigError: one has a value that cannot be.
    """
    from nemo_aligner.config.common import Precision
    from nemo_aligner.config.data import DataConfig
    from nemo_aligner.config.model import ModelConfig, Recompute
    from nemo_aligner.planning.cost import Machine
    from nemo_aligner.planning.planner import Planner

    length = options.seq_length or DataConfig().seq_length
    batch = options.global_batch_size or ModelConfig().global_batch_size
    if options.global_batch_tokens is not None:
        batch = max(1, options.global_batch_tokens // (2 * length))
    budget = options.micro_batch_tokens or max(ModelConfig().micro_batch_tokens, 2 * length)
    _check(options, shape, 2 * length)
    machine = Machine(
        flops=options.tflops * 1e12,
        efficiency=options.mfu,
        intra_node=options.intra_node * 1e9,
        inter_node=options.inter_node * 1e9,
        ranks_per_node=options.gpus_per_node,
        host=options.host * 1e9,
    )
    return Planner(
        shape,
        machine,
        usable=(options.gpu_memory - options.reserve) * GIB,
        batch=batch,
        length=length,
        budget=budget,
        precision=Precision(options.precision),
        recompute=None if options.recompute == "auto" else Recompute(options.recompute),
        freeze_layers=options.freeze_layers,
        cpu_offload=options.cpu_offload,
    )


def _check(options: argparse.Namespace, shape: ModelShape, pair: int) -> None:
    last, reserve = shape.num_layers - 1, options.reserve
    budget = options.micro_batch_tokens or pair
    above_zero = "a number above 0"
    checks = [
        ("tflops", options.tflops > 0, above_zero),
        ("mfu", 0 < options.mfu <= 1, "more than 0, at most 1"),
        ("intra_node", options.intra_node > 0, above_zero),
        ("inter_node", options.inter_node > 0, above_zero),
        ("host", options.host > 0, above_zero),
        ("reserve", reserve >= 0, "0 or more"),
        ("gpu_memory", options.gpu_memory > reserve, f"more than the {reserve:g} of --reserve"),
        ("micro_batch_tokens", budget >= pair, f"{pair} (a pair) or more"),
        ("freeze_layers", 0 <= options.freeze_layers <= last, f"0 to {last}"),
    ]
    for name, is_good, wanted in checks:
        if not is_good:
            got = getattr(options, name)
            raise ConfigError(f"--{name.replace('_', '-')}: got {got:g}, wanted {wanted}")


def _heading(name: str, planner: Planner, options: argparse.Namespace) -> str:
    shape = planner.shape
    frozen = f", {planner.freeze_layers} layers frozen" if planner.freeze_layers else ""
    return (
        f"{name}: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_parameters() / 1e9:.2f} billion parameters, "
        f"{planner.precision.value}{frozen}\n"
        f"A step: {planner.batch} pairs of 2 x {planner.length} tokens, in packs of at most "
        f"{planner.budget} tokens\n"
        f"A GPU: {options.gpu_memory:g} GiB, of which {options.reserve:g} are left free; "
        f"assumed: {options.tflops:g} TFLOP/s at {options.mfu:.0%}, "
        f"{options.intra_node:g} GB/s in a node of {options.gpus_per_node}, "
        f"{options.inter_node:g} GB/s beyond\n"
    )


def _show_layouts(planner: Planner, gpus: int, top: int) -> None:
    candidates = planner.candidates(gpus)
    found = planner.ranked(candidates)
    if not found:
        raise ConfigError(_what_would_fit(planner, gpus, candidates))
    print(_render([_row(planner, each) for each in found[:top]]))
    shown = f", the fastest {top} of them above" if len(found) > top else ""
    print(f"\n{len(found)} of {len(candidates)} layouts on {gpus} GPUs fit{shown}. The first one:")
    print("\n".join(f"  {line}" for line in _settings(found[0].plan)))


def _show_best(planner: Planner, numbers: Sequence[int]) -> None:
    rows = []
    for gpus in numbers:
        found = planner.ranked(planner.candidates(gpus))
        row = _row(planner, found[0]) if found else {"layout": "none fits"}
        rows.append({"GPUs": str(gpus), **row})
    columns = max(rows, key=len)
    print(_render([{name: row.get(name, "") for name in columns} for row in rows]))


def _row(planner: Planner, candidate: Candidate) -> dict[str, str]:
    plan, memory, time = candidate.plan, candidate.memory, candidate.time
    parts = ("weights", "gradients", "optimizer", "activations", "transient")
    sent = time.tensor + time.pipeline + time.data + time.host
    return {
        "layout": str(plan),
        "recompute": _recompute(plan),
        "packs": str(plan.packs.count),
        **{part: f"{getattr(memory, part) / GIB:.1f}" for part in parts},
        "GiB": f"{memory.total / GIB:.1f}",
        "s/step": f"{time.total:.3g}",
        "idle": f"{time.bubble / time.total:.0%}",
        "sending": f"{sent / time.total:.0%}",
        "tokens/s": f"{planner.tokens_per_second(candidate):,.0f}",
    }


def _settings(plan: Plan) -> list[str]:
    """The layout as settings of examples/train_reward_model.py."""
    settings = [
        f"model.tensor_model_parallel_size={plan.tp}",
        f"model.pipeline_model_parallel_size={plan.pp}",
        f"model.sequence_parallel={str(plan.sequence_parallel).lower()}",
        f"model.activations_checkpoint_granularity={plan.recompute.value}",
    ]
    if plan.cpu_offload:
        settings.append("model.optim.cpu_offload=true")
    if plan.recompute_layers is not None:
        settings.append(f"model.activations_checkpoint_num_layers={plan.recompute_layers}")
    return settings


def _recompute(plan: Plan) -> str:
    """What is recomputed, and how many layers of a stage if not all."""
    if plan.recompute_layers is None:
        return plan.recompute.value
    return f"{plan.recompute_layers} layers"


def _what_would_fit(planner: Planner, gpus: int, candidates: Sequence[Candidate]) -> str:
    """Why no layout is left, and the least that would do."""
    if not candidates:
        return (
            f"--gpus: got {gpus}, wanted a number that the model's heads, query groups and layers "
            f"divide into, with at most {planner.batch} data parallel ranks (the pairs of a step)"
        )
    least = min(candidates, key=lambda each: each.memory.total)
    needs = (
        f"no layout fits on {gpus} GPUs: the least is {least.plan} with recompute "
        f"{_recompute(least.plan)}, which holds {least.memory.total / GIB:.1f} GiB of the "
        f"{planner.usable / GIB:.1f} that are free"
    )
    enough = planner.least_gpus()
    if enough is None:
        return f"{needs}; no number of such GPUs is enough"
    return f"{needs}; the least that fits is {enough.num_ranks} GPUs, as {enough}"


def _render(rows: Sequence[Mapping[str, str]]) -> str:
    """Columns as wide as their content; numbers on the right."""
    names = list(rows[0])
    lines = [names, *([row[name] for name in names] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(names))]
    left = {"layout", "recompute"}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(names, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _shape(arguments: argparse.Namespace) -> tuple[ModelShape, str]:
    from nemo_aligner.models.shape import ModelShape

    if arguments.params is None:
        return ModelShape.from_config(_read_config(arguments.config)), str(arguments.config)
    known = {key.lower(): value for key, value in SHAPES.items()}
    if arguments.params.lower() not in known:
        raise ConfigError(f"--params: got {arguments.params}, wanted one of {', '.join(SHAPES)}")
    name, layers, hidden, ffn, heads, groups, channels, vocabulary = known[arguments.params.lower()]
    config = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": channels,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
    }
    return ModelShape.from_config(config), name


def _read_config(path: Path) -> Mapping[str, Any]:
    """A model_config.yaml, or that of a .nemo archive or of the folder it unpacks to."""
    if not path.exists():
        raise ConfigError(f"--config: got {path}, which is not there")
    if path.suffix == ".nemo" or path.is_dir():
        from nemo_aligner.checkpoint.nemo.open import open_nemo

        with open_nemo(path, with_weights=False) as folder:
            return folder.config
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--config: {path}: got {type(config).__name__}, wanted a mapping")
    return config


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a whole number above 0")
    return int(text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", type=Path, help="a model_config.yaml or a .nemo archive")
    model.add_argument("--params", metavar="SIZE", help=f"a Llama's: {', '.join(SHAPES)}")
    parser.add_argument("--gpus", type=_positive, nargs="+", required=True, metavar="N")
    parser.add_argument("--gpu-memory", type=float, default=80, metavar="GIB", help="default 80")
    parser.add_argument(
        "--reserve", type=float, default=4, metavar="GIB",
        help="left to CUDA, NCCL and the allocator's gaps (default 4, assumed)",
    )  # fmt: skip
    batch = parser.add_argument_group("the batch")
    batch.add_argument("--seq-length", type=_positive, help="as model.data.seq_length")
    size = batch.add_mutually_exclusive_group()
    size.add_argument("--global-batch-size", type=_positive, help="as model.global_batch_size")
    size.add_argument("--global-batch-tokens", type=_positive, help="instead, tokens of a step")
    batch.add_argument(
        "--micro-batch-tokens", type=_positive,
        help="as model.micro_batch_tokens (default: its own, or a pair if that is more)",
    )  # fmt: skip
    batch.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    batch.add_argument("--freeze-layers", type=int, default=0, help="as model.freeze_layers")
    batch.add_argument("--cpu-offload", action="store_true", help="as model.optim.cpu_offload=true")
    batch.add_argument(
        "--recompute", choices=["auto", "none", "selective", "full"], default="auto",
        help="default auto: as few layers as fit",
    )  # fmt: skip
    speed = parser.add_argument_group("assumptions on speed")
    speed.add_argument(
        "--tflops", type=float, default=989, help="peak of a GPU (default 989: H100, H200 in bf16)"
    )
    speed.add_argument(
        "--mfu", type=float, default=0.4, help="of it that computation reaches (default 0.4)"
    )
    speed.add_argument(
        "--intra-node", type=float, default=450, metavar="GB/S", help="of a GPU (450: NVLink 4)"
    )
    speed.add_argument(
        "--inter-node", type=float, default=50, metavar="GB/S", help="of a GPU (50: 400 Gb/s)"
    )
    speed.add_argument(
        "--host", type=float, default=50, metavar="GB/S", help="to host memory (50: PCIe 5)"
    )
    speed.add_argument("--gpus-per-node", type=_positive, default=8, metavar="N")
    parser.add_argument("--top", type=_positive, default=12, help="layouts to show (default 12)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
