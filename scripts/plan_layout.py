"""Which parallel layouts fit on so many GPUs, what a GPU then holds, and how fast it might be.

    python scripts/plan_layout.py --params 8B --gpus 8
    python scripts/plan_layout.py --config base.nemo --gpus 64 --gpu-memory 141 --seq-length 4096

Nothing is measured here: nemo_aligner/models/cost.py counts what a step computes, keeps and sends.
Its memory was held against real steps (docs/performance.md); its speed rests on what --tflops,
--mfu, --intra-node and --inter-node assume. A step has --global-batch-size pairs of two sequences
of --seq-length tokens that share nothing, which is the most that the settings allow.
With several numbers of GPUs the best layout of each is shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_aligner.errors import AlignerError, ConfigError

if TYPE_CHECKING:
    from nemo_aligner.models.cost import Plan, StepTime
    from nemo_aligner.models.memory_cost import Memory
    from nemo_aligner.models.shape import ModelShape

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
_MOST_GPUS = 2**16


@dataclass(frozen=True)
class Candidate:
    """A layout, what its fullest rank holds, and the time of a step."""

    plan: Plan
    memory: Memory
    time: StepTime


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    try:
        shape, name = _shape(arguments)
        job = _Job(shape, arguments)
        print(job.heading(name))
        if len(arguments.gpus) == 1:
            _show_layouts(job, arguments.gpus[0], arguments.top)
        else:
            _show_best(job, arguments.gpus)
    except AlignerError as error:
        sys.exit(f"plan_layout.py: {error}")


class _Job:
    """The model, the batch and the GPUs, as the options have them."""

    def __init__(self, shape: ModelShape, arguments: argparse.Namespace) -> None:
        from nemo_aligner.config.schema import DataConfig, ModelConfig, Precision, Recompute
        from nemo_aligner.models.cost import Machine

        options = arguments
        self.shape = shape
        self.length = options.seq_length or DataConfig().seq_length
        self.pair = 2 * self.length
        self.batch = options.global_batch_size or ModelConfig().global_batch_size
        if options.global_batch_tokens is not None:
            self.batch = max(1, options.global_batch_tokens // self.pair)
        self.budget = options.micro_batch_tokens or max(ModelConfig().micro_batch_tokens, self.pair)
        self.precision = Precision(options.precision)
        self.recompute = list(Recompute)
        if options.recompute != "auto":
            self.recompute = [Recompute(options.recompute)]
        self.freeze_layers = options.freeze_layers
        self.usable = (options.gpu_memory - options.reserve) * GIB
        self.machine = Machine(
            flops=options.tflops * 1e12,
            efficiency=options.mfu,
            intra_node=options.intra_node * 1e9,
            inter_node=options.inter_node * 1e9,
            ranks_per_node=options.gpus_per_node,
        )
        self._options = options
        self._check()

    def _check(self) -> None:
        options = self._options
        last = self.shape.num_layers - 1
        above_zero = "a number above 0"
        checks = [
            ("tflops", options.tflops > 0, above_zero),
            ("mfu", 0 < options.mfu <= 1, "more than 0, at most 1"),
            ("intra_node", options.intra_node > 0, above_zero),
            ("inter_node", options.inter_node > 0, above_zero),
            ("reserve", options.reserve >= 0, "0 or more"),
            ("gpu_memory", self.usable > 0, f"more than the {options.reserve:g} GiB of --reserve"),
            ("micro_batch_tokens", self.budget >= self.pair, f"{self.pair} (a pair) or more"),
            ("freeze_layers", 0 <= self.freeze_layers <= last, f"0 to {last}"),
        ]
        for name, is_good, wanted in checks:
            if not is_good:
                got = getattr(options, name)
                raise ConfigError(f"--{name.replace('_', '-')}: got {got:g}, wanted {wanted}")

    def heading(self, name: str) -> str:
        shape, options = self.shape, self._options
        frozen = f", {self.freeze_layers} layers frozen" if self.freeze_layers else ""
        return (
            f"{name}: {shape.num_layers} layers, hidden {shape.hidden_size}, "
            f"{shape.num_parameters() / 1e9:.2f} billion parameters, "
            f"{self.precision.value}{frozen}\n"
            f"A step: {self.batch} pairs of 2 x {self.length} tokens, in packs of at most "
            f"{self.budget} tokens\n"
            f"A GPU: {options.gpu_memory:g} GiB, of which {options.reserve:g} are left free; "
            f"assumed: {options.tflops:g} TFLOP/s at {options.mfu:.0%}, "
            f"{options.intra_node:g} GB/s in a node of {options.gpus_per_node}, "
            f"{options.inter_node:g} GB/s beyond\n"
        )

    def candidates(self, gpus: int) -> list[Candidate]:
        """Every layout on so many GPUs, with the least recomputation that fits, or the most."""
        return [self._candidate(plan) for plan in self._plans(gpus)]

    def fits(self, candidate: Candidate) -> bool:
        return candidate.memory.total <= self.usable

    def _candidate(self, plan: Plan) -> Candidate:
        from nemo_aligner.models.cost import step_time
        from nemo_aligner.models.memory_cost import fullest_stage

        for recompute in self.recompute:
            tried = replace(plan, recompute=recompute)
            memory = fullest_stage(self.shape, tried)
            if memory.total <= self.usable:
                break
        return Candidate(tried, memory, step_time(self.shape, tried, self.machine))

    def _plans(self, gpus: int) -> Iterator[Plan]:
        for tp, pp in _splits(gpus, self.machine.ranks_per_node):
            try:
                self.shape.check_fits(tp, pp)
            except ConfigError:
                continue
            if gpus // (tp * pp) > self.batch:
                continue  # a data parallel rank without a pair is refused
            for sequence_parallel in (False, True)[: min(tp, 2)]:
                yield self._plan(tp, pp, gpus // (tp * pp), sequence_parallel)

    def _plan(self, tp: int, pp: int, dp: int, sequence_parallel: bool) -> Plan:
        from nemo_aligner.models.cost import Plan, even_packs

        packs = even_packs(-(-self.batch // dp), self.length, self.budget)
        return Plan(
            packs,
            tp=tp,
            pp=pp,
            dp=dp,
            sequence_parallel=sequence_parallel,
            precision=self.precision,
            freeze_layers=self.freeze_layers,
        )

    def tokens_per_second(self, candidate: Candidate) -> float:
        return self.batch * self.pair / candidate.time.total

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that fit, the fastest first; of equals the one that holds less."""
        fitting = [each for each in candidates if self.fits(each)]
        return sorted(fitting, key=lambda each: (each.time.total, each.memory.total))


