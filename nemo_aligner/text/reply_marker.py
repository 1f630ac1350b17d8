"""Where the reply begins, by a sequence's token ids alone.

A head that reads the mean of the reply has to know, also where ids are all that is sent. What a
chat template writes between a question and its answer says so: the reply is what follows its last
occurrence, and where there is none, as in raw texts and those cut off behind it, all there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.text.templates import render
from nemo_aligner.text.tokenizer import Tokenizer

_KEY = "model.head.reads"
_QUESTION, _REPLY = "a question", "the reply"
# As other texts around it may have the tokenizer cut it elsewhere.
_TRIALS = ((_QUESTION, _REPLY), ("Why?\n\n", "\n\nNo."), ("1 + 1 =", "2"), ("{", "}"))


def find_marker(token_ids: np.ndarray | Sequence[int], marker: Sequence[int]) -> int:
    """Where the last ``marker`` begins in ``token_ids``; -1 where there is none."""
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
        raise ConfigError(f"{_KEY}: got reply_mean, wanted a chat template, to know the reply by")
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
        return render(template, conversation, tokenizer.bos_token, tokenizer.eos_token, kwargs)
    except DataError as error:
        raise ConfigError(f"{_KEY}: {error}") from error
