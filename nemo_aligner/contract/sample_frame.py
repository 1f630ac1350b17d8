"""The frame of a sample: what the scoring contract's chat template writes around its contents.

A trainer that sends whole texts (OpenRLHF, slime, verl) has written them in the policy's chat
template. A text in another template than the reward model's gets a reward all the same, of tokens
that the model was never trained on. The frame tells such texts from those of the model's template.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

from nemo_aligner.contract.bulk_encoding import common_prefix_length
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Conversation, Messages
from nemo_aligner.contract.templates import TRIAL_TOOLS, Write, after_reply, render
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import DataError, short

Row = TypeVar("Row", str, tuple[int, ...])
_FIRST_ROLES = ("user", "system", "developer", "assistant")
# Two dialogues whose contents differ from the first letter on.
_CONTENTS = ("0 first", "1 second")
_QUESTION, _THOUGHTS = "a question", "some thoughts"
_SHOWN_LETTERS = 40


@dataclass(frozen=True)
class SampleFrame:
    """The text of a chat template at the beginning of a sample, before a reply and at the end.

    Attributes:
        begins: a sample begins with one of these; empty if the template writes contents first.
        begin_ids: a sample of token ids begins with one of these, which end before the ids that
            may depend on the first content; empty if that leaves none.
        before_reply: text between a question and its reply, without white space around it.
        end: text after the last reply.
        bos: BOS, where the template writes it first and the contract puts it before no raw text.
        eos: EOS, where the template does not end a sample with it.
        adds_eos: the contract puts EOS behind raw texts.
    """

    begins: tuple[str, ...]
    begin_ids: tuple[tuple[int, ...], ...]
    before_reply: str
    end: str
    bos: str = ""
    eos: str = ""
    adds_eos: bool = False

    @classmethod
    def of(cls, contract: ScoringContract, tokenizer: Tokenizer) -> SampleFrame | None:
        """Find the frame by rendering short dialogues; None if the contract has no template."""
        template, kwargs = contract.template, contract.template_kwargs
        bos, eos = tokenizer.bos_token, tokenizer.eos_token
        if not template:
            return None

        def write(conversation: Messages | Conversation) -> str:
            return render(template, conversation, bos, eos, kwargs)

        end = after_reply(template, bos, eos, kwargs)
        begins = _shortest(_beginnings(write))
        # The last token may be another one in front of a content.
        ids = _shortest(tuple(tokenizer.encode(begin)[:-1]) for begin in begins)
        writes_bos = bool(bos) and any(begin.startswith(bos) for begin in begins)
        if writes_bos and contract.add_bos:
            begins = (*begins, *(begin.removeprefix(bos) for begin in begins))
        return cls(
            begins,
            ids,
            _before_reply(write),
            end,
            bos if writes_bos and not contract.add_bos else "",
            "" if eos in end else eos,
            contract.add_eos,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SampleFrame:
        """The inverse of ``to_dict``; raises KeyError, TypeError or ValueError where it is none."""
        begins = tuple(map(str, values["begins"]))
        ids = tuple(tuple(map(int, row)) for row in values["begin_ids"])
        names = ("before_reply", "end", "bos", "eos")
        before_reply, end, bos, eos = (str(values[name]) for name in names)
        return cls(begins, ids, before_reply, end, bos, eos, bool(values["adds_eos"]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **vars(self),
            "begins": list(self.begins),
            "begin_ids": [list(row) for row in self.begin_ids],
        }

    def find_fault(self, text: str) -> str | None:
        """Say how a raw text differs from a sample of the template; None if it does not.

        A text that was cut off before its end of turn is no fault: policies write such replies.
        """
        if self.begins and not text.startswith(self.begins):
            return self._describe_begin(text)
        if self.before_reply and self.before_reply not in text:
            return (
                f"it has no {short(self.before_reply)!r}, which the model's chat template writes "
                "before a reply"
            )
        reply = text.rpartition(self.before_reply)[2] if self.before_reply else text
        if self._ends_otherwise(reply):
            return (
                f"it ends with {text[-_SHOWN_LETTERS:]!r}, and the model's chat template ends with "
                f"{_shown(self.end)}"
            )
        return None

    def _ends_otherwise(self, reply: str) -> bool:
        """Tell whether more or something else stands behind a reply than the template writes."""
        if self.eos and not self.adds_eos and reply.endswith(self.eos):
            return True
        end = self.end.strip()
        if not end or end not in reply:  # it was cut off
            return False
        before, _, after = reply.rpartition(end)
        rest = self.end.rpartition(end)[2] + (self.eos if self.adds_eos else "")
        return not rest.startswith(after) or before.rstrip().endswith(end)

    def find_fault_of_ids(self, token_ids: Sequence[int]) -> str | None:
        """``find_fault`` of token ids, by their beginning alone."""
        if not self.begin_ids or any(
            tuple(token_ids[: len(begin)]) == begin for begin in self.begin_ids
        ):
            return None
        return (
            f"it begins with the token ids {short(str(list(token_ids[:8])))}, and the model's chat "
            f"template begins with {' or '.join(str(list(begin)) for begin in self.begin_ids[:3])}"
        )

    def _describe_begin(self, text: str) -> str:
        if self.bos and (self.bos + text).startswith(self.begins):
            return (
                f"it lacks the BOS token {self.bos!r}, which the model's chat template writes "
                "first (a client may have cut it off, as verl's reward loop does)"
            )
        begins = " or ".join(_shown(begin) for begin in self.begins[:3])
        return (
            f"it begins with {_shown(text[:_SHOWN_LETTERS])}, and the model's chat template begins "
            f"with {begins}"
        )


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}...")


def _shortest(beginnings: Iterable[Row]) -> tuple[Row, ...]:
    """Each beginning once, without those that begin with another one; none if one is empty."""
    rows: list[Any] = [*dict.fromkeys(beginnings)]
    if not all(rows):
        return ()
    return tuple(
        row
        for row in rows
        if not any(other != row and row[: len(other)] == other for other in rows)
    )


def _beginnings(write: Write) -> Iterator[str]:
    """Text that ``write`` puts before the first content of dialogues of several shapes."""
    for role in _FIRST_ROLES:
        roles = (role, "assistant") if role == "user" else (role, "user", "assistant")
        for tools in (None, TRIAL_TOOLS):
            dialogues = [
                [{"role": each, "content": content} for each in roles] for content in _CONTENTS
            ]
            try:
                written = [
                    write(turns if tools is None else Conversation(turns, tools=tools))
                    for turns in dialogues
                ]
            except DataError:  # a template need not take every shape
                continue
            begin = _shared_start(written)
            # Up to the first of the tools, which a trainer may write with other keys.
            yield begin if tools is None else begin.partition("{")[0]


def _before_reply(write: Write) -> str:
    """Text that ``write`` puts between a question and any reply, with thoughts or without."""
    question = {"role": "user", "content": _QUESTION}
    replies = [{"role": "assistant", "content": content} for content in _CONTENTS]
    thoughtful = [{**reply, "reasoning_content": _THOUGHTS} for reply in replies]
    between = []
    for reply in (*replies, *thoughtful):
        for turns in ([question, reply], [question, reply, question, replies[0]]):
            with suppress(DataError):  # a template need not take every shape
                between.append(write(turns).partition(_QUESTION)[2])
    return _shared_start(between).strip()


def _shared_start(texts: Sequence[str]) -> str:
    """The beginning that all texts share."""
    return (
        reduce(lambda first, second: first[: common_prefix_length(first, second)], texts)
        if texts
        else ""
    )
