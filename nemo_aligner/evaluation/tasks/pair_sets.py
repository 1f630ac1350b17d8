"""Benchmarks of plain pairs: JudgeBench, LLMBar, Auto-J, HumanEvalPack and HHH."""

from __future__ import annotations

from typing import Any

from nemo_aligner.data.formats.base import read_string
from nemo_aligner.data.formats.pairs import turns_of
from nemo_aligner.evaluation.predictions import Item
from nemo_aligner.evaluation.tasks.base import (
    Task,
    asked,
    first_is_above,
    labelled_item,
    pair_rows,
)
from nemo_aligner.utils.errors import DataError

# JudgeBench (Tan et al. 2024, arXiv 2410.12784): two replies, one of them objectively right.
#
# Its sources form four categories. The benchmark asks judges in both orders against position bias;
# rewards have no such bias, so each pair is scored once.

_CATEGORIES = {
    "mmlu-pro": "knowledge",
    "livebench-reasoning": "reasoning",
    "livebench-math": "math",
    "livecodebench": "coding",
}
_JUDGEBENCH_ORDERS = {"A>B": ("response_A", "response_B"), "B>A": ("response_B", "response_A")}


def _read_judgebench(value: dict[str, Any]) -> Item | None:
    source = str(value["source"])
    category = next((name for key, name in _CATEGORIES.items() if source.startswith(key)), source)
    return labelled_item(value, "question", _JUDGEBENCH_ORDERS, str(value["pair_id"]), category)


JUDGEBENCH = Task(
    name="judgebench",
    file="ScalerLab/JudgeBench, splits gpt and claude",
    read=_read_judgebench,
    judge=first_is_above,
    summarise=pair_rows,
    sample={
        "pair_id": "1",
        "source": "livebench-math",
        "question": "2+2?",
        "response_A": "5",
        "response_B": "4",
        "label": "B>A",
    },
)


# LLMBar (Zeng et al. 2023, arXiv 2310.07641): one of two outputs follows the instruction.

_LLMBAR_ORDERS = {1: ("output_1", "output_2"), 2: ("output_2", "output_1")}


def _read_llmbar(value: dict[str, Any]) -> Item | None:
    return labelled_item(value, "input", _LLMBAR_ORDERS)


LLMBAR = Task(
    name="llmbar",
    file="princeton-nlp/LLMBar, a dataset.json of Dataset/",
    read=_read_llmbar,
    judge=first_is_above,
    summarise=pair_rows,
    sample={"input": "2+2?", "output_1": "5", "output_2": "4", "label": 2},
)


# Auto-J's pairs (Li et al. 2023, arXiv 2310.05470): two responses in one of 58 scenarios.
#
# Label 2 is a human tie. Such pairs have no verdict to get right and are left out.

_AUTOJ_ORDERS = {0: ("response 1", "response 2"), 1: ("response 2", "response 1"), 2: None}


def _read_autoj(value: dict[str, Any]) -> Item | None:
    return labelled_item(value, "prompt", _AUTOJ_ORDERS, subset=str(value["scenario"]))


AUTOJ = Task(
    name="autoj",
    file="GAIR-NLP/auto-j, testdata_pairwise.jsonl (autoj_pairwise.json of prometheus-eval)",
    read=_read_autoj,
    judge=first_is_above,
    summarise=pair_rows,
    sample={
        "scenario": "math_reasoning",
        "prompt": "2+2?",
        "response 1": "4",
        "response 2": "5",
        "label": 0,
    },
)


# HumanEvalPack (Muennighoff et al. 2023, arXiv 2308.07124): a solution against one with a bug.
#
# Both replies begin with the problem's own code (its ``prompt``), as in RewardBench's ``hep-*``
# subsets.

_SIDES = ("canonical_solution", "buggy_solution")


def _read_humanevalpack(value: dict[str, Any]) -> Item:
    texts = tuple(
        asked(value["instruction"], read_string(value, "prompt") + read_string(value, side), side)
        for side in _SIDES
    )
    name = str(value["task_id"])
    return Item(name, name.partition("/")[0], texts, is_code=True)


HUMANEVALPACK = Task(
    name="humanevalpack",
    file="bigcode/humanevalpack, a file of data/",
    read=_read_humanevalpack,
    judge=first_is_above,
    summarise=pair_rows,
    sample={
        "task_id": "Python/0",
        "instruction": "Write `double(x)`.",
        "prompt": "def double(x):\n",
        "canonical_solution": "    return 2 * x\n",
        "buggy_solution": "    return x * x\n",
    },
)


# HHH (Askell et al. 2021, arXiv 2112.00861): one of two replies is more helpful, honest, harmless.
#
# ``input`` begins with the user's turn, without a mark; later turns begin with a paragraph
# ``Human:`` or ``Assistant:``.


def _read_hhh(value: dict[str, Any]) -> Item:
    prompt = turns_of(f"\n\nHuman: {read_string(value, 'input')}", "input")
    right, wrong = _ordered(value["targets"])
    return Item("", "", (asked(prompt, right, "choices"), asked(prompt, wrong, "choices")))


def _ordered(targets: Any) -> tuple[Any, Any]:
    """Choices, the one labelled 1 first."""
    try:
        choices, labels = targets["choices"], targets["labels"]
        (first, second), right = choices, labels.index(1)
    except (TypeError, KeyError, ValueError, AttributeError):
        labels = None
    if labels not in ([0, 1], [1, 0]):
        raise DataError(
            f"targets: got {targets!r:.60}, wanted two choices, and labels of which one is 1"
        )
    return (second, first) if right else (first, second)


HHH = Task(
    name="hhh",
    file="HuggingFaceH4/hhh_alignment, configurations harmless, helpful, honest and other",
    read=_read_hhh,
    judge=first_is_above,
    summarise=pair_rows,
    sample={"input": "2+2?", "targets": {"choices": ["5", "4"], "labels": [0, 1]}},
)
