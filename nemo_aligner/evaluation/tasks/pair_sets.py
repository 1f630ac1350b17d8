"""Benchmarks of pairs: PPE's preferences, tool calls, JudgeBench, LLMBar, RM-Bench and others.

Each has a function that reads an object of its file, and a ``Task`` at the end of its section.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_aligner.data.formats.base import read_conversation, read_string
from nemo_aligner.data.formats.pairs import turns_of
from nemo_aligner.evaluation.predictions import Item, Prediction
from nemo_aligner.evaluation.tasks.base import (
    Level,
    Task,
    TaskRow,
    build_conversation,
    build_pair_rows,
    build_share_row,
    first_is_above,
    group_by_subset,
    mean_of,
    read_labelled_item,
    read_listed_replies,
)
from nemo_aligner.utils.errors import DataError

# JudgeBench (Tan et al. 2024, arXiv 2410.12784): two replies, one of which is objectively right.
#
# Its sources form four categories. The benchmark presents each pair to a judge in both orders,
# because judges have a position bias. Rewards have none, so each pair is scored once.

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
    return read_labelled_item(
        value, "question", _JUDGEBENCH_ORDERS, str(value["pair_id"]), category
    )


JUDGEBENCH = Task(
    name="judgebench",
    file="ScalerLab/JudgeBench, splits gpt and claude",
    read=_read_judgebench,
    judge=first_is_above,
    summarise=build_pair_rows,
    sample={
        "pair_id": "1",
        "source": "livebench-math",
        "question": "2+2?",
        "response_A": "5",
        "response_B": "4",
        "label": "B>A",
    },
)


# LLMBar (Zeng et al. 2023, arXiv 2310.07641): two outputs, one of which follows the instruction.

_LLMBAR_ORDERS = {1: ("output_1", "output_2"), 2: ("output_2", "output_1")}


def _read_llmbar(value: dict[str, Any]) -> Item | None:
    return read_labelled_item(value, "input", _LLMBAR_ORDERS)


LLMBAR = Task(
    name="llmbar",
    file="princeton-nlp/LLMBar, a dataset.json of Dataset/",
    read=_read_llmbar,
    judge=first_is_above,
    summarise=build_pair_rows,
    sample={"input": "2+2?", "output_1": "5", "output_2": "4", "label": 2},
)


# Auto-J's pairs (Li et al. 2023, arXiv 2310.05470): two responses in one of 58 scenarios.
#
# Label 2 is a human tie. Such pairs have no right reply, so they are dropped.

_AUTOJ_ORDERS = {0: ("response 1", "response 2"), 1: ("response 2", "response 1"), 2: None}


def _read_autoj(value: dict[str, Any]) -> Item | None:
    return read_labelled_item(value, "prompt", _AUTOJ_ORDERS, subset=str(value["scenario"]))


AUTOJ = Task(
    name="autoj",
    file="GAIR-NLP/auto-j, testdata_pairwise.jsonl (autoj_pairwise.json of prometheus-eval)",
    read=_read_autoj,
    judge=first_is_above,
    summarise=build_pair_rows,
    sample={
        "scenario": "math_reasoning",
        "prompt": "2+2?",
        "response 1": "4",
        "response 2": "5",
        "label": 0,
    },
)


# HumanEvalPack (Muennighoff et al. 2023, arXiv 2308.07124): a correct solution and one with a bug.
#
# Both replies begin with the code that the problem gives (its ``prompt``), as in the ``hep-*``
# subsets of RewardBench.

_SIDES = ("canonical_solution", "buggy_solution")


def _read_humanevalpack(value: dict[str, Any]) -> Item:
    question, code = value["instruction"], read_string(value, "prompt")
    texts = tuple(
        build_conversation(question, code + read_string(value, side), side) for side in _SIDES
    )
    name = str(value["task_id"])
    return Item(name, name.partition("/")[0], texts, is_code=True)


HUMANEVALPACK = Task(
    name="humanevalpack",
    file="bigcode/humanevalpack, a file of data/",
    read=_read_humanevalpack,
    judge=first_is_above,
    summarise=build_pair_rows,
    sample={
        "task_id": "Python/0",
        "instruction": "Write `double(x)`.",
        "prompt": "def double(x):\n",
        "canonical_solution": "    return 2 * x\n",
        "buggy_solution": "    return x * x\n",
    },
)


# HHH (Askell et al. 2021, arXiv 2112.00861): of two replies one is more helpful, honest, harmless.
#
# ``input`` begins with the user's turn, which has no mark. Each later turn begins with a paragraph
# ``Human:`` or ``Assistant:``.


def _read_hhh(value: dict[str, Any]) -> Item:
    prompt = turns_of(f"\n\nHuman: {read_string(value, 'input')}", "input")
    choices = _order_choices(value["targets"])
    return Item("", "", tuple(build_conversation(prompt, choice, "choices") for choice in choices))


def _order_choices(targets: Any) -> tuple[Any, Any]:
    """Return the two choices of a record, the right one (with label 1) first.

    Raises:
        DataError: ``targets`` does not have two choices with the labels 0 and 1.
    """
    try:
        choices, labels = targets["choices"], targets["labels"]
        (first, second), right = choices, labels.index(1)
    except (TypeError, KeyError, ValueError, AttributeError):
        labels = None
    if labels not in ([0, 1], [1, 0]):
        raise DataError(f"targets: got {targets!r:.60}, wanted two choices, and the labels 0 and 1")
    return (second, first) if right else (first, second)


HHH = Task(
    name="hhh",
    file="HuggingFaceH4/hhh_alignment, configurations harmless, helpful, honest and other",
    read=_read_hhh,
    judge=first_is_above,
    summarise=build_pair_rows,
    sample={"input": "2+2?", "targets": {"choices": ["5", "4"], "labels": [0, 1]}},
)


# RM-Bench (Liu et al. 2024, arXiv 2410.16184): right and wrong replies in three styles.
#
# Each reply is given in three styles: concise, detailed, and detailed with markdown. "Normal"
# compares replies of the same style, "hard" a plainer right reply with a fancier wrong one, and
# "easy" a fancier right reply with a plainer wrong one. As in the original ``compute_accuracy``
# (THU-KEG/RM-Bench, scripts/utils.py), all items of ``safety-...`` form one domain, and easy,
# normal, hard and the total are means over the four domains.

_STYLES = 3
_DIFFICULTIES = ("easy", "normal", "hard")
_SAFETY = "safety"
_DOMAINS = ("chat", "math", "code", _SAFETY)


def _read_rm_bench(value: dict[str, Any]) -> Item:
    texts = read_listed_replies(value, _STYLES)
    return Item(str(value["id"]), str(value["domain"]), texts, _STYLES)


def _read_domain(name: str) -> dict[str, str]:
    """Read the domain of RM-Bench from the name of its file, up to its first dot.

    An example is ``safety-refuse_filtered``.
    """
    domain, _, suffix = name.partition("_")
    is_domain = suffix == "filtered" and domain.partition("-")[0] in _DOMAINS
    return {"domain": domain} if is_domain else {}


def _compute_wins(rewards: np.ndarray) -> np.ndarray:
    """Compare the right and the wrong replies of one item in all styles.

    ``rewards [6]`` are those of the three right replies, then of the three wrong ones. The result
    is ``[3, 3]`` bool.

    Entry (i, j) is True if the right reply of style i has a higher reward than the wrong reply of
    style j.
    """
    return rewards[:_STYLES, None] > rewards[None, _STYLES:]


def _judge_rm_bench(item: Item, rewards: np.ndarray) -> float:
    return float(_compute_wins(rewards).mean())


def _summarise_rm_bench(predictions: Sequence[Prediction]) -> list[TaskRow]:
    rows, domains = [], dict[str, list[TaskRow]]()
    for name, members in group_by_subset(predictions).items():
        domains[name] = [
            build_share_row(Level.subset, name, members),
            *_difficulty_rows(name, members),
        ]
        rows += domains[name]
    safety = [
        prediction for prediction in predictions if prediction.item.source.startswith(_SAFETY)
    ]
    if safety and _SAFETY not in domains:
        safety_row = build_share_row(Level.section, _SAFETY, safety)
        domains[_SAFETY] = [safety_row, *_difficulty_rows(_SAFETY, safety)]
        rows += domains[_SAFETY]
    if all(name in domains for name in _DOMAINS):
        same_figures = zip(*(domains[name] for name in _DOMAINS), strict=True)
        total, *difficulties = map(mean_of, same_figures)
        rows += [
            TaskRow(Level.section, f"all, {name}", value)
            for name, value in zip(_DIFFICULTIES, difficulties, strict=True)
        ]
        rows.append(TaskRow(Level.overall, "RM-Bench", total))
    return rows


def _difficulty_rows(domain: str, predictions: Sequence[Prediction]) -> list[TaskRow]:
    wins = np.mean([_compute_wins(prediction.rewards) for prediction in predictions], axis=0)
    plainer, fancier = np.triu_indices(_STYLES, 1)
    shares = (wins[fancier, plainer].mean(), np.diag(wins).mean(), wins[plainer, fancier].mean())
    return [
        TaskRow(Level.subset, f"{domain}, {name}", float(share), len(predictions))
        for name, share in zip(_DIFFICULTIES, shares, strict=True)
    ]


RM_BENCH = Task(
    name="rm_bench",
    file="THU-KEG/RM-Bench, total_dataset.json or DOMAIN_filtered.json",
    read=_read_rm_bench,
    judge=_judge_rm_bench,
    summarise=_summarise_rm_bench,
    keys_from_name=_read_domain,
    sample={
        "id": "1",
        "domain": "math",
        "prompt": "2+2?",
        "chosen": ["4", "It is 4.", "It is **4**."],
        "rejected": ["5", "It is 5.", "It is **5**."],
    },
)


# PPE's human preferences (Frick et al. 2024, arXiv 2410.14872): votes of Chatbot Arena.
#
# Ties (``tie``, ``tie (bothbad)``) have no better reply and are dropped.

_ENGLISH, _OTHER_LANGUAGES = "English", "other languages"
_PPE_WINNERS = {
    "model_a": ("response_1", "response_2"),
    "model_b": ("response_2", "response_1"),
    "tie": None,
    "tie (bothbad)": None,
}


def _read_ppe_preference(value: dict[str, Any]) -> Item | None:
    is_english = str(value.get("language", _ENGLISH)) == _ENGLISH
    return read_labelled_item(
        value,
        "prompt",
        _PPE_WINNERS,
        str(value["question_id"]),
        _ENGLISH if is_english else _OTHER_LANGUAGES,
        label_key="winner",
    )


PPE_PREFERENCE = Task(
    name="ppe_preference",
    file="lmarena-ai/PPE-Human-Preference-V1, split test",
    read=_read_ppe_preference,
    judge=first_is_above,
    summarise=build_pair_rows,
    sample={
        "question_id": "1",
        "winner": "model_b",
        "prompt": "2+2?",
        "response_1": "5",
        "response_2": "4",
        "language": "English",
    },
)


# fc-reward-bench (Agarwal et al. 2025, arXiv 2509.11963): a right and a wrong call of functions.
#
# Both outputs are lists of calls. They become an assistant's ``tool_calls``, which the chat
# template renders. An output that is not such a list (error type "Parsing error") is scored as
# text.


def _read_fc_rewardbench(value: dict[str, Any]) -> Item:
    tools = [_wrap_tool(tool) for tool in _parse_list(value["tools"], "tools")]
    prompt = {"messages": _parse_list(value["conversation"], "conversation"), "tools": tools}
    samples = tuple(
        read_conversation(prompt, [_build_turn(value[key])], key, "conversation")
        for key in ("chosen_output", "rejected_output")
    )
    return Item(str(value["test_id"]), str(value["error_type"]), samples, is_code=True)


def _parse_list(value: Any, key: str) -> list[Any]:
    """Return a list, or parse a string with its JSON; DataError for anything else."""
    parsed = _parse_json(value)
    if not isinstance(parsed, list) or not all(isinstance(entry, dict) for entry in parsed):
        raise DataError(f"{key}: got {value!r:.60}, wanted a list of objects")
    return parsed


def _parse_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None


def _wrap_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return tool if "function" in tool else {"type": "function", "function": tool}


def _build_turn(output: Any) -> dict[str, Any]:
    """Build the assistant's turn of an output: its calls, or the output as text."""
    parsed = _parse_json(output)
    calls = [_read_call(call) for call in parsed] if isinstance(parsed, list) else []
    functions = [call for call in calls if call is not None]
    if not functions or len(functions) < len(calls):
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        return {"role": "assistant", "content": text}
    tool_calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


def _read_call(call: Any) -> dict[str, Any] | None:
    """Read a call as ``name`` and ``arguments``; None if it is not a call.

    It is written so, as OpenAI's ``function``, or as BFCL does: ``{NAME: ARGUMENTS}``.
    """
    call = call.get("function", call) if isinstance(call, dict) else {}
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        arguments = call.get("arguments", call.get("parameters", {}))
        return {"name": call["name"], "arguments": arguments}
    if not isinstance(call, dict) or len(call) != 1:
        return None
    ((name, arguments),) = call.items()
    return {"name": name, "arguments": arguments} if isinstance(arguments, dict) else None


FC_REWARDBENCH = Task(
    name="fc_rewardbench",
    file="ibm-research/fc-reward-bench, split data",
    read=_read_fc_rewardbench,
    judge=first_is_above,
    summarise=build_pair_rows,
    sample={
        "test_id": "simple_1",
        "error_type": "Parameter value error",
        "tools": [{"name": "add", "description": "Add.", "parameters": {"type": "dict"}}],
        "conversation": [{"role": "user", "content": "2+2?"}],
        "chosen_output": [{"add": {"a": 2, "b": 2}}],
        "rejected_output": [{"add": {"a": 2, "b": 3}}],
    },
)
