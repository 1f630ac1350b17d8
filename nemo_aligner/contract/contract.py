"""ScoringContract: how a sample becomes token ids, and what a model's reward for them means.

Training writes the contract into every checkpoint; evaluation and the server read it from there,
so these rules are never configured a second time.

Conversations are rendered by the chat template. It also writes BOS and the end-of-turn tokens, so
``add_bos`` and ``add_eos`` do not apply. The template gets the messages in their normal form
(``messages.py``), tools and documents, and the contract's ``chat_template_kwargs``. A principle
follows the reply as a turn of the user (``principles.py``). A conversation with a part that the
template does not render is rejected (``template_check.py``), and so is a message that contains the
template's own turn markers (``turns.py``). The last token scored is whatever the template ends
with, such as a newline after the end-of-turn token.

Raw texts (``str``) are scored verbatim. ``add_bos`` puts BOS before a text that does not begin with
it, and ``add_eos`` puts EOS after a text that does not end with it. If the settings
``model.data.add_bos`` and ``add_eos`` are null, ``from_settings.py`` takes the values from the
contract of the base if that is a reward model, else the tokenizer's default for raw texts.

For a model with a reward token (``reward_token_id``), this token is appended to every sample that
does not end with it. Some classes of models treat a certain token at the end of a sample as padding
(``trailing_pad_id``), and read the reward before it. For such a model, the token is removed from
the end of every sample.

A model with a reward for each turn or step reads these rewards by the rules of ``steps.py``. The
reward of a sample is the last of them or, if ``aggregate`` is set, all of them combined.

A sequence of more than ``seq_length`` tokens is too long. ``overlong=truncate_left`` keeps its last
tokens, and its BOS if it begins with one; ``drop`` and ``error`` raise OverlongError, which
training turns into a counted drop or an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from nemo_aligner.config.common import Aggregate, Overlong, Precision, RecordKind, RewardModelType
from nemo_aligner.contract.bulk_encoding import TextIds, WrittenText, encode_records
from nemo_aligner.contract.chat_template import ChatTemplate
from nemo_aligner.contract.completion import complete_ids, without_trailing_pad
from nemo_aligner.contract.fields import check_fields
from nemo_aligner.contract.messages import Text, read_text, reply_of
from nemo_aligner.contract.readout import LOG_ODDS, PROBABILITY, SCORE, Readout
from nemo_aligner.contract.steps import (
    OPEN_ENDED,
    STEPPED,
    SteppedText,
    StepSpan,
    split_steps,
    step_texts,
)
from nemo_aligner.contract.template_check import check_terminates
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import write_conversation
from nemo_aligner.utils.errors import CheckpointError, DataError, short, shown

VERSION = 1
# No score depends on these fields: they inform people, and trainers that normalize rewards.
_NOT_HASHED = ("reward_mean", "reward_std", "measured_on")
# Fields that later versions added. The hash omits those that are None, so that earlier contracts
# keep their hashes.
_LATER = (
    "shaping",
    "readout",
    "reply_marker",
    "chat_template_kwargs",
    "reward_token_id",
    "step_separator",
    "aggregate",
    "principle_template",
    "base_precision",
    "trailing_pad_id",
)


class OverlongError(DataError):
    """A sample has more tokens than the contract's ``seq_length``."""


class NoTemplateError(DataError):
    """A conversation cannot be rendered, because the contract has no chat template."""


@dataclass(frozen=True)
class EncodedText:
    """The token ids of one sample, ready for the model.

    Attributes:
        token_ids: at most ``seq_length`` ids.
        truncated: True if ``truncate_left`` cut the beginning.
        reads: for a contract with steps, the S indices in ``token_ids`` where rewards are read, in
            ascending order; the last one is the index of the last token. Else None.
        spans: the S turns or steps whose rewards are read at ``reads``.
        lost: number of turns or steps that were cut off.
    """

    token_ids: list[int]
    truncated: bool
    reads: tuple[int, ...] | None = None
    spans: tuple[StepSpan, ...] = ()
    lost: int = 0


