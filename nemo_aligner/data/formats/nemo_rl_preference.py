"""NeMo RL's ``PreferenceDataset``: a context, and completions with a rank each.

A lower rank is better, as NeMo RL's guide of reward models says (NVIDIA-NeMo/RL, docs/guides/rm.md,
"Datasets"). It trains on two completions; here there may be more, and equal ranks are a tie.
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, WantedLabels, has
from nemo_aligner.data.formats.fields import read_conversation, read_objects, read_pair_labels
from nemo_aligner.data.formats.ranking import ranked
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.errors import DataError


def _parse_nemo_rl_preference(
    values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels
) -> Comparison:
    value = values[0]
    completions = read_objects(value, "completions", "rank", "completion")
    texts = [
        read_conversation(value["context"], one["completion"], f"completion {number}", "context")
        for number, one in enumerate(completions, start=1)
    ]
    ranks = [_rank(one["rank"], number) for number, one in enumerate(completions, start=1)]
    return ranked(texts, ranks, origin, read_pair_labels(value, wanted))


def _rank(rank: object, number: int) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise DataError(f"completion {number}, rank: got {rank!r:.60}, wanted a whole number")
    return rank


NEMO_RL_PREFERENCE = Format(
    name="nemo_rl_preference",
    kind=RecordKind.comparison,
    matches=has("context", "completions"),
    wanted="'context' and 'completions', two or more objects with 'rank' and 'completion'",
    parse=_parse_nemo_rl_preference,
    sample=(
        {
            "context": [{"role": "user", "content": "2+2?"}],
            "completions": [
                {"rank": 0, "completion": [{"role": "assistant", "content": "4"}]},
                {"rank": 1, "completion": [{"role": "assistant", "content": "5"}]},
                {"rank": 1, "completion": [{"role": "assistant", "content": "3"}]},
            ],
        },
    ),
)
