"""Turn boundaries of a chat template: where the reply begins and ends, and text that would forge a
turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from nemo_aligner.contract.messages import (
    REASONING,
    Conversation,
    Message,
    Messages,
    is_plain,
    joined_content,
    messages_of,
    strings_of,
)
from nemo_aligner.contract.template_check import template_reading
from nemo_aligner.contract.templates import (
    CallFrames,
    Write,
    after_reply,
    find_frames,
    name_of,
    needs_tools,
    render,
    write_probe,
)
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import ConfigError, DataError, short

# Turn marks: text that a chat template writes around messages, and no message may hold.
#
# A reply that writes turns of its own (``bad<|im_end|>\n<|im_start|>user\nthanks``) would have the
# token ids of a longer dialogue, so that a policy could answer itself in the user's name. So a
# message is refused if it holds
#
# - an added token of the tokenizer that the template writes around messages;
# - the whole text between two turns, for templates that write words instead (``\n\nUser: ``);
# - at its end, the text that the template writes after a reply;
# - where tools are used, a token or a tag that the template writes around their results;
# - in a call of a tool, what the template writes between two arguments, or two calls.
#
# This covers every text of a message, including names and arguments of calls, and tools and
# documents. Raw texts are scored as they stand: their author has written the turns.

# Keys whose text may not end with the template's end of turn.
_SAID = ("content", *REASONING)
_TOOL = "tool"
# As templates write them around results: ``<tool_response>`` and its end.
_TAG = re.compile(r"</?[A-Za-z][\w.-]*>")


class TurnMarkError(DataError):
    """A message that holds what the chat template writes around messages."""


@dataclass(frozen=True)
class TurnMarks:
    """The marks of one template.

    Attributes:
        anywhere: none of them may be in a content.
        normalized: nor any of these, once the content is ``normalize``d.
        end: no content may end with it, empty if any may.
        around_results: none of them may be in a conversation that uses tools.
        in_calls: none of ``values`` may be in a call of a tool, nor of ``names`` in a name there.
    """

    anywhere: tuple[str, ...]
    normalized: tuple[str, ...]
    end: str
    normalize: Callable[[str], str]
    around_results: tuple[str, ...] = ()
    in_calls: CallFrames = field(default_factory=CallFrames)

    @classmethod
    def of(cls, write: Write, tokenizer: Tokenizer | None) -> TurnMarks:
        """Find the marks that ``write`` puts around messages; without a tokenizer, words alone.

        Raises:
            DataError: it cannot write a question and its answer.
        """
        frames = find_frames(write)
        added = [] if tokenizer is None else tokenizer.added_tokens(frames.around)
        # A system prompt that always tells of tools quotes tags such as <tool_call>: no turn marks.
        quoted = frames.around[:1] if needs_tools(write) else ()
        tokens = [
            token
            for token in added
            if _is_mark(token.content, token.special)
            and (
                token.special
                or any(token.content in piece for piece in frames.around[len(quoted) :])
            )
        ]
        words = [
            piece
            for piece in frames.between
            if _is_mark(piece, True) and not any(token.content in piece for token in tokens)
        ]
        anywhere = dict.fromkeys([*(token.content for token in tokens), *words])
        results = _marks_of_results(frames.results, tuple(anywhere), tokenizer)
        in_calls = [] if tokenizer is None else tokenizer.added_tokens(frames.calls.values)
        calls = CallFrames(
            tuple(
                piece.strip()
                for piece in frames.calls.values
                if _is_mark(piece, True) or any(token.content in piece for token in in_calls)
            ),
            tuple(piece for piece in frames.calls.names if piece.strip()),
        )
        if tokenizer is None or not tokenizer.has_normalizer:
            return cls(tuple(anywhere), (), frames.end, str, results, calls)
        changed = [tokenizer.normalize(token.content) for token in tokens if token.normalized]
        return cls(tuple(anywhere), tuple(changed), frames.end, tokenizer.normalize, results, calls)

    def check(self, conversation: Messages | Conversation) -> None:
        """Refuse a conversation with a mark in a message, or beside them.

        Raises:
            TurnMarkError: it names the message, the mark, and where it stands.
        """
        messages = messages_of(conversation)
        has_results = any(message["role"] == _TOOL for message in messages)
        is_short = not isinstance(conversation, Conversation) and not has_results
        if is_short and is_plain(messages):
            for number, message in enumerate(messages):
                self._refuse(message["content"], f"messages[{number}].content")
            return
        for number, message in enumerate(messages):
            for key, value in message.items():
                if key != "role":
                    self._check_value(key, value, f"messages[{number}].{key}")
            self._check_calls(message, f"messages[{number}].tool_calls")
        if isinstance(conversation, Conversation):
            for name in ("tools", "documents"):
                for place, text in strings_of(getattr(conversation, name), name):
                    self._refuse(text, place, is_said=False, uses_tools=True)

    def _check_value(self, key: str, value: object, where: str) -> None:
        for place, text in strings_of(value, where):
            self._refuse(text, place, is_said=key in _SAID, uses_tools=True)
        if key == "content" and isinstance(value, list):
            # A template may write parts without anything between them, or with a newline.
            for text in ("".join(part["text"] for part in value), joined_content(value)):
                self._refuse(text, f"{where}, its parts together", uses_tools=True)

    def _check_calls(self, message: Message, where: str) -> None:
        for number, call in enumerate(message.get("tool_calls", ())):
            function = call.get("function", call)
            place = f"{where}[{number}]"
            named = [(f"{place}, its name", function["name"])]
            named += [(f"{place}, its argument {key!r:.40}", key) for key in function["arguments"]]
            for marks, texts in (
                (self.in_calls.values, strings_of(call, place)),
                (self.in_calls.names, named),
            ):
                for at, text in texts:
                    mark = next((mark for mark in marks if mark in text), None)
                    if mark is not None:
                        raise TurnMarkError(
                            f"{at}: got {short(mark)!r} at character {text.index(mark) + 1}, which "
                            "the chat template writes between arguments or calls: the model would "
                            "read several of them here; wanted text without it"
                        )

    def _refuse(
        self, text: str, where: str, is_said: bool = True, uses_tools: bool = False
    ) -> None:
        found = self._find(text, is_said, uses_tools)
        if found is not None:
            start, mark = found
            raise TurnMarkError(
                f"{where}: got {short(mark)!r} at character {start + 1}, which the "
                "chat template writes around messages: the model would read several messages here; "
                "wanted text without it"
            )

    def _find(self, content: str, is_said: bool, uses_tools: bool) -> tuple[int, str] | None:
        """Position of the first mark, and the mark."""
        marks = (*self.anywhere, *self.around_results) if uses_tools else self.anywhere
        found = [(content.index(mark), mark) for mark in marks if mark in content]
        bare = content.rstrip()
        if is_said and self.end and bare.endswith(self.end):
            found.append((len(bare) - len(self.end), self.end))
        if not found and self.normalized:
            text = self.normalize(content)
            found = [(text.index(mark), mark) for mark in self.normalized if mark in text]
        return min(found, default=None)


def _marks_of_results(
    pieces: Sequence[str], anywhere: Sequence[str], tokenizer: Tokenizer | None
) -> tuple[str, ...]:
    """Marks of the pieces that stand around results of tools: tokens, tags, or whole pieces."""
    added = [] if tokenizer is None else tokenizer.added_tokens(pieces)
    tokens = [token.content for token in added if _is_mark(token.content, token.special)]
    # In some models, as Qwen2.5, the tags that a template writes between results are no tokens.
    tags = [tag for piece in pieces[:1] for tag in _TAG.findall(piece)]
    marks = [*dict.fromkeys([*tokens, *tags])]
    words = [
        piece
        for piece in pieces
        if _is_mark(piece, True) and not any(mark in piece for mark in (*marks, *anywhere))
    ]
    return tuple(mark for mark in (*marks, *words) if mark not in anywhere)


def _is_mark(text: str, is_special: bool) -> bool:
    """True for a text that marks a turn: no white space, punctuation or ordinary word."""
    return any(map(str.isalnum, text)) and (is_special or not text.strip().isalnum())


@lru_cache(maxsize=4)
def turn_marks(template: str, tokenizer: Tokenizer, kwargs: str = "") -> TurnMarks:
    """The marks of a template that is written with the tokenizer's BOS and EOS.

    Raises:
        DataError: the template cannot write a question and its answer.
    """

    def write(messages: Messages | Conversation) -> str:
        return render(template, messages, tokenizer.bos_token, tokenizer.eos_token, kwargs)

    return TurnMarks.of(write, tokenizer)


def write_conversation(
    template: str,
    conversation: Messages | Conversation,
    tokenizer: Tokenizer,
    kwargs: str = "",
) -> str:
    """The text that a template makes of a conversation in the normal form.

    Raises:
        TurnMarkError: it holds a mark of the template.
        DataError: the template refuses the conversation, or does not write a part of it, or is no
            valid template.
    """
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    turn_marks(template, tokenizer, kwargs).check(conversation)
    origin = name_of(template) or "the tokenizer's own" * (template == tokenizer.chat_template)
    adapted = template_reading(template, bos, eos, kwargs, origin).adapt(conversation)
    return render(template, adapted, bos, eos, kwargs)


# The end of a turn: what a chat template writes after a reply, and what stands behind it.
#
# A policy's text ends where it has said its end of turn (``<|im_end|>``), a conversation where the
# template does (``<|im_end|>\n``), and there a reward model has learned to read.


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
        """Find it by a trial; None where a template writes nothing behind the end of a turn."""
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
        """Plain values for JSON."""
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
    """The part of ``rest`` missing after ``end``; None if what is written ends otherwise."""
    for known in range(len(rest)):
        begun = end + rest[:known]
        if written[-len(begun) :] == begun:
            return rest[known:]
    return None


# Where the reply begins, by a sequence's token ids alone.
#
# A head that reads the mean of the reply needs this even if only ids are sent. The marker is what a
# chat template writes between a question and its answer: the reply follows its last occurrence.
# Without one, as in raw texts and texts truncated after it, the reply is the whole sequence.

_KEY = "model.head.reads"
_QUESTION, _REPLY = "a question", "the reply"
# Several trials, as other texts around the marker may change its tokens.
_TRIALS = ((_QUESTION, _REPLY), ("Why?\n\n", "\n\nNo."), ("1 + 1 =", "2"), ("{", "}"))


def find_marker(token_ids: np.ndarray | Sequence[int], marker: Sequence[int]) -> int:
    """Index in ``token_ids`` where the last ``marker`` begins; -1 if there is none."""
    ids = np.asarray(token_ids)
    if len(ids) < len(marker):
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(marker))
    found = np.flatnonzero((windows == np.asarray(marker)).all(axis=1))
    return int(found[-1]) if found.size else -1


def reply_start(token_ids: np.ndarray | Sequence[int], marker: Sequence[int]) -> int:
    """The first token of the reply; an empty one is the sequence's last token."""
    found = find_marker(token_ids, marker)
    return 0 if found < 0 else min(found + len(marker), len(token_ids) - 1)


