"""OpenAI's preference fine-tuning: a request of the chat API, and two outputs, the better named.

``input`` has ``messages`` and, where there are any, ``tools``; both outputs are messages that go on
from it (OpenAI, "Direct preference optimization", preparing the data).
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, WantedLabels, has
from nemo_aligner.data.formats.fields import read_conversation, read_pair_labels
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.errors import DataError
from nemo_aligner.text.messages import with_tools

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
