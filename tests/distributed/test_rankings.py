"""Rankings of two to four replies, some of them tied, are learned alike at every layout."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.checkpoint.nemo.open import open_nemo
from tests import tiny
from tests.distributed.test_layouts import LAYOUTS, curves, train

SCRIPT = "tests/distributed/train_on_rankings.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base_nemo(tmp_path_factory.mktemp("base") / "base.nemo")


@pytest.fixture(scope="module")
def rankings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The more often a reply thanks, the better it is."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    with path.open("w") as lines:
        for number in range(26):
            ranks = [0, *rng.choices(range(4), k=rng.randint(1, 3))]
            rng.shuffle(ranks)
            ranked = [
                [rank, "thank you " * (3 - rank) + tiny.sentence(rng, 2, 5)] for rank in ranks
            ]
            row = {"question": f"{tiny.sentence(rng, 2, 4)} {number}", "ranked": ranked}
            lines.write(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize(
    ("objective", "layout_name"), [("plackett_luce", "tp2"), ("rao_kupper", "dp2")]
)
def test_rankings_train_like_one_process(
    objective: str, layout_name: str, base: Path, rankings: Path, tmp_path: Path
) -> None:
    chosen = [f"model.objective={objective}"]
    if objective == "rao_kupper":
        chosen.append("model.objective_kwargs.learned=true")
    processes, overrides = LAYOUTS[layout_name]
    parallel = train(tmp_path / "two", base, rankings, processes, [*overrides, *chosen], SCRIPT)
    got = curves(parallel)
    wanted = curves(train(tmp_path / "one", base, rankings, 1, chosen, SCRIPT))
    assert wanted["loss"][-1] < wanted["loss"][0]
    np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["grad_norm"], wanted["grad_norm"], rtol=1e-5)


def test_a_learned_tie_parameter_goes_on_where_a_run_was_left(
    base: Path, rankings: Path, tmp_path: Path
) -> None:
    settings = [
        "model.objective=davidson",
        "model.objective_kwargs.learned=true",
        "model.head.bias=true",
        "model.optim.sched.name=constant",
        "trainer.precision=bf16",
    ]

    def run(folder: str, steps: int) -> list[float]:
        """The parameter before every step of the run so far."""
        more = [*settings, f"trainer.rm.max_steps={steps}"]
        (path,) = train(tmp_path / folder, base, rankings, 1, more, SCRIPT).rglob("metrics.csv")
        with path.open() as lines:
            found = [row.get("train/tie_parameter") for row in csv.DictReader(lines)]
        return [float(value) for value in found if value]

    whole = run("whole", 4)
    run("parts", 2)
    assert run("parts", 4)[-2:] == whole[-2:]
    # Past the warm-up its rate is a hundred times that of the weights, and a step of Adam's nearly
    # as long.
    assert whole[0] == 1.0
    assert 0.05 < abs(math.log(whole[3] / whole[2])) < 0.11
    archive = next((tmp_path / "whole").rglob("megatron_gpt.nemo"))
    with open_nemo(archive) as folder:
        heads = [name for name in folder.tensors if name.startswith("rm_head.")]
    assert sorted(heads) == ["rm_head.bias", "rm_head.weight"]
