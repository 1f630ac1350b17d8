"""The preference formats of NeMo RL and of OpenAI's fine-tuning."""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import with_tools
from nemo_aligner.data.formats.base import (
    Format,
    WantedLabels,
    has,
    ranked,
    read_conversation,
    read_objects,
    read_pair_labels,
)
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.utils.errors import DataError

# NeMo RL's ``PreferenceDataset``: a context, and completions with a rank each.
#
# A lower rank is better, as NeMo RL's guide of reward models says (NVIDIA-NeMo/RL,
# docs/guides/rm.md, "Datasets"). It trains on two completions; here there may be more, and equal
# ranks are a tie.


def _parse_nemo_rl_preference(
    values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels
) -> Comparison:
    value = values[0]
    completions = read_objects(value, "completions", "rank", "completion")
    texts = [
        read_conversation(
            value["context"], one["completion"], f"completions[{number}].completion", "context"
        )
        for number, one in enumerate(completions)
    ]
    ranks = [_rank(one["rank"], number) for number, one in enumerate(completions)]
    return ranked(texts, ranks, origin, read_pair_labels(value, wanted))


def _rank(rank: object, number: int) -> int:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise DataError(f"completions[{number}].rank: got {rank!r:.60}, wanted a whole number")
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


# OpenAI's preference fine-tuning: a request of the chat API, and two outputs, the better named.
#
# ``input`` has ``messages`` and, where there are any, ``tools``; both outputs are messages that go
# on from it (OpenAI, "Direct preference optimization", preparing the data).

_OUTPUTS = ("preferred_output", "non_preferred_output")
_PROMPT = "input.messages"


def _parse_openai_preference(
    values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels
) -> Comparison:
    value = values[0]
    asked = value["input"]
    if not isinstance(asked, dict) or not isinstance(asked.get("messages"), list):
        raise DataError(f"input: got {asked!r:.60}, wanted an object with messages, a list")
    better, worse = (
        with_tools(
            read_conversation(asked["messages"], value[key], key, _PROMPT), asked.get("tools")
        )
        for key in _OUTPUTS
    )
    return Comparison.of_pair(better, worse, origin, labels=read_pair_labels(value, wanted))


OPENAI_PREFERENCE = Format(
    name="openai_preference",
    kind=RecordKind.comparison,
    matches=has("input", *_OUTPUTS),
    wanted="'input' with 'messages', 'preferred_output' and 'non_preferred_output'",
    parse=_parse_openai_preference,
    sample=(
        {
            "input": {"messages": [{"role": "user", "content": "2+2?"}], "tools": []},
            "preferred_output": [{"role": "assistant", "content": "4"}],
            "non_preferred_output": [{"role": "assistant", "content": "5"}],
        },
    ),
)
