"""Trainings that must give the same result at several layouts: cases, data and layouts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.serving.engine.scorer import load_scorer
from tests.data.files import rows_of, write
from tests.harness import families, tiny
from tests.training import jobs

STEPS, PART = 5, 2
ATTRIBUTES = ("helpful", "clear")
LORA = (
    "model.lora.rank=4",
    "model.lora.alpha=8",
    "model.lora.dropout=0.1",
    "model.optim.lr=3e-3",
)
REGRESSION = (
    "model.reward_model_type=regression",
    f"model.regression.attributes=[{','.join(ATTRIBUTES)}]",
)
STEPS_OF_PAIRS = ("model.head.reads=step_ends", 'model.data.step_separator=";"')
MLP_HEAD = ("model.head.bias=true", "model.head.mlp_size=24")
FROZEN = ("model.freeze_layers=2", "model.optim.sched.name=constant")
RECOMPUTE = "model.activations_checkpoint_granularity=full"
# A file in a custom format, whose fields are configured.
NAMED = {"prompt": "question", "chosen": "good", "rejected": "bad"}
OF_PAIRS = [known for known in FORMATS.values() if known.kind is RecordKind.comparison]
# nf4 has blocks of 64 inputs: those of a rank at TP=4.
OF_BLOCKS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
THREE_GROUPS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}


@dataclass(frozen=True)
class Case:
    """A training run, which every layout has to repeat as one process does it.

    Attributes:
        like: the case whose run of one process is the reference; "" is this case itself.
        stops: it stops after PART steps and resumes.
        base: the base model, a file of the inputs. "wide" has three query groups, and at TP=2 a
            fourth one of zeros; "blocks" has widths for nf4; "experts" is a mixture-of-experts
            model; "hybrid" has states.
        evaluated: the data on which the model of one process is evaluated afterwards, if any.
        rtol: relative tolerance of losses and gradient norms. Where it is above EXACT (see
            test_layouts.py), metrics and rewards are not compared.
    """

    settings: tuple[str, ...] = ()
    data: tuple[str, ...] = ("pairs",)
    like: str = ""
    by_onednn: bool = False
    stops: bool = False
    base: str = "base"
    evaluated: str = ""
    rtol: float = 1e-5


CASES = {
    "ranking": Case(),
    "onednn": Case(like="ranking", by_onednn=True),
    "recompute": Case((RECOMPUTE,), like="ranking"),
    "recompute_one_layer": Case(
        (RECOMPUTE, "model.activations_checkpoint_num_layers=1"), like="ranking"
    ),
    "offload": Case(("model.activations_offload=true",), like="ranking"),
    "recompute_onednn": Case((RECOMPUTE,), like="ranking", by_onednn=True),
    "lora": Case(LORA, evaluated="pairs"),
    "nf4": Case((*LORA, "model.lora.base_precision=nf4"), base="blocks"),
    "zero_groups": Case(base="wide"),
    "plackett_luce": Case(("model.objective=plackett_luce",), ("rankings",)),
    "learned_ties": Case(
        ("model.objective=rao_kupper", "model.objective_kwargs.learned=true"), ("rankings",)
    ),
    # With a penalty of 5 the gradient nearly cancels in the third step, and rounding shows.
    "against_length": Case(
        (
            *LORA,
            "model.objective_kwargs={length_correlation_penalty: 2.0, learn_length_bias: true}",
        )
    ),
    # Rewards of steps: dropout masks, a learned scalar, and the rule for a whole sample.
    "trajectories": Case(
        (
            *LORA,
            *STEPS_OF_PAIRS,
            "model.objective_kwargs={aggregate: product, learn_length_bias: true}",
        ),
        ("trajectories",),
        evaluated="trajectories",
    ),
    "least_step": Case(
        (*STEPS_OF_PAIRS, "model.objective_kwargs.aggregate=min"),
        ("trajectories",),
        evaluated="trajectories",
    ),
    "soft_labels": Case(
        ("model.objective_kwargs={soft_label_weight: 0.8, soft_label_temperature: 2.0}",),
        ("soft",),
        stops=True,
    ),
    "heads": Case(("model.objective=head_ensemble", *MLP_HEAD, "model.optim.head_lr_mult=3")),
    "bins": Case(
        (*REGRESSION, "model.objective=ordinal_bins", *MLP_HEAD), ("ratings",), evaluated="ratings"
    ),
    "quantiles": Case(
        (*REGRESSION, "model.objective=quantiles"), ("ratings",), evaluated="ratings"
    ),
    "pairs_and_ratings": Case(
        (
            *REGRESSION,
            "model.objective=ranking_and_regression",
            "model.regression.attribute_weights={clear: -0.5, helpful: 0.8}",
            *MLP_HEAD,
            "model.head.reads=reply_mean",
        ),
        ("pairs", "ratings"),
    ),
    "formats": Case(
        (
            "model.data.seq_length=512",
            "model.micro_batch_tokens=2048",
            "model.global_batch_size=4",
        ),
        tuple(known.name for known in OF_PAIRS),
        evaluated="named",
    ),
    "experts": Case(("model.train_router=true",), base="experts", rtol=1e-6),
    "expert_steps": Case(
        (*LORA[:2], *STEPS_OF_PAIRS, "model.objective_kwargs.aggregate=min"),
        ("trajectories",),
        base="experts",
        rtol=1e-6,
    ),
    "hybrid": Case(base="hybrid", stops=True),
    "hybrid_lora": Case(LORA, base="hybrid", stops=True),
    "frozen": Case(FROZEN, stops=True),
    "fp16": Case((*FROZEN, "trainer.precision=fp16"), stops=True, evaluated="pairs", rtol=1e-3),
}
PLAIN = ("ranking", "lora")  # trained at every kind of layout
TP2 = ("model.tensor_model_parallel_size=2",)
PP2 = ("model.pipeline_model_parallel_size=2",)
CP2 = ("model.context_parallel_size=2",)
EP2 = ("model.expert_model_parallel_size=2",)
RING = ("model.cp_comm_type=p2p", "model.batch_invariant=false")
LAYOUTS = {
    "one": (),
    "tp2": TP2,
    "tp2_sp": (*TP2, "model.sequence_parallel=true"),
    "tp4": ("model.tensor_model_parallel_size=4",),
    "pp2": PP2,
    "dp2": (),
    "tp2_sp_pp2": (*TP2, "model.sequence_parallel=true", *PP2),
    "pp2_dp2": PP2,
    "cp2": CP2,
    "cp2_ring": (*CP2, *RING),
    "tp2_cp2": (*TP2, "model.sequence_parallel=true", *CP2),
    "tp2_cp2_ring": (*TP2, *CP2, *RING),
    "cp4_ring": ("model.context_parallel_size=4", *RING),
    "pp2_cp2": (*PP2, *CP2),
    "cp2_dp2": CP2,
    # All of these have four processes, so two data parallel ranks: those of EP=2, but at CP=2,
    # where the experts are shared within a context parallel group and there are two of each.
    "ep2_tp2": (*EP2, *TP2, "model.sequence_parallel=true"),
    "ep2_cp2": (*EP2, *CP2),
    "ep2_pp2": (*EP2, *PP2),
}


def write_inputs(folder: Path) -> None:
    """Write base checkpoints and data sets."""
    tiny.write_base_nemo(folder / "base.nemo")
    wide = tiny.write_base_nemo(folder / "wide.nemo", **THREE_GROUPS)
    tiny.run_verb(
        "convert",
        f"--input={wide.with_suffix('.hf')}",
        f"--output={folder / 'padded.nemo'}",
        "--tensor-parallel=2",
    )
    tiny.write_base_nemo(folder / "blocks.nemo", **OF_BLOCKS)
    families.write_base_nemo(folder / "experts.nemo", "qwen2_moe")
    families.write_base_nemo(folder / "hybrid.nemo", "qwen3_5")
    tiny.write_pairs(folder / "pairs.jsonl", 37)
    tiny.write_ratings(folder / "ratings.jsonl", 37, ATTRIBUTES)
    write(folder / "rankings.jsonl", *rankings(26))
    write(folder / "soft.jsonl", *with_teacher(rankings(26)))
    write(folder / "trajectories.jsonl", *trajectories(37))
    for known in OF_PAIRS:
        write(folder / f"{known.name}.jsonl", *known.sample)
    values = {"prompt": "why", "chosen": "a cat", "rejected": "no"}
    write(folder / "named.jsonl", {NAMED[key]: values[key] for key in NAMED})


def rankings(count: int) -> Iterator[dict[str, Any]]:
    """Draw two to four replies, some of them tied; a reply with more thanks is better."""
    rng = random.Random(0)
    for number in range(count):
        ranks = [0, *rng.choices(range(4), k=rng.randint(1, 3))]
        rng.shuffle(ranks)
        ranked = [[rank, "thank you " * (3 - rank) + tiny.sentence(rng, 2, 5)] for rank in ranks]
        yield {"question": f"{tiny.sentence(rng, 2, 4)} {number}", "ranked": ranked}


def with_teacher(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Add a teacher's rewards to two of three rows."""
    rng = random.Random(1)
    for number, row in enumerate(rows):
        rewards = [round(rng.gauss(-rank, 1), 3) for rank, _ in row["ranked"]]
        yield {**row, **({} if number % 3 == 2 else {"teacher_rewards": rewards})}


