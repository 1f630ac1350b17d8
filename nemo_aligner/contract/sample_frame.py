"""SampleFrame: a check that a raw text was rendered by the reward model's chat template.

RL trainers that send raw texts (OpenRLHF, slime, verl) render them with the policy's chat template.
If the reward model has another template, the text still gets a reward, but for tokens the model was
never trained on. The frame is what the model's template writes around contents: at the beginning of
a sample, before a reply, and at the end. ``find_fault`` reports what a text lacks of the frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

from nemo_aligner.contract.bulk_encoding import common_prefix_length
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Conversation
from nemo_aligner.contract.template_trials import TRIAL_TOOLS, Write
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import DataError, short

Beginning = TypeVar("Beginning", str, tuple[int, ...])
_FIRST_ROLES = ("user", "system", "developer", "assistant")
# Contents of two trial dialogues. Their first characters differ, so the texts that the two
# dialogues share are written by the template.
_CONTENTS = ("0 first", "1 second")
_QUESTION, _THOUGHTS = "a question", "some thoughts"
_MAX_SHOWN = 40


@dataclass(frozen=True)
class SampleFrame:
    """The strings that a chat template writes around the contents of a sample.

    Attributes:
        begins: strings that a sample may begin with, for first messages of different roles, with
            and without tools; empty if the template writes nothing before the first content.
        begin_ids: these strings as token ids, without their last token, which may depend on the
            first content; empty if one of the strings has a single token.
        before_reply: string between a question and its reply, stripped.
        end: string after the last reply.
        bos: the BOS token, if the template writes it first and the contract adds none to raw
            texts; else empty.
        eos: the EOS token, if the template does not write it after a reply; else empty.
        adds_eos: True if the contract adds EOS to raw texts.
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
        """Find the frame by rendering trial dialogues; None if the contract has no template."""
        if not contract.template:
            return None
        template = contract.chat_template(tokenizer)
        bos, eos, end = template.bos_token, template.eos_token, template.after_reply()
        begins = _shortest(_find_beginnings(template.render))
        # The last token is dropped, because it may merge with the content after it.
        ids = _shortest(tuple(tokenizer.encode(begin)[:-1]) for begin in begins)
        writes_bos = bool(bos) and any(begin.startswith(bos) for begin in begins)
        if writes_bos and contract.add_bos:
            begins = (*begins, *(begin.removeprefix(bos) for begin in begins))
        return cls(
            begins,
            ids,
            _find_before_reply(template.render),
            end,
            bos if writes_bos and not contract.add_bos else "",
            "" if eos in end else eos,
            contract.add_eos,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SampleFrame:
        """Read the output of ``to_dict``; KeyError, TypeError or ValueError for anything else."""
        begins = tuple(map(str, values["begins"]))
        ids = tuple(tuple(map(int, begin)) for begin in values["begin_ids"])
        names = ("before_reply", "end", "bos", "eos")
        before_reply, end, bos, eos = (str(values[name]) for name in names)
        return cls(begins, ids, before_reply, end, bos, eos, bool(values["adds_eos"]))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, which a server publishes in its metadata."""
        return {
            **vars(self),
            "begins": list(self.begins),
            "begin_ids": [list(begin) for begin in self.begin_ids],
        }

    def find_fault(self, text: str) -> str | None:
        """Describe how a raw text differs from a sample of the template; None if it does not.

        A reply that was cut off before its end of turn is not a fault: policies generate such ones.
        """
        if self.begins and not text.startswith(self.begins):
            return self._describe_begin(text)
        if self.before_reply and self.before_reply not in text:
            return (
                f"it has no {short(self.before_reply)!r}, which the model's chat template writes "
                "before a reply"
            )
        reply = text.rpartition(self.before_reply)[2] if self.before_reply else text
        if self._has_foreign_end(reply):
            return (
                f"it ends with {text[-_MAX_SHOWN:]!r}, and the model's chat template ends with "
                f"{_show_start(self.end)}"
            )
        return None

    def _has_foreign_end(self, reply: str) -> bool:
        """Return whether ``reply`` ends with something that the template does not write there.

        Args:
            reply: the raw text from its last reply on.
        """
        if self.eos and not self.adds_eos and reply.endswith(self.eos):
            return True
        end = self.end.strip()
        if not end or end not in reply:  # the reply was cut off before its end of turn
            return False
        content, _, suffix = reply.rpartition(end)
        expected_suffix = self.end.rpartition(end)[2] + (self.eos if self.adds_eos else "")
        return not expected_suffix.startswith(suffix) or content.rstrip().endswith(end)

    def find_fault_of_ids(self, token_ids: Sequence[int]) -> str | None:
        """Describe how token ids differ from the beginning of the template's samples.

        Return None if they do not differ. What follows the beginning is not checked.
        """
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
        begins = " or ".join(_show_start(begin) for begin in self.begins[:3])
        return (
            f"it begins with {_show_start(text[:_MAX_SHOWN])}, and the model's chat template "
            f"begins with {begins}"
        )


def _show_start(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


def _shortest(beginnings: Iterable[Beginning]) -> tuple[Beginning, ...]:
    """Drop each beginning that starts with another, shorter beginning.

    A sample that begins with the longer one also begins with the shorter one, so to compare samples
    the shorter one is enough. Return () if a beginning is empty: it would match every sample.

    Args:
        beginnings: strings, or tuples of token ids, that samples may begin with.
    """
    unique: list[Any] = [*dict.fromkeys(beginnings)]
    if not all(unique):
        return ()
    return tuple(
        beginning
        for beginning in unique
        if not any(start != beginning and beginning[: len(start)] == start for start in unique)
    )


def _find_beginnings(write: Write) -> Iterator[str]:
    """Yield the strings that the template writes before the first content of a sample.

    They are found with trial dialogues whose first messages have different roles, with and without
    tools.
    """
    for role in _FIRST_ROLES:
        roles = (role, "assistant") if role == "user" else (role, "user", "assistant")
        for tools in (None, TRIAL_TOOLS):
            dialogues = [
                [{"role": turn_role, "content": content} for turn_role in roles]
                for content in _CONTENTS
            ]
            try:
                written = [
                    write(turns if tools is None else Conversation(turns, tools=tools))
                    for turns in dialogues
                ]
            except DataError:  # the template rejects these roles, or tools
                continue
            begin = _shared_prefix(written)
            # Cut before the first tool, because a trainer may render tools with other keys.
            yield begin if tools is None else begin.partition("{")[0]


def _find_before_reply(write: Write) -> str:
    """Return the string that the template writes between a question and any reply, stripped.

    It is the string that several trial dialogues have in common. Their replies come with and
    without reasoning, and both at the end of a dialogue and before another question.
    """
    question = {"role": "user", "content": _QUESTION}
    replies = [{"role": "assistant", "content": content} for content in _CONTENTS]
    thoughtful = [{**reply, "reasoning_content": _THOUGHTS} for reply in replies]
    between = []
    for reply in (*replies, *thoughtful):
        for turns in ([question, reply], [question, reply, question, replies[0]]):
            with suppress(DataError):  # the template rejects the dialogue
                between.append(write(turns).partition(_QUESTION)[2])
    return _shared_prefix(between).strip()


def _shared_prefix(texts: Sequence[str]) -> str:
    """Return the prefix that all texts share; empty without texts."""
    return (
        reduce(lambda first, second: first[: common_prefix_length(first, second)], texts)
        if texts
        else ""
    )