def make_reply_marker(template: str, tokenizer: Tokenizer, kwargs: str = "") -> tuple[int, ...]:
    """The ids that ``template`` writes before a reply.

    Raises:
        ConfigError: there is no template, or the ids before a reply depend on the texts around.
    """
    if not template:
        raise ConfigError(
            f"{_KEY}: got reply_mean, wanted a chat template, which says where the reply begins"
        )
    text = _written(template, tokenizer, kwargs, _QUESTION, _REPLY)
    between = text[text.index(_QUESTION) + len(_QUESTION) : text.rindex(_REPLY)]
    marker = tuple(tokenizer.encode(between.strip()))
    for question, reply in _TRIALS:
        ids = tokenizer.encode(_written(template, tokenizer, kwargs, question, reply))
        start = find_marker(ids, marker) + len(marker) if marker else 0
        found = tokenizer.decode(ids[start:])
        if start < len(marker) or reply.strip() not in found or question.strip() in found:
            raise ConfigError(
                f"{_KEY}: got reply_mean, wanted a chat template that writes the same tokens "
                f"before every reply; this one writes {between!r:.80}, which is not found as "
                f"tokens between {question!r} and {reply!r}"
            )
    return marker


def _written(template: str, tokenizer: Tokenizer, kwargs: str, question: str, reply: str) -> str:
    conversation = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": reply},
    ]
    try:
        bos, eos = tokenizer.bos_token, tokenizer.eos_token
        return write_probe(template, bos, eos, kwargs, messages=conversation)
    except DataError as error:
        raise ConfigError(f"{_KEY}: {error}") from error