def trajectories(count: int) -> Iterator[dict[str, str]]:
    """Draw pairs of replies of one to four steps; every step of the better one thanks."""
    rng = random.Random(0)

    def reply(thanks: str) -> str:
        return ";".join(thanks + tiny.sentence(rng, 1, 4) for _ in range(rng.randint(1, 4)))

    for number in range(count):
        prompt = f"{tiny.sentence(rng, 2, 4)} {number}"
        yield {"prompt": prompt, "chosen": reply("thank you "), "rejected": reply("")}


def settings(inputs: Path, case: Case, layout: str, folder: Path) -> list[str]:
    base = "padded" if (case.base, layout) == ("wide", "tp2") else case.base
    data = [inputs / f"{name}.jsonl" for name in case.data]
    return [
        *tiny.training(inputs / f"{base}.nemo", folder, data, data),
        "model.micro_batch_tokens=240",  # three packs in a step, one and two on two ranks
        f"trainer.rm.val_check_interval={STEPS}",
        *case.settings,
        *LAYOUTS[layout],
    ]


def train(
    inputs: Path,
    layouts: Mapping[str, Sequence[str]],
    ranks: int,
    folder: Path,
    *others: jobs.Job,
) -> None:
    """Train all cases of the layouts in one launch: FOLDER/LAYOUT/CASE, and two files for each.

    CASE.said and CASE.evaluated have the output of its training and of its evaluation. ``others``
    are cases that are trained in addition.
    """
    listed = {
        folder / layout / name: train_in_parts(inputs, CASES[name], layout, folder / layout / name)
        for layout, names in layouts.items()
        for name in names
    }
    trained = [job for parts in listed.values() for job in parts]
    done = iter(jobs.run([*trained, *others], processes=ranks))
    for path, parts in listed.items():
        for job in parts:
            said = path.with_suffix(".said" if job.verb == "train" else ".evaluated")
            with said.open("a") as file:
                file.write(next(done).stdout)


