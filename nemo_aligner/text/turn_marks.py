"""What a chat template writes around messages, and no message may hold.

A reply that writes turns of its own (``bad<|im_end|>\\n<|im_start|>user\\nthanks``) would have the
token ids of a longer dialogue, so that a policy could answer itself in the user's name. So a
message is refused that holds

- a token of the tokenizer's list of added ones, as far as the template writes it around messages;
- where it writes words instead (``\\n\\nUser: ``), all that stands between two turns, as a whole;
- at its end, what the template writes after a reply.

Raw texts are scored as they stand: whoever writes one has written its turns, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from nemo_aligner.errors import DataError, short
from nemo_aligner.text.messages import Conversation
from nemo_aligner.text.templates import find_frames, render
from nemo_aligner.text.tokenizer import Tokenizer


class TurnMarkError(DataError):
    """A message that holds what the chat template writes around messages."""


@dataclass(frozen=True)
class TurnMarks:
    """The marks of one template.

    Attributes:
        anywhere: none of them may be in a content.
        normalized: nor any of these, once the content is ``normalize``d.
        end: no content may end with it, empty if any may.
    """

    anywhere: tuple[str, ...]
    normalized: tuple[str, ...]
    end: str
    normalize: Callable[[str], str]

    @classmethod
    def of(cls, write: Callable[[Conversation], str], tokenizer: Tokenizer | None) -> TurnMarks:
        """Those of what ``write`` makes of conversations; without a tokenizer no token is known.

        Raises:
            DataError: it cannot write a question and its answer.
        """
        frames = find_frames(write)
        added = [] if tokenizer is None else tokenizer.added_tokens(frames.around)
        tokens = [token for token in added if _is_mark(token.content, token.special)]
        words = [
            piece
            for piece in frames.between
            if _is_mark(piece, True) and not any(token.content in piece for token in tokens)
        ]
        anywhere = dict.fromkeys([*(token.content for token in tokens), *words])
        if tokenizer is None or not tokenizer.has_normalizer:
            return cls(tuple(anywhere), (), frames.end, str)
        changed = [tokenizer.normalize(token.content) for token in tokens if token.normalized]
        return cls(tuple(anywhere), tuple(changed), frames.end, tokenizer.normalize)

    def check(self, conversation: Conversation) -> None:
        """Refuse a conversation with a mark in a message.

        Raises:
            TurnMarkError: it names the message, the mark, and where it stands.
        """
        for number, message in enumerate(conversation, start=1):
            found = self._find(message["content"])
            if found is not None:
                start, mark = found
                raise TurnMarkError(
                    f"message {number}: got {short(mark)!r} at character {start + 1}, which the "
                    "chat template writes around messages, so that one would read as several; "
                    "wanted a content without it"
                )

    def _find(self, content: str) -> tuple[int, str] | None:
        """Where the first mark stands, and which it is."""
        found = [(content.index(mark), mark) for mark in self.anywhere if mark in content]
        bare = content.rstrip()
        if self.end and bare.endswith(self.end):
            found.append((len(bare) - len(self.end), self.end))
        if not found and self.normalized:
            text = self.normalize(content)
            found = [(text.index(mark), mark) for mark in self.normalized if mark in text]
        return min(found, default=None)


def _is_mark(text: str, is_special: bool) -> bool:
    """Not white space and punctuation, nor a word of everybody's, which tell nobody's turn."""
    return any(map(str.isalnum, text)) and (is_special or not text.strip().isalnum())


@lru_cache(maxsize=4)
def turn_marks(template: str, tokenizer: Tokenizer) -> TurnMarks:
    """The marks of a template that is written with the tokenizer's BOS and EOS.

    Raises:
        DataError: the template cannot write a question and its answer.
    """
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    return TurnMarks.of(partial(render, template, bos_token=bos, eos_token=eos), tokenizer)


def write_conversation(template: str, conversation: Conversation, tokenizer: Tokenizer) -> str:
    """The text that a template makes of messages that hold none of its marks.

    Raises:
        TurnMarkError: one does.
        DataError: the template refuses the conversation, or is no valid template.
    """
    turn_marks(template, tokenizer).check(conversation)
    return render(template, conversation, tokenizer.bos_token, tokenizer.eos_token)
