"""Rotary positions of old and new configs."""

from __future__ import annotations

import pytest

from nemo_aligner.checkpoint.hf.families import family_of, find_family
from nemo_aligner.errors import CheckpointError
from tests import families
from tests.checkpoint.hf.families.models import SIZES, nemo_config
from tests.families import WINDOW


def test_older_keys_read_the_same() -> None:
    llama3 = dict(families.LLAMA3_ROPE)
    base = llama3.pop("rope_theta")
    old = {**SIZES, "rope_theta": base, "rope_scaling": llama3}
    new = {**SIZES, "rope_parameters": families.LLAMA3_ROPE}
    assert find_family("llama").to_nemo(old) == find_family("llama").to_nemo(new)
    half = {"rope_theta": base, "rope_parameters": {**llama3, "rope_theta": None}}
    assert find_family("llama").to_nemo({**SIZES, **half}) == find_family("llama").to_nemo(new)
    gemma = find_family("gemma")
    older = {**SIZES, "hidden_act": "gelu", "hidden_activation": None}
    assert gemma.to_nemo(older) == gemma.to_nemo(SIZES)
    qwen = find_family("qwen2")
    uncapped = {**SIZES, "attn_logit_softcapping": None, "sliding_window": 5}
    assert find_family("gemma2").to_nemo(uncapped)["attn_logit_softcapping"] is None
    kinds = {**SIZES, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4}
    assert qwen.to_nemo(kinds) == qwen.to_nemo(SIZES)


def test_two_rotations_at_once_have_no_name() -> None:
    config = {**nemo_config("llama3"), "seq_len_interpolation_factor": 2.0}
    with pytest.raises(CheckpointError, match=r"seq_len_interpolation_factor=2\.0 and"):
        family_of(config).to_hf(config)