@dataclass(frozen=True)
class ScoringContract:
    """All rules that define a score: from a sample to token ids, and from outputs to rewards.

    Attributes:
        template: source of the chat template; empty if there is none.
        add_bos, add_eos: whether BOS and EOS are added to raw texts.
        bos_id, eos_id: the tokenizer's ids; None if it has no such token.
        overlong: an ``Overlong`` value, the rule for sequences of more than ``seq_length`` tokens.
        attributes: names of the A rewards of a sample.
        attribute_weights: A weights that combine them into one reward.
        label_means: A offsets that are added to rewards; a ranking model may have imported ones.
        dtype: a ``Precision`` value, in which the model is run.
        tokenizer_fingerprint: ``Tokenizer.fingerprint``.
        scored_position: a ``ScoredPosition`` value, where rewards are read.
        reward_mean, reward_std: A statistics of the rewards; None until measured.
        measured_on: the data from which ``reward_mean`` and ``reward_std`` come.
        shaping: JSON of the reward shaping that a server applies; None in a model's archive.
        readout: JSON of a ``Readout``, for a head whose outputs are not the rewards themselves.
        reply_marker: token ids before a reply, for a head that averages over the reply.
        chat_template_kwargs: JSON of further variables of the template.
        reward_token_id: token that is appended to every sample, conversations included.
        step_separator: string between the steps of a reply, for a model that scores steps.
        aggregate: an ``Aggregate`` value that combines the rewards of a sample's turns or steps;
            None takes the reward of the last turn or step.
        principle_template: text about a sample's principle (``principles.py``); if it is None,
            samples with a principle are rejected.
        base_precision: a ``BasePrecision`` value, how the frozen weights under LoRA are quantized;
            None if they are not.
        trailing_pad_id: token that is removed from the end of every sample, however often it is
            there; None removes nothing.
    """

    template: str
    add_bos: bool
    add_eos: bool
    bos_id: int | None
    eos_id: int | None
    overlong: str
    seq_length: int
    attributes: tuple[str, ...]
    attribute_weights: tuple[float, ...]
    label_means: tuple[float, ...]
    dtype: str
    tokenizer_fingerprint: str
    reward_model_type: str
    scored_position: str = "last_token"
    reward_mean: tuple[float, ...] | None = None
    reward_std: tuple[float, ...] | None = None
    measured_on: str | None = None
    shaping: str | None = None
    readout: str | None = None
    reply_marker: tuple[int, ...] | None = None
    chat_template_kwargs: str | None = None
    reward_token_id: int | None = None
    step_separator: str | None = None
    aggregate: str | None = None
    principle_template: str | None = None
    base_precision: str | None = None
    trailing_pad_id: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        # 0 and 0.0 must give the same hash.
        for name in ("attribute_weights", "label_means"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        num_attributes = len(self.attributes)
        if not len(self.attribute_weights) == len(self.label_means) == num_attributes > 0:
            raise DataError(
                f"scoring contract: got {num_attributes} attributes, "
                f"{len(self.attribute_weights)} weights and {len(self.label_means)} label means; "
                "wanted the same number, at least 1"
            )
        readout = self.output_readout
        if readout is not None and len(readout.numbers) != num_attributes:
            raise DataError(
                f"scoring contract: readout: got {len(readout.numbers)} attributes, "
                f"wanted {num_attributes}"
            )

    @property
    def output_readout(self) -> Readout | None:
        """The rule that turns head outputs into rewards; None if the outputs are the rewards."""
        return None if self.readout is None else Readout.from_json(self.readout)

    def rewards_of(self, outputs: np.ndarray) -> np.ndarray:
        """Turn the head's ``outputs [N, A * K]`` float32 into rewards ``[N, A]`` float32."""
        readout = self.output_readout
        rewards = outputs if readout is None else readout.rewards(outputs)
        return rewards + np.array(self.label_means, dtype=np.float32)

    def spreads_of(self, outputs: np.ndarray) -> np.ndarray | None:
        """Return the uncertainty ``[N, A]`` float32 of the rewards; None without a readout."""
        readout = self.output_readout
        return None if readout is None else readout.spreads(outputs)

    @property
    def reward_scale(self) -> str:
        """Unit of a reward: ``probability``, ``log_odds`` or ``score``.

        Earlier versions wrote no readout for models of rated steps, which they trained with
        cross-entropy. Such a model without label means therefore gives log-odds.
        """
        if self.shaping is not None:
            return SCORE
        if (readout := self.output_readout) is not None:
            return PROBABILITY if readout.gives_probabilities else SCORE
        is_rated = self.has_steps and self.record_kind is RecordKind.rating
        return LOG_ODDS if is_rated and not any(self.label_means) else SCORE

    @property
    def outputs_per_attribute(self) -> int:
        """K, the number of head outputs per attribute."""
        readout = self.output_readout
        return 1 if readout is None else readout.width

    @property
    def output_names(self) -> list[str]:
        """Names of the head's outputs, K per attribute, such as ``helpfulness=0.5`` for a bin."""
        readout = self.output_readout
        if readout is None or readout.width == 1:
            return list(self.attributes)
        rows = zip(self.attributes, readout.numbers, strict=True)
        return [f"{name}={number:g}" for name, row in rows for number in row]

    @property
    def num_outputs(self) -> int:
        """A * K, the number of head outputs for a scored token."""
        return len(self.attributes) * self.outputs_per_attribute

    @property
    def has_steps(self) -> bool:
        """True if a sample has a reward for each of its turns or steps."""
        return self.scored_position in STEPPED

    @property
    def aggregation(self) -> Aggregate:
        """The rule that combines the rewards of a sample's turns or steps into one."""
        return Aggregate(self.aggregate or Aggregate.last.value)

    @property
    def template_kwargs(self) -> str:
        """``chat_template_kwargs`` as a string: JSON, or empty if there are none."""
        return self.chat_template_kwargs or ""

    @property
    def record_kind(self) -> RecordKind:
        """The kind of records that the model was trained on: comparisons or ratings."""
        return RewardModelType(self.reward_model_type).record_kind

    @property
    def hash(self) -> str:
        """sha256 (hex) of the canonical JSON of every field that changes a score."""
        fields = {
            name: value for name, value in self._collect_fields().items() if name not in _NOT_HASHED
        }
        # Sorted keys, no spaces, only ASCII: any JSON library can write the same bytes.
        canonical = json.dumps(
            {"version": VERSION, **fields},
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def differences(self, other: ScoringContract) -> dict[str, tuple[Any, Any]]:
        """Map each differing field that the hash covers to its values here and in ``other``."""
        fields, other_fields = self._collect_fields(), other._collect_fields()
        return {
            name: (fields.get(name), other_fields.get(name))
            for name in {**fields, **other_fields}
            if name not in _NOT_HASHED and fields.get(name) != other_fields.get(name)
        }

    def _collect_fields(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if name not in _LATER or value is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, with the version and the hash."""
        return {"version": VERSION, **self._collect_fields(), "hash": self.hash}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScoringContract:
        """Read the output of ``to_dict``.

        Raises:
            CheckpointError: another version, unknown or missing fields, or a wrong hash.
        """
        content = dict(values)
        version, stated_hash = content.pop("version", None), content.pop("hash", None)
        if version != VERSION:
            raise CheckpointError(
                f"scoring contract: got version {shown(version)}, wanted {VERSION}: use the "
                "version of nemo-aligner that wrote it"
            )
        # Archives of earlier versions lack these fields.
        for name in _LATER:
            content.setdefault(name, None)
        field_names = {field.name for field in dataclasses.fields(cls)}
        if set(content) != field_names:
            raise CheckpointError(
                "scoring contract: unknown or missing fields: "
                + short(", ".join(sorted(set(content) ^ field_names)))
            )
        for name, value in content.items():
            content[name] = tuple(value) if isinstance(value, list) else value
        try:
            contract = cls(**content)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"scoring contract: {error}") from error
        if contract.hash != stated_hash:
            raise CheckpointError(
                f"scoring contract: its fields have the hash {contract.hash}, its stored hash is "
                f"{shown(stated_hash)}: the contract was changed after it was written"
            )
        return contract

    def chat_template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template with its variables, and the tokenizer's BOS and EOS."""
        return ChatTemplate.of(self.template, tokenizer, self.template_kwargs)

    def check_template_ends(self, tokenizer: Tokenizer) -> None:
        """Check in a subprocess that the template terminates: an untrusted one may loop forever.

        Raises:
            DataError: the template cannot render a question and its answer, or exceeds the limits
                of time and memory (``check_terminates``).
        """
        if self.template:
            check_terminates(self.chat_template(tokenizer))

    def with_dtype(self, precision: Precision | None) -> ScoringContract:
        """Return a copy with ``dtype`` set to ``precision``; None returns the same contract."""
        return self if precision is None else dataclasses.replace(self, dtype=precision.value)

    def with_label_means(self, means: Sequence[float]) -> ScoringContract:
        """Return a copy with the A offsets that are added to a regression head's outputs."""
        return dataclasses.replace(self, label_means=tuple(float(mean) for mean in means))

    def with_readout(self, readout: Readout | None) -> ScoringContract:
        """Return a copy with this rule from head outputs to rewards."""
        readout_json = None if readout is None else readout.to_json()
        return dataclasses.replace(self, readout=readout_json)

    def with_statistics(
        self, mean: Sequence[float], std: Sequence[float], measured_on: str
    ) -> ScoringContract:
        """Return a copy with the rewards' mean and standard deviation per attribute.

        Args:
            measured_on: the data that they were measured on.
        """
        means, stds = tuple(mean), tuple(std)
        return dataclasses.replace(
            self, reward_mean=means, reward_std=stds, measured_on=measured_on
        )

    def encode(self, tokenizer: Tokenizer, text: Text) -> EncodedText:
        """Turn one sample into token ids, by the rules in the docstring of this module.

        Raises:
            OverlongError: the sample is too long, and ``overlong`` is not ``truncate_left``.
            TurnMarkError: a message contains the template's own turn markers.
            DataError: the sample is empty or malformed, or it is a conversation and the contract
                has no chat template.
        """
        text = read_text(text)
        if self.has_steps:
            stepped, ids, reads = self._encode_steps(tokenizer, [text])[0]
            return self.fit(ids, reads, stepped.spans)
        rendered = self._render(tokenizer, text)
        truncated = self._encode_end(tokenizer, text, rendered)
        if truncated is not None:
            return truncated
        ids = tokenizer.encode_batch([rendered])[0]
        return self.fit(self._complete(ids, text))

    def _encode_end(self, tokenizer: Tokenizer, text: Text, rendered: str) -> EncodedText | None:
        """Encode a text that is far too long without tokenizing all of it.

        Return None if the caller must tokenize it: the text may fit ``seq_length``, or nothing is
        known about the tokenizer (``TextBounds``).

        Raises:
            OverlongError: the text is too long, and ``overlong`` is not ``truncate_left``.
        """
        # A text of at most seq_length characters rarely has more tokens, so the caller encodes it.
        if len(rendered) <= self.seq_length:
            return None
        bounds = tokenizer.bounds
        if self.overlong != Overlong.truncate_left.value:
            max_bytes = bounds.most_bytes(self.seq_length)
            num_bytes = len(self._without_pad_text(tokenizer, rendered).encode())
            if max_bytes is not None and num_bytes > max_bytes:
                raise OverlongError(
                    f"got a text of {num_bytes} bytes, wanted at most {self.seq_length} tokens, "
                    f"which have {max_bytes} bytes at most"
                )
            return None
        ids = bounds.encode_end(tokenizer.encode, rendered, self.seq_length + 1)
        if ids is None or len(without_trailing_pad(self, ids)) <= self.seq_length:
            return None
        # The text may begin with BOS tokens, and at most two of them are encoded: ``_complete``
        # rejects a sample with two, and ``fit`` keeps a single one.
        bos, bos_count = tokenizer.bos_token, 0
        if bos and tokenizer.encode(bos) == [self.bos_id]:
            bos_count = rendered.startswith(bos) + rendered.startswith(2 * bos)
        return self.fit(self._complete(tokenizer.encode(bos * bos_count) + ids, text))

    def _without_pad_text(self, tokenizer: Tokenizer, rendered: str) -> str:
        """Remove the text of ``trailing_pad_id`` from the end, because its ids will be removed."""
        pad = "" if self.trailing_pad_id is None else tokenizer.decode([self.trailing_pad_id])
        while pad and rendered.endswith(pad):
            rendered = rendered.removesuffix(pad)
        return rendered

    def tokenize(self, tokenizer: Tokenizer, texts: Sequence[Text]) -> list[list[int]]:
        """Turn many samples into token ids, without truncation: callers pass these to ``fit``."""
        texts = [*map(read_text, texts)]
        if self.has_steps:
            return [ids for _, ids, _ in self._encode_steps(tokenizer, texts)]
        rendered = [self._render(tokenizer, text) for text in texts]
        ids = tokenizer.encode_batch(rendered)
        return [self._complete(sequence, text) for sequence, text in zip(ids, texts, strict=True)]

    def tokenize_records(
        self, tokenizer: Tokenizer, records: Sequence[Sequence[Text]]
    ) -> list[list[TextIds]]:
        """Tokenize the samples of many records, and count the tokens of their replies and steps.

        The ids and counts are those of ``tokenize``, ``count_reply_tokens`` and
        ``count_step_tokens``. For a model without steps it is faster: the shared prefix of a
        record is tokenized once.
        """
        records = [[*map(read_text, texts)] for texts in records]
        if self.has_steps:
            return self._tokenize_steps(tokenizer, records)
        rendered = [
            [self._render_with_reply(tokenizer, text) for text in texts] for texts in records
        ]
        encoded_records = encode_records(tokenizer, rendered)
        return [
            [
                TextIds(self._complete(encoded.token_ids, text), encoded.reply_tokens)
                for encoded, text in zip(encoded_record, texts, strict=True)
            ]
            for encoded_record, texts in zip(encoded_records, records, strict=True)
        ]

    def count_reply_tokens(self, tokenizer: Tokenizer, texts: Sequence[Text]) -> list[int]:
        """Count the tokens of each sample's reply, tokenized by itself and before truncation.

        This is the length of a reply everywhere in the package. The reply is what ``reply_of``
        returns, without the strings that the chat template adds.
        """
        replies = [reply_of(read_text(text)) for text in texts]
        return [len(ids) for ids in tokenizer.encode_batch(replies)]

    def count_step_tokens(
        self, tokenizer: Tokenizer, texts: Sequence[Text], spans: Sequence[Sequence[StepSpan]]
    ) -> list[tuple[int, ...]]:
        """Count the tokens of each step, tokenized by itself and before truncation.

        Args:
            spans: the steps of each sample.
        """
        steps = [
            step_texts(read_text(text), text_spans, self.step_separator)
            for text, text_spans in zip(texts, spans, strict=True)
        ]
        ids = iter(tokenizer.encode_batch([step for text_steps in steps for step in text_steps]))
        return [tuple(len(next(ids)) for _ in text_steps) for text_steps in steps]

    def _tokenize_steps(
        self, tokenizer: Tokenizer, records: Sequence[Sequence[Text]]
    ) -> list[list[TextIds]]:
        texts = [text for record in records for text in record]
        encoded = self._encode_steps(tokenizer, texts)
        lengths = self.count_reply_tokens(tokenizer, texts)
        spans = [stepped.spans for stepped, _, _ in encoded]
        steps = self.count_step_tokens(tokenizer, texts, spans)
        text_ids = iter(
            TextIds(ids, length, reads, step_lengths)
            for (_, ids, reads), length, step_lengths in zip(encoded, lengths, steps, strict=True)
        )
        return [[next(text_ids) for _ in record] for record in records]

    def _encode_steps(
        self, tokenizer: Tokenizer, texts: Sequence[Text]
    ) -> list[tuple[SteppedText, list[int], tuple[int, ...]]]:
        """Cut each sample into steps and tokenize them.

        Returns:
            For each sample: the strings that it was cut into, the token ids before truncation, and
            the indices in these ids where rewards are read.
        """
        template = self.chat_template(tokenizer)
        tail = template.after_reply() if self.template else tokenizer.eos_token
        render = partial(self._render, tokenizer)
        position, separator = self.scored_position, self.step_separator
        stepped_texts = [split_steps(text, position, separator, render, tail) for text in texts]
        pieces = [piece for stepped in stepped_texts for piece in stepped.pieces]
        piece_ids = iter(tokenizer.encode_batch(pieces))
        return [
            (
                stepped,
                *self._join_pieces([next(piece_ids) for _ in stepped.pieces], stepped.read, text),
            )
            for stepped, text in zip(stepped_texts, texts, strict=True)
        ]

    def _join_pieces(
        self, pieces: Sequence[list[int]], read: Sequence[int], text: Text
    ) -> tuple[list[int], tuple[int, ...]]:
        """Join the ids of a sample's pieces, and find the indices where rewards are read.

        Args:
            pieces: the token ids of each piece.
            read: indices of the pieces at whose last token a reward is read.

        Raises:
            DataError: a step has no tokens.
        """
        ids = [token for piece in pieces for token in piece]
        ends = [*accumulate(map(len, pieces))]
        # With the rules in OPEN_ENDED the last reward is read at the last separator or answer, so
        # nothing may follow, not even EOS.
        sequence = self._complete(ids, text, ends=self.scored_position not in OPEN_ENDED)
        prefix_length = len(self._complete(ids, text, ends=False)) - len(ids)
        reads = [ends[piece] - 1 + prefix_length for piece in read]
        reads[-1] = len(sequence) - 1
        if any(low >= high for low, high in pairwise([-1, *reads])):
            raise DataError("got a step without tokens, wanted at least one token in each step")
        return sequence, tuple(reads)

    def fit(
        self,
        token_ids: list[int],
        reads: tuple[int, ...] | None = None,
        spans: tuple[StepSpan, ...] = (),
    ) -> EncodedText:
        """Apply the rule for sequences of more than ``seq_length`` tokens.

        Args:
            reads: for a contract with steps, the indices in ``token_ids`` where rewards are read.
            spans: the turns or steps whose rewards are read there.

        Raises:
            OverlongError: the sequence is too long, and ``overlong`` is not ``truncate_left``.
        """
        if len(token_ids) <= self.seq_length:
            return EncodedText(token_ids, False, reads, spans)
        if self.overlong != Overlong.truncate_left.value:
            raise OverlongError(f"got {len(token_ids)} tokens, wanted at most {self.seq_length}")
        # A model trained with BOS scores badly without it, so BOS replaces the first kept token.
        keeps_bos = self.bos_id is not None and token_ids[0] == self.bos_id
        bos = token_ids[:1] if keeps_bos and self.seq_length > 1 else []
        first = len(token_ids) - self.seq_length + len(bos)
        truncated_ids = bos + token_ids[first:]
        if reads is None:
            return EncodedText(truncated_ids, True)
        lost = sum(index < first for index in reads)
        truncated_reads = tuple(index - first + len(bos) for index in reads[lost:])
        return EncodedText(truncated_ids, True, truncated_reads, spans[lost:], lost)

    def _render(self, tokenizer: Tokenizer, text: Text) -> str:
        """Return the text to tokenize: raw text unchanged, a conversation by the chat template."""
        if isinstance(text, str):
            return text
        if not self.template:
            raise NoTemplateError(
                "the sample is a conversation, and there is no chat template to render it; "
                "train with model.data.template=chatml (or plain, or a file), or use raw text"
            )
        template = self.chat_template(tokenizer)
        return write_conversation(template, text, tokenizer, self.principle_template)

    def _render_with_reply(self, tokenizer: Tokenizer, text: Text) -> WrittenText:
        rendered = self._render(tokenizer, text)
        return WrittenText(rendered, None if isinstance(text, str) else reply_of(text))

    def _complete(self, ids: list[int], text: Text, ends: bool = True) -> list[int]:
        """Complete the ids of ``text`` (``complete_ids``)."""
        return complete_ids(self, ids, is_raw=isinstance(text, str), ends=ends)
