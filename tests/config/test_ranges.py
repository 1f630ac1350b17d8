"""Values that no run can begin with are refused with the settings, and not by what comes later."""

from __future__ import annotations

import pytest

from nemo_aligner.config.critic import ServeCriticConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.errors import SettingsError

both = pytest.mark.parametrize("schema", [TrainConfig, ServeCriticConfig])


@both
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("model.seed=-1", "model.seed: got -1, wanted a whole number from 0 to 4294967295"),
        ("model.seed=4294967296", "model.seed: got 4294967296, wanted a whole number from 0"),
        ("model.optim.betas=[0.9]", "model.optim.betas: got (0.9,), wanted two numbers"),
        ("model.optim.betas=[]", "model.optim.betas: got (), wanted two numbers"),
        ("model.optim.betas=[0.9,0.98,0.99]", "got (0.9, 0.98, 0.99), wanted two numbers"),
        ("model.optim.betas=[0.9,1]", "got (0.9, 1.0), wanted two numbers, each 0 or more and"),
        ("model.optim.betas=[-0.1,0.9]", "got (-0.1, 0.9), wanted two numbers"),
        ("model.optim.betas=[.nan,0.9]", "got (nan, 0.9), wanted two numbers"),
        ("model.optim.lr=.inf", "model.optim.lr: got inf, wanted a finite number"),
        ("model.optim.lr=-.inf", "model.optim.lr: got -inf, wanted a number above 0"),
        ("model.optim.lr=.nan", "model.optim.lr: got nan, wanted a number above 0"),
        ("model.optim.weight_decay=.inf", "model.optim.weight_decay: got inf, wanted a finite"),
        ("model.optim.eps=.inf", "model.optim.eps: got inf, wanted a finite number"),
        ("model.optim.sched.min_lr=.nan", "model.optim.sched.min_lr: got nan, wanted 0 or more"),
    ],
)
def test_what_no_optimizer_or_generator_takes(schema: type, setting: str, expected: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_config(schema, [setting])
    assert expected in str(error.value)


@both
@pytest.mark.parametrize(
    "setting", ["model.seed=0", "model.seed=4294967295", "model.optim.betas=[0, 0.999]"]
)
def test_the_ends_of_a_range_are_in_it(schema: type, setting: str) -> None:
    load_config(schema, [setting])
