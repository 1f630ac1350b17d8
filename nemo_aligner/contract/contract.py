"""ScoringContract: the one rule from a text to token ids, and what a score of them means.

It is written when a reward model is trained, saved in every checkpoint, and read by evaluation and
by the server, so its rules are never entered again.

Conversations: the chat template writes everything, BOS and end-of-turn included; nothing is added.
It gets the messages in their normal form (``messages.py``), tools and documents, and the contract's
``chat_template_kwargs``; what it does not write is refused (``template_check.py``).
(A newline that a template writes after its last end-of-turn token is part of the text: the last
token scored is whatever the template ends with.) A message that holds what the template writes
around messages is refused (``turns.py``): the model would read several messages.

Raw texts (``str``) are scored as they stand: ``add_bos`` puts BOS in front unless the text already
begins with it, ``add_eos`` puts EOS at the end unless it already ends with it. When the settings
``model.data.add_bos`` and ``add_eos`` are null, the tokenizer's own habit with a bare text
decides.

A model that reads its reward at a token of its own (``reward_token_id``) gets it behind every text
that does not end with it.

A model with a reward for each turn or step reads it by the rule of ``steps.py``; the reward of a
text is that of its last one, or what ``aggregate`` makes of all of them.

Too long (more than ``seq_length`` tokens in one sequence): ``truncate_left`` keeps the last tokens,
and a BOS that the sequence begins with; ``drop`` and ``error`` raise OverlongError, which training
turns into a counted drop or an error.
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
from nemo_aligner.contract.template_check import check_it_ends
from nemo_aligner.contract.templates import after_reply
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import write_conversation
from nemo_aligner.utils.errors import CheckpointError, DataError, short, shown

VERSION = 1
# For people, and for trainers that normalize rewards; no score depends on them.
_NOT_HASHED = ("reward_mean", "reward_std", "measured_on")
# Left out where None, so that contracts from before these fields keep their hash.
_LATER = (
    "shaping",
    "readout",
    "reply_marker",
    "chat_template_kwargs",
    "reward_token_id",
    "step_separator",
    "aggregate",
)


class OverlongError(DataError):
    """A text of more tokens than the contract's ``seq_length``."""


class NoTemplateError(DataError):
    """A conversation, where the contract has no chat template to write any with."""


@dataclass(frozen=True)
class EncodedText:
    """The token ids of one text, and whether ``truncate_left`` cut it.

    Where a contract has steps, ``reads`` are the places of the S ids that are read, the last one
    among them, ``spans`` what they are the rewards of, and ``lost`` counts steps that were cut off
    before them.
    """

    token_ids: list[int]
    truncated: bool
    reads: tuple[int, ...] | None = None
    spans: tuple[StepSpan, ...] = ()
    lost: int = 0


