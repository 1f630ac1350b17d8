"""Compare ways to get the quality of several reward models from one, on held-out pairs.

    python benchmarks/distillation.py --base smollm2.nemo --train hh/train.jsonl \
        --heldout hh/heldout.jsonl --more more.jsonl --output results/distillation \
        trainer.precision=bf16 model.optim.lr=5e-5

A teacher is trained for each seed. The teachers label ``--train`` and ``--more``, whose own labels
are never used, and for each way a student is trained for each seed. Other ways need no teacher:
another learning rate, LoRA, or the mean of the weights of runs that start from one head.

A row has the accuracy of each seed and of their mean, the accuracy on pairs whose longer and whose
shorter reply was chosen (in characters), the expected calibration error, and the paired difference
to the teachers: per pair, the mean verdict of the way's seeds minus that of the teachers, with a
95% bootstrap interval over pairs. If the program is stopped, running it again continues: existing
trainings and labels are not repeated. ``--jobs`` trainings run at a time, each on its own core or
GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_aligner.checkpoint.run_folder import CHECKPOINTS_NAME, MODEL_NAME

# The functions import what they need of the package, because torch, which it imports, takes
# seconds, and --help should not.
if TYPE_CHECKING:
    from nemo_aligner.evaluation.predictions import Predictions

_SOFT, _PSEUDO = "soft", "pseudo"


@dataclass(frozen=True)
class Way:
    """A way to train a model.

    Attributes:
        title: what the table calls it.
        files: names of the training files: ``train`` and ``more``, with a suffix for the teachers'
            labels (``_soft``, ``_pseudo``).
        settings: its settings of ``nemo-aligner train``.
        starts_from_head: whether all seeds start from the head of the first teacher.
    """

    title: str
    files: tuple[str, ...] = ("train",)
    settings: tuple[str, ...] = ()
    starts_from_head: bool = False


TEACHER = "teacher"
WAYS = {
    TEACHER: Way("Bradley-Terry, human labels"),
    "soft": Way("soft labels", (f"train_{_SOFT}",)),
    "soft_half": Way(
        "soft and human labels, half each",
        (f"train_{_SOFT}",),
        ("model.objective_kwargs.soft_label_weight=0.5",),
    ),
    "pseudo": Way("hard pseudo-labels", (f"train_{_PSEUDO}",)),
    "soft_head": Way(
        "soft labels, all seeds start from one head", (f"train_{_SOFT}",), starts_from_head=True
    ),
    "soft_more": Way("soft labels, more pairs", (f"train_{_SOFT}", f"more_{_SOFT}")),
    "more_only": Way("soft labels of more pairs alone", (f"more_{_SOFT}",)),
    "pseudo_more": Way(
        "human labels, hard pseudo-labels of more pairs", ("train", f"more_{_PSEUDO}")
    ),
    "human_soft_more": Way("human labels, soft labels of more pairs", ("train", f"more_{_SOFT}")),
    "default_lr": Way("the default learning rate", settings=("model.optim.lr=null",)),
    "one_head": Way("all seeds start from one head", starts_from_head=True),
    **{
        f"lora_{rank}": Way(
            f"LoRA of rank {rank}, its default learning rate",
            settings=(f"model.lora.rank={rank}", "model.optim.lr=null"),
        )
        for rank in (8, 16, 64)
    },
}
# Rows that combine the seeds of a way: the mean of their rewards, and of their weights.
MEAN_OF_REWARDS = {TEACHER: "mean of the teachers' rewards"}
MEAN_OF_WEIGHTS = {
    "one_head": "mean of the weights of seeds from one head",
    "soft_head": "mean of the weights of students from one head",
}


@dataclass(frozen=True)
class Experiment:
    """The files of a comparison, and the commands that make them."""

    options: argparse.Namespace

    @property
    def output(self) -> Path:
        return self.options.output

    def run(self) -> str:
        """Train, label and evaluate what is missing; return the table in Markdown."""
        self.output.mkdir(parents=True, exist_ok=True)
        ways = [name for name in self.options.ways if name != TEACHER]
        self._train_all([TEACHER])
        files = {file for name in ways for file in WAYS[name].files}
        sources = [name for name in ("train", "more") if any(f"{name}_" in file for file in files)]
        self._in_parallel([partial(self._label, source) for source in sources])
        self._train_all(ways)
        models = {name: [self._model(name, seed) for seed in self.options.seeds] for name in ways}
        models = {TEACHER: [self._model(TEACHER, seed) for seed in self.options.seeds], **models}
        for name in MEAN_OF_WEIGHTS.keys() & models.keys():
            models[f"{name}_mean"] = [self._merge(name, models[name])]
        predictions = {
            name: [self._predict(model) for model in members] for name, members in models.items()
        }
        return render(predictions)

    def _run_folder(self, way: str, seed: int) -> Path:
        return self.output / f"{way}_{seed}"

    def _model(self, way: str, seed: int) -> Path:
        return self._run_folder(way, seed) / CHECKPOINTS_NAME / MODEL_NAME

    def _file(self, name: str) -> Path:
        given = {"train": self.options.train, "more": self.options.more}
        return given.get(name) or self.output / f"{name}.jsonl"

    def _train_all(self, ways: Sequence[str]) -> None:
        runs = [(way, seed) for way in ways for seed in self.options.seeds]
        missing = [run for run in runs if not self._model(*run).exists()]
        self._in_parallel([partial(self._train, *run) for run in missing])

    def _in_parallel(self, jobs: Sequence[Callable[[int], None]]) -> None:
        """Run all jobs, ``--jobs`` at a time.

        Each is called with the number of its GPU among those that this program may use.
        """
        devices: SimpleQueue[int] = SimpleQueue()
        for device in range(self.options.jobs):
            devices.put(device)

        def run(job: Callable[[int], None]) -> None:
            device = devices.get()
            try:
                job(device)
            finally:
                devices.put(device)

        with ThreadPoolExecutor(self.options.jobs) as pool:
            list(pool.map(run, jobs))

    def _train(self, name: str, seed: int, device: int) -> None:
        way, folder = WAYS[name], self._run_folder(name, seed)
        files = ",".join(str(self._file(file)) for file in way.files)
        head = []
        if way.starts_from_head:
            first = self._model(TEACHER, self.options.seeds[0])
            head = [f"pretrained_checkpoint.load_rm_head_weights={first}"]
        settings = [
            f"pretrained_checkpoint.restore_from_path={self.options.base}",
            f"model.data.data_prefix.train=[{files}]",
            f"exp_manager.explicit_log_dir={folder}",
            f"model.seed={seed}",
        ]
        settings += [*head, *self.options.settings, *way.settings]
        self._call(folder.name, ["train", *settings], device)

    def _label(self, source: str, device: int) -> None:
        """Write the teachers' labels of a file, as soft labels and as hard pseudo-labels."""
        soft = self._file(f"{source}_{_SOFT}")
        if not soft.exists():
            teachers = [str(self._model(TEACHER, seed)) for seed in self.options.seeds]
            models = [word for teacher in teachers for word in ("--model", teacher)]
            command = ["data", "label", str(self._file(source)), *models, "--output", str(soft)]
            self._call(f"label_{source}", command, device)
        lines = [to_pseudo_label(json.loads(line)) for line in soft.read_text().splitlines()]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        self._file(f"{source}_{_PSEUDO}").write_text(text)

    def _merge(self, way: str, models: Sequence[Path]) -> Path:
        merged = self.output / f"{way}_mean.nemo"
        if not merged.exists():
            self._call(
                merged.stem, ["merge", "--input", *map(str, models), "--output", str(merged)]
            )
        return merged

    def _predict(self, model: Path) -> Predictions:
        from nemo_aligner.evaluation.predictions import read_pairs

        name = model.stem if model.parent == self.output else model.parent.parent.name
        path = self.output / f"{name}.heldout.jsonl"
        if not path.exists():
            data = [f"data.path={self.options.heldout}", f"output_rewards={path}"]
            self._call(f"{name}.evaluate", ["evaluate", f"rm_model_file={model}", *data])
        return read_pairs(path)

    def _call(self, name: str, command: Sequence[str], device: int = 0) -> None:
        """Run ``nemo-aligner`` with its output in a log file; end this program if it fails."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = [str(device)] if visible is None else visible.split(",")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices[device % len(devices)]}
        if self.options.jobs > 1:
            environment["OMP_NUM_THREADS"] = "1"
        log = self.output / f"{name}.log"
        print(f"{name} ...", flush=True)
        with log.open("w") as output:
            program = [sys.executable, "-m", "nemo_aligner", *command]
            done = subprocess.run(program, stdout=output, stderr=output, env=environment)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(program)}: exit code {done.returncode}, see {log}")


def to_pseudo_label(record: Mapping[str, Any]) -> dict[str, Any]:
    """Make the reply that the teachers prefer the better one of a labelled pair."""
    from nemo_aligner.data.formats.base import PairKeys
    from nemo_aligner.data.formats.teacher import TEACHER_FIELDS
    from nemo_aligner.evaluation.label import order_by_teacher

    ordered, _ = order_by_teacher(dict(record), "text_pairs", PairKeys())
    return {key: value for key, value in ordered.items() if key not in TEACHER_FIELDS}


def mean_of_rewards(members: Sequence[Predictions]) -> Predictions:
    """Return predictions from the mean of several models' rewards of the same pairs."""
    from nemo_aligner.evaluation.predictions import Prediction, Predictions

    rows = []
    for same_pair in zip(*(member.rows for member in members), strict=True):
        first, rewards = same_pair[0], [row.rewards for row in same_pair]
        mean = np.mean(rewards, axis=0)
        rows.append(Prediction.of_pair(first.record, first.item.source, first.item.texts, mean))
    return Predictions(rows)


