"""A reward model of anybody's as transformers runs it: ``AutoModelForSequenceClassification``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from nemo_aligner.checkpoint.weights.pickles import bounded_torch_load
from nemo_aligner.config.common import Precision
from nemo_aligner.console import Watch, unwatched
from nemo_aligner.errors import CheckpointError, DataError, one_line
from nemo_aligner.parallel.device import current_device
from nemo_aligner.precision import torch_dtype
from nemo_aligner.text.contract import EncodedText, NoTemplateError, OverlongError
from nemo_aligner.text.messages import (
    Conversation,
    Messages,
    Text,
    messages_of,
    read_text,
    reply_of,
)
from nemo_aligner.text.template_reading import TemplateReading
from nemo_aligner.text.templates import names_in
from nemo_aligner.text.tokenizer import Tokenizer
from nemo_aligner.text.turn_marks import TurnMarks

# What transformers calls columns that nobody has named.
_UNNAMED = "LABEL_"
# Above it a tokenizer's model_max_length stands for none.
_NO_LENGTH = 10**9


@dataclass(frozen=True)
class HfRewardModel:
    """Scores texts by the tokenizer's own rule, with its own chat template.

    Attributes:
        seq_length: tokens that it takes, the less of what model and tokenizer say; None: any.
        batch_tokens: at most so many in a batch, padding included.
    """

    tokenizer: Any
    model: Any
    seq_length: int | None
    batch_tokens: int
    watch: Watch = unwatched

    @property
    def attributes(self) -> tuple[str, ...]:
        """The names of its outputs; of a single one without a name "reward"."""
        labels = self.model.config.id2label
        names = tuple(str(labels[number]) for number in range(self.model.config.num_labels))
        is_unnamed = len(names) == 1 and names[0].startswith(_UNNAMED)
        return ("reward",) if is_unnamed else names

    def encode(self, text: Text) -> EncodedText:
        """Its token ids.

        Raises:
            OverlongError: they are more than ``seq_length``.
            TurnMarkError: a message holds what the chat template writes around messages.
            DataError: there is no chat template, it refuses the text, or there is no token.
        """
        ids = self._ids(text)
        if not ids:
            raise DataError("the text has no tokens: it is empty")
        if self.seq_length is not None and len(ids) > self.seq_length:
            raise OverlongError(f"got {len(ids)} tokens, wanted at most {self.seq_length}")
        return EncodedText(ids, False)

    def _ids(self, text: Text) -> list[int]:
        text = read_text(text)
        if isinstance(text, str):
            return list(self.tokenizer(text).input_ids)
        if not self.tokenizer.chat_template:
            raise NoTemplateError("this text is a conversation, and the tokenizer has no template")
        self._turn_marks.check(text)
        written = self._write(self._reading.adapt(text))
        return list(self.tokenizer(written, add_special_tokens=False).input_ids)

    def _write(self, conversation: Messages | Conversation) -> str:
        beside: dict[str, Any] = {}
        if isinstance(conversation, Conversation):
            beside = {"tools": conversation.tools, "documents": conversation.documents}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages_of(conversation), tokenize=False, **beside
                )
            )
        except Exception as error:  # whatever the template's author raises, or Jinja
            raise DataError(f"the chat template refuses this text: {one_line(error)}") from error

    @cached_property
    def _reading(self) -> TemplateReading:
        templates = self.tokenizer.chat_template
        texts = templates.values() if isinstance(templates, dict) else [templates]
        return TemplateReading(self._write, frozenset().union(*map(names_in, texts)))

    @cached_property
    def _turn_marks(self) -> TurnMarks:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        known = None
        if backend is not None:
            known = Tokenizer({"tokenizer.json": backend.to_str().encode()}, "tokenizer")
        return TurnMarks.of(self._write, known)

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Tokens of every text's reply alone."""
        replies = [reply_of(read_text(text)) for text in texts]
        return [len(self.tokenizer(one, add_special_tokens=False).input_ids) for one in replies]

    def score(self, texts: Sequence[Text]) -> np.ndarray:
        """``[N, A]`` float32; the mean labels that an export of ours names are added.

        Raises:
            DataError: as ``encode``; the message has the text's number.
        """
        token_lists = [self._encode_numbered(*each) for each in enumerate(texts)]
        rewards = np.zeros((len(texts), len(self.attributes)), dtype=np.float32)
        done = 0
        self.watch(0, len(texts))
        for rows in self._batches(token_lists):
            rewards[rows] = self._logits([token_lists[row] for row in rows])
            done += len(rows)
            self.watch(done, len(texts))
        means = getattr(self.model.config, "label_means", None) or {}
        return rewards + np.array([means.get(name, 0) for name in self.attributes], np.float32)

    def _encode_numbered(self, number: int, text: Text) -> list[int]:
        try:
            return self.encode(text).token_ids
        except DataError as error:
            raise DataError(f"text {number}: {error}") from error

    def _batches(self, token_lists: Sequence[list[int]]) -> Iterator[list[int]]:
        """Rows of about one length, the longest first, so that little is padded."""
        is_alone = self.model.config.get_text_config().pad_token_id is None
        rows: list[int] = []
        for row in sorted(range(len(token_lists)), key=lambda row: -len(token_lists[row])):
            longest = len(token_lists[rows[0]]) if rows else 0
            if rows and (is_alone or longest * (len(rows) + 1) > self.batch_tokens):
                yield rows
                rows = []
            rows = [*rows, row]
        if rows:
            yield rows

    @torch.no_grad()
    def _logits(self, token_lists: Sequence[list[int]]) -> np.ndarray:
        longest = max(map(len, token_lists))
        pad_id = self.model.config.get_text_config().pad_token_id or 0
        ids = torch.full((len(token_lists), longest), pad_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(token_lists):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        device = self.model.device
        logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits.float().cpu().numpy()


def load_hf_reward_model(
    name: str, precision: Precision | None, batch_tokens: int, watch: Watch = unwatched
) -> HfRewardModel:
    """A folder, or a name of the hub, on this rank's device; ``precision`` None is fp32.

    Code that comes with a model is not run.

    Raises:
        CheckpointError: transformers does not load it, or it has no head of its own.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = torch_dtype(precision or Precision.fp32)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        with bounded_torch_load():  # its weights may be pickled
            model, report = AutoModelForSequenceClassification.from_pretrained(
                name, dtype=dtype, output_loading_info=True
            )
    except Exception as error:  # a library that is not ours, and files that may be wrong
        raise CheckpointError(
            f"{name}: transformers loads no reward model from it: {one_line(error)}"
        ) from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(map(str, report["missing_keys"]))[:3])
        raise CheckpointError(
            f"{name}: got no weights for {missing}, wanted a trained reward model: transformers "
            "would draw these at random"
        )
    model = model.to(current_device()).eval()
    return HfRewardModel(tokenizer, model, _length(tokenizer, model), batch_tokens, watch)


def _length(tokenizer: Any, model: Any) -> int | None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    lengths = [each for each in (positions, tokenizer.model_max_length) if each]
    return min((int(each) for each in lengths if each < _NO_LENGTH), default=None)
