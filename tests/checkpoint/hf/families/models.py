"""A model of every family, by transformers, and its config as a NeMo config."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.hf.families.rules import Rule
from tests import families, tiny
from tests.families import CASES

every_case = pytest.mark.parametrize("case", CASES)


# What every config.json says.
SIZES = {
    key: value
    for key, value in tiny.SHAPE.items()
    if key not in ("rms_norm_eps", "tie_word_embeddings")
}


@cache
def model(case: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(families.hf_config(case), attn_implementation="eager")
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.eval()


def nemo_config(case: str) -> dict[str, Any]:
    return find_family(CASES[case]["model_type"]).to_nemo(model(case).config.to_dict())


def find(megatron: str, rules: tuple[Rule, ...]) -> Rule:
    (rule,) = [rule for rule in rules if rule.megatron == megatron]
    return rule