def render(predictions: Mapping[str, Sequence[Predictions]]) -> str:
    """Render the table: a row for each way, and for each combination of a way's seeds.

    Args:
        predictions: for each way, the predictions of each seed on the same pairs. The mean of a
            way's weights is a way of a single seed whose name ends with ``_mean``.
    """
    teachers = predictions[TEACHER]
    rows = {}
    for name, members in predictions.items():
        way = name.removesuffix("_mean")
        title = MEAN_OF_WEIGHTS[way] if way != name else WAYS[name].title
        rows[title] = members
        if name in MEAN_OF_REWARDS:
            rows[MEAN_OF_REWARDS[name]] = [mean_of_rewards(members)]
    header = "| | accuracy | mean | longer chosen | shorter chosen | ECE | to the teachers |"
    lines = [header, "|---" * 7 + "|"]
    return "\n".join([*lines, *(_render_row(*row, teachers) for row in rows.items())])


def _render_row(title: str, members: Sequence[Predictions], teachers: Sequence[Predictions]) -> str:
    from nemo_aligner.metrics.ranking import bootstrap_interval, expected_calibration_error

    verdicts = np.stack([member.right for member in members])
    mean_verdicts = verdicts.mean(axis=0)
    difference = mean_verdicts - np.stack([teacher.right for teacher in teachers]).mean(axis=0)
    low, high = bootstrap_interval(difference)
    chosen, rejected = members[0].lengths.T
    shares = [mean_verdicts[chosen > rejected].mean(), mean_verdicts[chosen < rejected].mean()]
    calibration_errors = [expected_calibration_error(member.as_metrics()) for member in members]
    cells = [
        title,
        ", ".join(f"{share:.1%}" for share in verdicts.mean(axis=1)),
        f"{mean_verdicts.mean():.1%}",
        *(f"{share:.1%}" for share in shares),
        f"{np.mean(calibration_errors):.3f}",
        "" if members is teachers else f"{difference.mean():+.1%} ({low:+.1%} to {high:+.1%})",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="settings of every training")
    parser.add_argument("--base", type=Path, required=True, help="the model that all start from")
    parser.add_argument("--train", type=Path, required=True, help="pairs with human labels")
    parser.add_argument("--more", type=Path, required=True, help="pairs that the teachers label")
    parser.add_argument("--heldout", type=Path, required=True, help="pairs to measure on")
    parser.add_argument("--output", type=Path, required=True, help="folder for everything")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    table = Experiment(parser.parse_args()).run()
    print(table)


if __name__ == "__main__":
    main()