def train_in_parts(inputs: Path, case: Case, layout: str, folder: Path) -> list[jobs.Job]:
    """Train once, or stop and resume; in one process, evaluate, too."""
    is_stopped = case.stops and layout != "one"
    parts = [
        jobs.Job(
            "train",
            [*settings(inputs, case, layout, folder), f"trainer.rm.max_steps={steps}"],
            by_onednn=case.by_onednn,
        )
        for steps in ((PART, STEPS) if is_stopped else (STEPS,))
    ]
    is_evaluated = case.evaluated and layout == "one"
    return [*parts, evaluate(folder, inputs / f"{case.evaluated}.jsonl")] if is_evaluated else parts


def evaluate(run: Path, data: Path, *settings: str) -> jobs.Job:
    """Evaluate a run: writes RUN/report.json and RUN/rewards.jsonl."""
    keys = [f"data.{key}_key={name}" for key, name in NAMED.items()] if "named" in data.stem else []
    files = [f"output={run / 'report.json'}", f"output_rewards={run / 'rewards.jsonl'}"]
    given = [f"rm_model_file={archive(run)}", f"data.path={data}", *keys, *files, *settings]
    return jobs.Job("evaluate", given)


def train_plain(inputs: Path, folder: Path) -> None:
    train(inputs, {"one": PLAIN}, 1, folder)


def train_one_process(inputs: Path, plain: Path, folder: Path) -> None:
    """Train each case in one process, with which the layouts are compared."""
    names = [name for name in CASES if name not in (*PLAIN, "onednn", "offload")]
    train(inputs, {"one": names}, 1, folder)
    for name in PLAIN:
        (folder / "one" / name).symlink_to(plain / name)


def curve(folder: Path, name: str) -> list[float]:
    """Return one number of every step."""
    return list(tiny.logged(folder)[name].values())


def validated(folder: Path) -> dict[str, float]:
    """Return all metrics of the last validation, with uneven shards and a half full pack."""
    return {
        name: values[STEPS]
        for name, values in tiny.logged(folder).items()
        if name.startswith("validation-")
    }


def archive(folder: Path) -> Path:
    return folder / "checkpoints/megatron_gpt.nemo"


def score(path: Path, inputs: Path, layout: ParallelLayout) -> np.ndarray:
    """Score the chosen replies of the pairs in one process: rewards ``[37, attributes]``."""
    texts = [tiny.chat(row["prompt"], row["chosen"]) for row in rows_of(inputs / "pairs.jsonl")]
    return score_all(load_scorer(path, layout), texts)
