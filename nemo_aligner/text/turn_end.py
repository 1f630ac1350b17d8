"""What a chat template writes after a reply: the end of the turn, and what stands behind it.

A policy's text ends where it has said its end of turn (``<|im_end|>``), a conversation where the
template does (``<|im_end|>\\n``), and there a reward model has learned to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_aligner.text.templates import after_reply
from nemo_aligner.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TurnEnd:
    """``end`` is the last that a policy writes, ``rest`` what the template has behind it.

    ``end_ids`` and ``rest_ids`` are the same as token ids; without any where the two do not come
    apart in tokens.
    """

    end: str
    rest: str
    end_ids: tuple[int, ...] = ()
    rest_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, template: str, tokenizer: Tokenizer, kwargs: str = "") -> TurnEnd | None:
        """None where a template writes nothing behind the end of a turn, or there is none."""
        if not template:
            return None
        whole = after_reply(template, tokenizer.bos_token, tokenizer.eos_token, kwargs)
        end = whole.strip()
        rest = whole.rpartition(end)[2]
        if not end or not rest:
            return None
        end_ids, ids = tokenizer.encode(end), tokenizer.encode(end + rest)
        if not end_ids or ids[: len(end_ids)] != end_ids:
            return cls(end, rest)
        return cls(end, rest, tuple(end_ids), tuple(ids[len(end_ids) :]))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TurnEnd:
        """The inverse of ``to_dict``; raises KeyError, TypeError or ValueError where it is none."""
        end, rest = str(values["end"]), str(values["rest"])
        end_ids, rest_ids = (tuple(map(int, values[name])) for name in ("end_ids", "rest_ids"))
        return cls(end, rest, end_ids, rest_ids)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "end": self.end,
            "rest": self.rest,
            "end_ids": list(self.end_ids),
            "rest_ids": list(self.rest_ids),
        }

    def complete(self, text: str) -> str:
        """A text that ends with the end of a turn, with all that the template has behind it."""
        missing = _missing(text, self.end, self.rest)
        return text if missing is None else text + str(missing)

    def complete_ids(self, token_ids: Sequence[int]) -> list[int]:
        """``complete`` of token ids."""
        ids = list(token_ids)
        if not self.end_ids:
            return ids
        last = tuple(ids[-len(self.end_ids + self.rest_ids) :])
        missing = _missing(last, self.end_ids, self.rest_ids)
        return ids if missing is None else [*ids, *missing]


def _missing(written: Any, end: Any, rest: Any) -> Any:
    """What of ``rest`` is missing behind ``end``; None where what is written ends otherwise."""
    for known in range(len(rest)):
        begun = end + rest[:known]
        if written[-len(begun) :] == begun:
            return rest[known:]
    return None