def _splits(gpus: int, node: int) -> Iterator[tuple[int, int]]:
    """(TP, PP): tensor parallel groups stay inside a node."""
    for tp in range(1, min(gpus, node) + 1):
        for pp in range(1, gpus // tp + 1):
            if gpus % (tp * pp) == 0:
                yield tp, pp


def _show_layouts(job: _Job, gpus: int, top: int) -> None:
    candidates = job.candidates(gpus)
    found = job.ranked(candidates)
    if not found:
        raise ConfigError(_what_would_fit(job, gpus, candidates))
    print(_render([_row(job, each) for each in found[:top]]))
    shown = f", the fastest {top} of them above" if len(found) > top else ""
    print(f"\n{len(found)} of {len(candidates)} layouts on {gpus} GPUs fit{shown}. The first one:")
    print("\n".join(f"  {line}" for line in _settings(found[0].plan)))


def _show_best(job: _Job, numbers: Sequence[int]) -> None:
    rows = []
    for gpus in numbers:
        found = job.ranked(job.candidates(gpus))
        row = _row(job, found[0]) if found else {"layout": "none fits"}
        rows.append({"GPUs": str(gpus), **row})
    columns = max(rows, key=len)
    print(_render([{name: row.get(name, "") for name in columns} for row in rows]))


def _row(job: _Job, candidate: Candidate) -> dict[str, str]:
    plan, memory, time = candidate.plan, candidate.memory, candidate.time
    parts = ("weights", "gradients", "optimizer", "activations", "transient")
    sent = time.tensor + time.pipeline + time.data
    return {
        "layout": str(plan),
        "recompute": plan.recompute.value,
        "packs": str(plan.packs.count),
        **{part: f"{getattr(memory, part) / GIB:.1f}" for part in parts},
        "GiB": f"{memory.total / GIB:.1f}",
        "s/step": f"{time.total:.3g}",
        "idle": f"{time.bubble / time.total:.0%}",
        "sending": f"{sent / time.total:.0%}",
        "tokens/s": f"{job.tokens_per_second(candidate):,.0f}",
    }


def _settings(plan: Plan) -> list[str]:
    """The layout as settings of examples/train_reward_model.py."""
    return [
        f"model.tensor_model_parallel_size={plan.tp}",
        f"model.pipeline_model_parallel_size={plan.pp}",
        f"model.sequence_parallel={str(plan.sequence_parallel).lower()}",
        f"model.activations_checkpoint_granularity={plan.recompute.value}",
    ]


def _what_would_fit(job: _Job, gpus: int, candidates: Sequence[Candidate]) -> str:
    """Why no layout is left, and the least that would do."""
    if not candidates:
        return (
            f"--gpus: got {gpus}, wanted a number that the model's heads, query groups and layers "
            f"divide into, with at most {job.batch} data parallel ranks (the pairs of a step)"
        )
    least = min(candidates, key=lambda each: each.memory.total)
    plan = least.plan
    needs = (
        f"no layout fits on {gpus} GPUs: the least is {plan} with recompute "
        f"{plan.recompute.value}, which holds {least.memory.total / GIB:.1f} GiB of the "
        f"{job.usable / GIB:.1f} that are free"
    )
    more = gpus
    while (more := 2 * more) <= _MOST_GPUS:
        found = job.ranked(job.candidates(more))
        if found:
            return f"{needs}; {more} such GPUs are enough, as {found[0].plan}"
    return f"{needs}; no power of two more of such GPUs is enough"


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
        from nemo_aligner.checkpoint.nemo import open_nemo

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
    batch.add_argument(
        "--recompute", choices=["auto", "none", "selective", "full"], default="auto",
        help="default auto: the least that fits",
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
    speed.add_argument("--gpus-per-node", type=_positive, default=8, metavar="N")
    parser.add_argument("--top", type=_positive, default=12, help="layouts to show (default 12)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
