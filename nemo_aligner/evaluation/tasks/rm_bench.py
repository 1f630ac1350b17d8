"""RM-Bench (Liu et al. 2024, arXiv 2410.16184): right against wrong replies in three styles.

Each reply comes concise, detailed, and detailed with markdown. Normal compares replies of the same
style, hard a plainer right reply with a fancier wrong one, and easy a fancier right reply with a
plainer wrong one. As in the original ``compute_accuracy`` (THU-KEG/RM-Bench, scripts/utils.py), all
items of ``safety-...`` form one domain, and easy, normal, hard and the total are means over the
four domains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_aligner.evaluation.predictions import Item, Prediction
from nemo_aligner.evaluation.tasks.base import (
    Level,
    Task,
    TaskRow,
    by_subset,
    listed_replies,
    mean_of,
    share_row,
)

_STYLES = 3
_DIFFICULTIES = ("easy", "normal", "hard")
_SAFETY = "safety"
_DOMAINS = ("chat", "math", "code", _SAFETY)


def _read(value: dict[str, Any]) -> Item:
    texts = listed_replies(value, _STYLES)
    return Item(str(value["id"]), str(value["domain"]), texts, _STYLES)


def _domain_of(stem: str) -> dict[str, str]:
    """Take the domain from the name of a file, as ``safety-refuse_filtered.json``."""
    domain, _, rest = stem.partition("_")
    is_known = rest == "filtered" and domain.partition("-")[0] in _DOMAINS
    return {"domain": domain} if is_known else {}


def _wins(rewards: np.ndarray) -> np.ndarray:
    """``[3, 3]`` bool: the right reply of the row's style beats the wrong one of the column's."""
    return rewards[:_STYLES, None] > rewards[None, _STYLES:]


def _judge(item: Item, rewards: np.ndarray) -> float:
    return float(_wins(rewards).mean())


def _summarise(predictions: Sequence[Prediction]) -> list[TaskRow]:
    rows, domains = [], dict[str, list[TaskRow]]()
    for name, some in by_subset(predictions).items():
        domains[name] = [share_row(Level.subset, name, some), *_by_difficulty(name, some)]
        rows += domains[name]
    safety = [each for each in predictions if each.item.source.startswith(_SAFETY)]
    if safety and _SAFETY not in domains:
        whole = share_row(Level.section, _SAFETY, safety)
        domains[_SAFETY] = [whole, *_by_difficulty(_SAFETY, safety)]
        rows += domains[_SAFETY]
    if all(name in domains for name in _DOMAINS):
        of_domains = zip(*(domains[name] for name in _DOMAINS), strict=True)
        total, *difficulties = map(mean_of, of_domains)
        rows += [
            TaskRow(Level.section, f"all, {name}", value)
            for name, value in zip(_DIFFICULTIES, difficulties, strict=True)
        ]
        rows.append(TaskRow(Level.overall, "RM-Bench", total))
    return rows


def _by_difficulty(domain: str, predictions: Sequence[Prediction]) -> list[TaskRow]:
    wins = np.mean([_wins(each.rewards) for each in predictions], axis=0)
    plainer, fancier = np.triu_indices(_STYLES, 1)
    shares = (wins[fancier, plainer].mean(), np.diag(wins).mean(), wins[plainer, fancier].mean())
    return [
        TaskRow(Level.subset, f"{domain}, {name}", float(share), len(predictions))
        for name, share in zip(_DIFFICULTIES, shares, strict=True)
    ]


RM_BENCH = Task(
    name="rm_bench",
    file="THU-KEG/RM-Bench, total_dataset.json or DOMAIN_filtered.json",
    read=_read,
    judge=_judge,
    summarise=_summarise,
    of_name=_domain_of,
    sample={
        "id": "1",
        "domain": "math",
        "prompt": "2+2?",
        "chosen": ["4", "It is 4.", "It is **4**."],
        "rejected": ["5", "It is 5.", "It is **5**."],
    },
)
