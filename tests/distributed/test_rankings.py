"""Rankings of two to four replies, some of them tied; test_layouts.py trains them at layouts."""

from __future__ import annotations

import math
from pathlib import Path

from nemo_aligner.checkpoint.nemo.open import open_nemo
from tests.distributed import layouts
from tests.training import jobs

DAVIDSON = layouts.Case(
    (
        "model.objective=davidson",
        "model.objective_kwargs.learned=true",
        "model.head.bias=true",
        "model.optim.sched.name=constant",
        "trainer.precision=bf16",
    ),
    ("rankings",),
)


def test_tie_parameter_that_is_learned_goes_on_where_a_run_was_left(
    inputs: Path, tmp_path: Path
) -> None:
    runs = {name: layouts.settings(inputs, DAVIDSON, "one", tmp_path / name) for name in "ab"}
    parts = [("a", 4), ("b", 2), ("b", 4)]
    jobs.run([jobs.Job("train", [*runs[n], f"trainer.rm.max_steps={end}"]) for n, end in parts])
    # Before every step of the run so far.
    whole, again = (layouts.curve(tmp_path / name, "train/tie_parameter") for name in "ab")
    assert again[-2:] == whole[-2:]
    # Past the warm-up its rate is a hundred times that of the weights, and a step of Adam's nearly
    # as long.
    assert whole[0] == 1.0
    assert 0.05 < abs(math.log(whole[3] / whole[2])) < 0.11
    with open_nemo(layouts.archive(tmp_path / "a")) as folder:
        heads = [name for name in folder.tensors if name.startswith("rm_head.")]
    assert sorted(heads) == ["rm_head.bias", "rm_head.weight"]