@dataclass(frozen=True)
class ScoringContract:
    """The meaning of a score: from a text to token ids, and from outputs to rewards.

    ``template`` is the chat template's text, empty if there is none. ``label_means`` are added to
    the head's output (zeros for ranking). ``reward_mean``, ``reward_std`` are None until measured.
    ``shaping`` says as JSON what a server makes of the model's rewards; no model's archive has any.
    ``readout`` says as JSON how a head is read whose outputs are no rewards;
    ``reply_marker`` are the ids that come before a reply, where its mean is scored;
    ``chat_template_kwargs`` says as JSON what else the template is given;
    ``reward_token_id`` is a token that is appended to every text, conversations included;
    ``step_separator`` stands between the steps of a reply, where these are scored (``steps.py``);
    ``aggregate`` makes one reward of a text out of theirs, None takes the last.
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

    def __post_init__(self) -> None:
        check_fields(self)
        # 0 and 0.0 are the same rule and must have the same hash.
        for name in ("attribute_weights", "label_means"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        wanted = len(self.attributes)
        if not len(self.attribute_weights) == len(self.label_means) == wanted > 0:
            raise DataError(
                f"scoring contract: got {wanted} attributes, {len(self.attribute_weights)} weights "
                f"and {len(self.label_means)} label means; wanted the same number, at least 1"
            )
        readout = self.output_readout
        if readout is not None and len(readout.numbers) != wanted:
            raise DataError(
                f"scoring contract: readout: got {len(readout.numbers)} attributes, wanted {wanted}"
            )

    @property
    def output_readout(self) -> Readout | None:
        """Readout from outputs to rewards; None if the head has one output per attribute."""
        return None if self.readout is None else Readout.from_json(self.readout)

    def rewards_of(self, outputs: np.ndarray) -> np.ndarray:
        """``[N, A]`` float32 of the head's ``outputs [N, A * K]`` float32."""
        readout = self.output_readout
        read = outputs if readout is None else readout.rewards(outputs)
        return read + np.array(self.label_means, dtype=np.float32)

    def spreads_of(self, outputs: np.ndarray) -> np.ndarray | None:
        """``[N, A]`` float32 uncertainty of these rewards; None where no output tells it."""
        readout = self.output_readout
        return None if readout is None else readout.spreads(outputs)

    @property
    def reward_scale(self) -> str:
        """What a reward is a number of: ``probability``, ``log_odds`` or ``score``.

        Models of versions that trained steps with cross-entropy and had no readout for it say by
        the absence of any that they give log-odds.
        """
        if self.shaping is not None:
            return SCORE
        readout = self.output_readout
        if readout is not None:
            return PROBABILITY if readout.gives_probabilities else SCORE
        is_rated = self.has_steps and self.record_kind is RecordKind.rating
        return LOG_ODDS if is_rated and not any(self.label_means) else SCORE

    @property
    def outputs_per_attribute(self) -> int:
        """Outputs of the head per attribute."""
        readout = self.output_readout
        return 1 if readout is None else readout.width

    @property
    def output_names(self) -> list[str]:
        """Names of the head's outputs, such as ``helpfulness=0.5`` of a bin."""
        readout = self.output_readout
        if readout is None or readout.width == 1:
            return list(self.attributes)
        rows = zip(self.attributes, readout.numbers, strict=True)
        return [f"{name}={number:g}" for name, row in rows for number in row]

    @property
    def num_outputs(self) -> int:
        """Outputs of the head for a text, turn or step."""
        return len(self.attributes) * self.outputs_per_attribute

    @property
    def has_steps(self) -> bool:
        """True if a text has a reward for each of its turns or steps."""
        return self.scored_position in STEPPED

    @property
    def aggregation(self) -> Aggregate:
        """Rule by which the rewards of a text's turns or steps become one."""
        return Aggregate(self.aggregate or Aggregate.last.value)

    @property
    def template_kwargs(self) -> str:
        """``chat_template_kwargs``, empty where there are none."""
        return self.chat_template_kwargs or ""

    @property
    def record_kind(self) -> RecordKind:
        """Kind of records that the model learned from."""
        return RewardModelType(self.reward_model_type).record_kind

    @property
    def hash(self) -> str:
        """sha256 (hex) of the canonical JSON of every field that changes a score."""
        fields = {name: value for name, value in self._fields().items() if name not in _NOT_HASHED}
        # Sorted, ASCII and without spaces, so that any JSON library can write the same bytes.
        canonical = json.dumps(
            {"version": VERSION, **fields},
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def differences(self, other: ScoringContract) -> dict[str, tuple[Any, Any]]:
        """Field -> (value here, value there), for every field by which the two score otherwise."""
        mine, theirs = self._fields(), other._fields()
        return {
            name: (mine.get(name), theirs.get(name))
            for name in {**mine, **theirs}
            if name not in _NOT_HASHED and mine.get(name) != theirs.get(name)
        }

    def _fields(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if name not in _LATER or value is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the version and the hash."""
        return {"version": VERSION, **self._fields(), "hash": self.hash}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScoringContract:
        """The inverse of ``to_dict``.

        Raises:
            CheckpointError: another version, unknown or missing fields, or a wrong hash.
        """
        content = dict(values)
        version, wanted_hash = content.pop("version", None), content.pop("hash", None)
        if version != VERSION:
            raise CheckpointError(
                f"scoring contract: got version {shown(version)}, wanted {VERSION}"
            )
        # An archive from before one of these fields had it at None.
        for name in _LATER:
            content.setdefault(name, None)
        known = {field.name for field in dataclasses.fields(cls)}
        if set(content) != known:
            raise CheckpointError(
                "scoring contract: unknown or missing fields: "
                + short(", ".join(sorted(set(content) ^ known)))
            )
        for name, value in content.items():
            content[name] = tuple(value) if isinstance(value, list) else value
        try:
            contract = cls(**content)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"scoring contract: {error}") from error
        if contract.hash != wanted_hash:
            raise CheckpointError(
                f"scoring contract: its fields hash to {contract.hash}, but it states "
                f"{shown(wanted_hash)}: it was changed after it was written"
            )
        return contract

    def check_template_ends(self, tokenizer: Tokenizer) -> None:
        """Try the template in a process of its own: an untrusted one may not end.

        Raises:
            DataError: it cannot write a question and its answer, or takes much too long for it.
        """
        if self.template:
            bos, eos = tokenizer.bos_token, tokenizer.eos_token
            check_it_ends(self.template, bos, eos, self.template_kwargs)

    def with_dtype(self, precision: Precision | None) -> ScoringContract:
        """The contract of the same model run in another precision; None changes nothing."""
        return self if precision is None else dataclasses.replace(self, dtype=precision.value)

    def with_label_means(self, means: Sequence[float]) -> ScoringContract:
        """The same contract with the offsets of a regression head."""
        return dataclasses.replace(self, label_means=tuple(float(mean) for mean in means))

    def with_readout(self, readout: Readout | None) -> ScoringContract:
        """The same contract with a head that is read so."""
        text = None if readout is None else readout.to_json()
        return dataclasses.replace(self, readout=text)

    def with_statistics(
        self, mean: Sequence[float], std: Sequence[float], measured_on: str
    ) -> ScoringContract:
        """The same contract with the rewards' mean and spread per attribute, and on what data."""
        return dataclasses.replace(
            self,
            reward_mean=tuple(mean),
            reward_std=tuple(std),
            measured_on=measured_on,
        )

    def encode(self, tokenizer: Tokenizer, text: Text) -> EncodedText:
        """Token ids of one text by the rules above.

        Raises:
            OverlongError: it is too long, and the rule is not ``truncate_left``.
            TurnMarkError: a message of it holds what the template writes around messages.
            DataError: it is empty, malformed, or a conversation and there is no chat template.
        """
        text = read_text(text)
        if self.has_steps:
            stepped, ids, reads = self._encode_steps(tokenizer, [text])[0]
            return self.fit(ids, reads, stepped.spans)
        written = self._write(tokenizer, text)
        end = self._encode_end(tokenizer, text, written)
        if end is not None:
            return end
        ids = tokenizer.encode_batch([written])[0]
        return self.fit(self._complete(ids, text))

    def _encode_end(self, tokenizer: Tokenizer, text: Text, written: str) -> EncodedText | None:
        """Fit a text that is much too long by its end alone; None if that cannot be told.

        Raises:
            OverlongError: it is too long, and the rule is not ``truncate_left``.
        """
        # No text of so few letters is too long for every tokenizer.
        if len(written) <= self.seq_length:
            return None
        bounds = tokenizer.bounds
        if self.overlong != Overlong.truncate_left.value:
            most, got = bounds.most_bytes(self.seq_length), len(written.encode())
            if most is not None and got > most:
                raise OverlongError(
                    f"got a text of {got} bytes, wanted at most {self.seq_length} tokens, "
                    f"which have {most} bytes at most"
                )
            return None
        ids = bounds.encode_end(tokenizer.encode, written, self.seq_length + 1)
        if ids is None:
            return None
        # The rules for BOS look at the first two tokens.
        bos, begins = tokenizer.bos_token, 0
        if bos and tokenizer.encode(bos) == [self.bos_id]:
            begins = written.startswith(bos) + written.startswith(2 * bos)
        return self.fit(self._complete(tokenizer.encode(bos * begins) + ids, text))

    def tokenize(self, tokenizer: Tokenizer, texts: Sequence[Text]) -> list[list[int]]:
        """Token ids of many texts at their full lengths; ``fit`` is the rule for long ones."""
        texts = [*map(read_text, texts)]
        if self.has_steps:
            return [ids for _, ids, _ in self._encode_steps(tokenizer, texts)]
        written = [self._write(tokenizer, text) for text in texts]
        ids = tokenizer.encode_batch(written)
        return [self._complete(sequence, text) for sequence, text in zip(ids, texts, strict=True)]

    def tokenize_records(
        self, tokenizer: Tokenizer, records: Sequence[Sequence[Text]]
    ) -> list[list[TextIds]]:
        """``tokenize`` and ``count_reply_tokens`` of the texts of many records at once."""
        records = [[*map(read_text, texts)] for texts in records]
        if self.has_steps:
            return self._tokenize_steps(tokenizer, records)
        written = [[self._write_apart(tokenizer, text) for text in texts] for texts in records]
        encoded = encode_records(tokenizer, written)
        return [
            [
                TextIds(self._complete(each.token_ids, text), each.reply_tokens)
                for each, text in zip(own, texts, strict=True)
            ]
            for own, texts in zip(encoded, records, strict=True)
        ]

    def count_reply_tokens(self, tokenizer: Tokenizer, texts: Sequence[Text]) -> list[int]:
        """Count the tokens of every text's reply alone: the length of a reply everywhere.

        It is what ``reply_of`` returns, at its full length, without the chat template's words.
        """
        replies = [reply_of(read_text(text)) for text in texts]
        return [len(ids) for ids in tokenizer.encode_batch(replies)]

    def count_step_tokens(
        self, tokenizer: Tokenizer, texts: Sequence[Text], spans: Sequence[Sequence[StepSpan]]
    ) -> list[tuple[int, ...]]:
        """Count the tokens of every step alone, as ``count_reply_tokens`` does those of a reply.

        Args:
            spans: the steps of each text.
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
        steps = self.count_step_tokens(tokenizer, texts, [each.spans for each, _, _ in encoded])
        found = iter(
            TextIds(ids, length, reads, step_lengths)
            for (_, ids, reads), length, step_lengths in zip(encoded, lengths, steps, strict=True)
        )
        return [[next(found) for _ in record] for record in records]

    def _encode_steps(
        self, tokenizer: Tokenizer, texts: Sequence[Text]
    ) -> list[tuple[SteppedText, list[int], tuple[int, ...]]]:
        """Each text cut at its steps; its ids at their full length, and the places read."""
        if not self.template:
            tail = ""
        else:
            bos, eos = tokenizer.bos_token, tokenizer.eos_token
            tail = after_reply(self.template, bos, eos, self.template_kwargs)
        write = partial(self._write, tokenizer)
        position, separator = self.scored_position, self.step_separator
        stepped = [split_steps(text, position, separator, write, tail) for text in texts]
        ids = iter(tokenizer.encode_batch([piece for each in stepped for piece in each.pieces]))
        return [
            (each, *self._join([next(ids) for _ in each.pieces], each.read, text))
            for each, text in zip(stepped, texts, strict=True)
        ]

    def _join(
        self, pieces: Sequence[list[int]], read: Sequence[int], text: Text
    ) -> tuple[list[int], tuple[int, ...]]:
        ids = [token for piece in pieces for token in piece]
        ends = [*accumulate(map(len, pieces))]
        # Of a separator that ends the sequence: nothing stands behind it, not even EOS.
        whole = self._complete(ids, text, ends=self.scored_position not in OPEN_ENDED)
        begun = len(self._complete(ids, text, ends=False)) - len(ids)
        reads = [ends[piece] - 1 + begun for piece in read]
        reads[-1] = len(whole) - 1
        if any(low >= high for low, high in pairwise([-1, *reads])):
            raise DataError("got a step that has no tokens, wanted some in each")
        return whole, tuple(reads)

    def fit(
        self,
        token_ids: list[int],
        reads: tuple[int, ...] | None = None,
        spans: tuple[StepSpan, ...] = (),
    ) -> EncodedText:
        """Apply the rule for sequences of more than ``seq_length`` tokens.

        ``reads`` and ``spans`` are those of its steps, where the contract has any.

        Raises:
            OverlongError: it is too long, and the rule is not ``truncate_left``.
        """
        if len(token_ids) <= self.seq_length:
            return EncodedText(token_ids, False, reads, spans)
        if self.overlong != Overlong.truncate_left.value:
            raise OverlongError(f"got {len(token_ids)} tokens, wanted at most {self.seq_length}")
        # Models trained with a BOS score badly without; it takes the place of one token.
        keeps_bos = self.bos_id is not None and token_ids[0] == self.bos_id
        head = token_ids[:1] if keeps_bos and self.seq_length > 1 else []
        first = len(token_ids) - self.seq_length + len(head)
        kept = head + token_ids[first:]
        if reads is None:
            return EncodedText(kept, True)
        lost = sum(place < first for place in reads)
        places = tuple(place - first + len(head) for place in reads[lost:])
        return EncodedText(kept, True, places, spans[lost:], lost)

    def _write(self, tokenizer: Tokenizer, text: Text) -> str:
        """``text`` is in the normal form."""
        if isinstance(text, str):
            return text
        if not self.template:
            raise NoTemplateError(
                "this text is a conversation, and there is no chat template to write it with; "
                "train with model.data.template=chatml (or plain, or a file), or use raw text"
            )
        return write_conversation(self.template, text, tokenizer, self.template_kwargs)

    def _write_apart(self, tokenizer: Tokenizer, text: Text) -> WrittenText:
        written = self._write(tokenizer, text)
        return WrittenText(written, None if isinstance(text, str) else reply_of(text))

    def _complete(self, ids: list[int], text: Text, ends: bool = True) -> list[int]:
        """``ids`` with BOS, EOS and the like; without what stands behind them unless ``ends``."""
        if isinstance(text, str):
            if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
                ids = [self.bos_id, *ids]
            if ends and self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
                ids = [*ids, self.eos_id]
        if not ids:
            raise DataError("the text has no tokens: it is empty")
        if ends and self.reward_token_id is not None and ids[-1] != self.reward_token_id:
            ids = [*ids, self.reward_token_id]
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            raise DataError("the text begins with BOS twice; write it once, or not at all")
        return ids


# Texts to token ids by one contract, and a check of ids that come from outside.


class TextEncoder:
    """The ids that a model with ``contract`` and ``tokenizer`` reads."""

    def __init__(self, contract: ScoringContract, tokenizer: Tokenizer) -> None:
        self.contract = contract
        self.tokenizer = tokenizer

    def encode(self, text: Text) -> EncodedText:
        """The token ids of one text; DataError where the contract refuses it."""
        encoded = self.contract.encode(self.tokenizer, text)
        self._check_ids(encoded.token_ids)
        return encoded

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Refuse, with a DataError, what the model would fail on or take for something else."""
        if self.contract.aggregate is not None:
            raise DataError(
                f"got token ids, but the reward of a sample is the {self.contract.aggregate} over "
                "its steps, which cannot be found in token ids. Send the text or the conversation"
            )
        self._check_ids(token_ids)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if not 1 <= len(token_ids) <= self.contract.seq_length:
            raise DataError(
                f"got {len(token_ids)} tokens, wanted 1 to {self.contract.seq_length} (seq_length)"
            )
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= self.tokenizer.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise DataError(f"got token id {wrong}, wanted 0 to {self.tokenizer.vocab_size - 1}")

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Tokens of every text's reply alone, at its full length."""
        return self.contract.count_reply_tokens(self.tokenizer, texts)
