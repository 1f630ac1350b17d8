"""Models of an ensemble must make the same token ids of a text."""

from __future__ import annotations

import dataclasses

import pytest

from nemo_aligner.errors import ConfigError
from nemo_aligner.scoring.ensemble import check_alike
from tests.scoring.test_shaping import ONE, TWO


def test_models_with_other_means_are_alike() -> None:
    check_alike([TWO, TWO.with_label_means([1.0, 2.0])])


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(ONE, template="x"),
        dataclasses.replace(ONE, tokenizer_fingerprint="y"),
        dataclasses.replace(ONE, seq_length=32),
        TWO,
    ],
    ids=["template", "tokenizer", "length", "attributes"],
)
def test_models_that_read_a_text_otherwise_are_refused(other: object) -> None:
    with pytest.raises(ConfigError, match=r"ensemble.files: model 1 scores otherwise"):
        check_alike([ONE, other])  # type: ignore[list-item]
