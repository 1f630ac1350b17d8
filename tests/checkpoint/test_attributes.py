"""The names of outputs that are given, wherever they are given."""

from __future__ import annotations

import pytest

from nemo_aligner.checkpoint.attributes import attribute_names
from nemo_aligner.errors import ConfigError


def test_spaces_around_a_name_do_not_count() -> None:
    assert attribute_names([" help", "style "], 2) == ("help", "style")


@pytest.mark.parametrize(
    "given", [["a"], ["a", "b", "c"], ["a", "a"], ["a", " a "], ["a", ""], ["a", " "]], ids=repr
)
def test_names_that_do_not_fit_are_named(given: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"attributes: got \['a'.*\], wanted 2 different names"):
        attribute_names(given, 2)
