from __future__ import annotations

import pytest

from nemo_aligner.errors import ConfigError
from nemo_aligner.training.clock import Timers, parse_max_time


def test_max_time_is_days_hours_minutes_and_seconds() -> None:
    wanted = {"00:00:00:01": 1, "00:03:45:00": 13500, "1:2:3:4": 93784, "10:23:59:59": 950399}
    assert {text: parse_max_time(text) for text in wanted} == wanted
    for text in ("", "03:45:00", "00:24:00:00", "00:00:60:00", "4h", "-1:0:0:0"):
        with pytest.raises(ConfigError, match=r"trainer\.max_time: got .* wanted DD:HH:MM:SS"):
            pytest.fail(f"{text!r} is {parse_max_time(text)}")


def test_timers_add_up_and_start_anew() -> None:
    timers = Timers()
    for _ in range(2):
        with timers.measure("step"):
            pass
    taken = timers.take()
    assert list(taken) == ["timing/step"]
    assert 0 <= taken["timing/step"] < 1
    assert timers.take() == {}
