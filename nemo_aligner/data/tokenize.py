"""Tokenize one block of a data file: turn its records into arrays of token ids.

``token_workers.py`` calls ``tokenize_block`` in several processes. They must not import torch,
which takes seconds and memory in each. ``token_index.py`` joins the blocks.

``clean.py`` decides what is dropped and counted. This module also counts ties among kept records:

================  ===============================================================================
``all_tied``      kept, as the objective learns from ties: no completion is better than another
``some_tied``     kept: some of three or more completions are tied
================  ===============================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nemo_aligner.config.common import Overlong
from nemo_aligner.contract.bulk_encoding import TextIds
from nemo_aligner.contract.contract import EncodedText, OverlongError, ScoringContract
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.clean import EncodedRecord, encode_record, keep_usable
from nemo_aligner.data.files import Block
from nemo_aligner.data.formats.teacher import count_teachers, teacher_rewards
from nemo_aligner.data.readers import FileRules
from nemo_aligner.data.records import (
    Comparison,
    MalformedRecord,
    Rating,
    Record,
    better_and_worse,
    lengths_of_rewards,
    principle_key,
    prompt_hash,
    record_principle,
    short_hash,
    verdict_keys,
)
from nemo_aligner.utils.errors import DataError

# Number of records that the tokenizer encodes in one call.
_RECORDS_AT_ONCE = 256
_LARGEST_UINT16 = 65535


@dataclass(frozen=True)
class TokenRules:
    """Everything that determines the tokens of a file: rules to read it, contract, tokenizer."""

    file: FileRules
    contract: ScoringContract
    tokenizer: Tokenizer

    @property
    def token_type(self) -> np.dtype:
        """Type of the stored ids: uint16 if the vocabulary fits, else int32."""
        fits = self.tokenizer.vocab_size - 1 <= _LARGEST_UINT16
        return np.dtype(np.uint16 if fits else np.int32)


@dataclass
class TokenizedBlock:
    """N records of a block with Q samples and S rewards, and counts of the dropped ones.

    Attributes:
        counts: numbers of records that were read, and dropped for each reason; without ``kept``.
        parsed: number of records that were tokenized, including those that were then dropped.
        malformed: the malformed records, in line order.
        arrays: ``tokens [T]``, ``lengths [Q]``, ``ranks [Q]``, ``sample_counts [N]``,
            ``reward_counts [Q]``, ``places [S]`` (positions of the tokens that the head reads),
            ``reply_lengths [S]`` and ``labels [L, C]`` (see ``Records``), ``prefixes [N]``,
            ``lines [N]``, ``record_keys [N]``, ``prompt_keys [N]``, ``verdict_keys [V]``,
            ``verdict_counts [N]`` (verdicts of each record), ``principle_keys [N]``,
            ``teacher_rewards [Q]`` (NaN where a sample has none).
        sources: source of each record.
        unread: for each column that was not read, the number of lines that have it.
        pairs: number of pairs of samples in which one sample is better than the other.
        longer: number of these pairs whose better reply is longer; equal lengths count one half.
        teachers: number of records by the JSON of their field ``teacher``; without "".
        principles: the different principles of the records (``record_principle``), without "".
    """

    counts: Counter[str] = field(default_factory=Counter)
    parsed: int = 0
    malformed: list[MalformedRecord] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    pairs: int = 0
    longer: float = 0.0
    teachers: Counter[str] = field(default_factory=Counter)
    principles: set[str] = field(default_factory=set)


class _TokenizedRecord(NamedTuple):
    """A record that the rules keep, with the tokens of its samples.

    Attributes:
        record: the record.
        sequences: token ids of each sample, int32.
        reply_tokens: number of tokens of each sample's reply.
        reply_lengths: for each reward, the tokens of its reply, turn or step
            (``lengths_of_rewards``).
        reads: for each sample, positions of the tokens that the head reads.
        lost: number of turns or steps at the start of the sample that truncation removed.
    """

    record: Record
    sequences: list[np.ndarray]
    reply_tokens: Sequence[int]
    reply_lengths: Sequence[int]
    reads: Sequence[Sequence[int]]
    lost: int

    def label_rows(self, columns: int) -> list[Sequence[float | None]]:
        """List the rows of labels: one for a comparison, one for each reward of a rating."""
        record, missing = self.record, (None,) * columns
        if not isinstance(record, Rating):
            return [record.labels or missing]
        if record.steps is not None:
            return [labels or missing for labels in record.steps[self.lost :]]
        # A rating of the whole sample, of a model that scores steps, labels the last step only.
        return [missing] * (len(self.reads[0]) - 1) + [record.labels or missing]


def tokenize_block(block: Block, rules: TokenRules) -> TokenizedBlock:
    """Read the records of a block, tokenize them, and drop those that cannot be used.

    Raises:
        DataError: the block is not UTF-8, a sample is too long and ``model.data.overlong`` is
            ``error``, or there is no chat template.
    """
    counts: Counter[str] = Counter()
    malformed: list[MalformedRecord] = []
    unread: Counter[str] = Counter()
    lines = block.lines(rules.file.path)
    records = list(rules.file.records(lines, counts, malformed, unread))
    tokenized = list(_tokenize_records(records, rules, counts, malformed))
    malformed.sort(key=lambda record: record.origin.line)
    pairs = better_and_worse(
        [item.record for item in tokenized],
        [count for item in tokenized for count in item.reply_tokens],
    )
    return TokenizedBlock(
        counts=counts,
        parsed=len(records),
        malformed=malformed,
        arrays=_build_arrays(tokenized, rules),
        sources=[item.record.source for item in tokenized],
        unread=unread,
        pairs=len(pairs),
        longer=sum((a > b) + 0.5 * (a == b) for a, b in pairs),
        teachers=count_teachers([item.record for item in tokenized]),
        principles={record_principle(item.record) for item in tokenized} - {""},
    )


def _tokenize_records(
    records: Sequence[Record],
    rules: TokenRules,
    counts: Counter[str],
    malformed: list[MalformedRecord],
) -> Iterator[_TokenizedRecord]:
    """Yield the records that are kept, with their tokens.

    Dropped records are counted in ``counts`` by reason, and malformed ones added to ``malformed``.
    """
    stops = rules.contract.overlong == Overlong.error.value
    error = " (model.data.overlong is 'error')" if stops else None
    encoded_records = _encode_all(records, rules.contract, rules.tokenizer)
    for encoded, texts in keep_usable(encoded_records, counts, malformed, error):
        record = encoded.record
        if isinstance(record, Comparison) and record.has_ties:
            counts["all_tied" if record.is_tied else "some_tied"] += 1
        sequences = [np.array(text.token_ids, dtype=np.int32) for text in texts]
        # ``text.reads`` is None if turns and steps are not scored. The reward then belongs to the
        # last token.
        reads = [text.reads or (len(text.token_ids) - 1,) for text in texts]
        if rules.contract.has_steps:
            counts["steps"] += sum(map(len, reads))
        lengths = [
            length
            for text, reply_tokens, step_tokens in zip(
                texts, encoded.reply_tokens, encoded.step_tokens, strict=True
            )
            for length in lengths_of_rewards(record, reply_tokens, step_tokens[text.lost :])
        ]
        reply_tokens = encoded.reply_tokens
        yield _TokenizedRecord(record, sequences, reply_tokens, lengths, reads, texts[0].lost)


def _build_arrays(
    tokenized: Sequence[_TokenizedRecord], rules: TokenRules
) -> dict[str, np.ndarray]:
    sequences = [sequence for item in tokenized for sequence in item.sequences]
    columns = rules.file.columns
    labels = [
        [float("nan") if label is None else label for label in row]
        for item in tokenized
        for row in item.label_rows(len(columns))
    ]
    tokens = np.concatenate(sequences) if sequences else np.zeros(0)
    ranks = [rank for item in tokenized for rank in item.record.ranks]
    verdicts = [verdict_keys(item.record) for item in tokenized]
    prompts = [prompt_hash(item.record) for item in tokenized]
    reads = [places for item in tokenized for places in item.reads]
    principles = [principle_key(item.record) for item in tokenized]
    return {
        "tokens": tokens.astype(rules.token_type),
        "lengths": _to_int64([len(sequence) for sequence in sequences]),
        "ranks": _to_int32(ranks),
        "reply_lengths": _to_int32([n for item in tokenized for n in item.reply_lengths]),
        "sample_counts": _to_int64([len(item.sequences) for item in tokenized]),
        "reward_counts": _to_int64([*map(len, reads)]),
        "places": _to_int32([place for places in reads for place in places]),
        "prefixes": _to_int32([prefix_of_all(item.sequences) for item in tokenized]),
        "lines": _to_int64([item.record.origin.line for item in tokenized]),
        "labels": np.array(labels, dtype=np.float32).reshape(len(labels), len(columns)),
        "record_keys": np.array([_hash_record(item) for item in tokenized], dtype=np.uint64),
        "prompt_keys": np.array(prompts, dtype=np.uint64),
        "verdict_keys": np.array([key for keys in verdicts for key in keys], dtype=np.uint64),
        "verdict_counts": _to_int32([*map(len, verdicts)]),
        "principle_keys": np.array(principles, dtype=np.uint64),
        "teacher_rewards": teacher_rewards([item.record for item in tokenized]),
    }


def _to_int64(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _to_int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _hash_record(item: _TokenizedRecord) -> int:
    """Hash the tokens, labels and ranks of a record, to find duplicates."""
    record = item.record
    facts = repr((record.labels, record.ranks, [len(ids) for ids in item.sequences]))
    if isinstance(record, Rating) and record.steps is not None:
        facts += repr(record.steps)
    if record.teacher_rewards:
        facts += repr(record.teacher_rewards)
    return short_hash(facts.encode(), *(ids.tobytes() for ids in item.sequences))


def _encode_all(
    records: Sequence[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Iterator[EncodedRecord | MalformedRecord]:
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        part = records[start : start + _RECORDS_AT_ONCE]
        for record, texts in zip(part, _encode_part(part, contract, tokenizer), strict=True):
            if isinstance(texts, MalformedRecord):
                yield texts
                continue
            truncated = [_truncate(text, contract) for text in texts]
            replies = [text.reply_tokens for text in texts]
            yield EncodedRecord(record, truncated, replies, [text.step_tokens for text in texts])


def _encode_part(
    records: Sequence[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Sequence[list[TextIds] | MalformedRecord]:
    try:
        return contract.tokenize_records(tokenizer, [record.texts for record in records])
    except DataError:
        # A sample was rejected. Encode the records again one by one, to find the malformed ones.
        return [
            encode_record(record, lambda texts: contract.tokenize_records(tokenizer, [texts])[0])
            for record in records
        ]


def _truncate(text: TextIds, contract: ScoringContract) -> EncodedText | OverlongError:
    try:
        return contract.fit(text.token_ids, text.reads)
    except OverlongError as error:
        return error


# Prefixes that token sequences share.

# Shorter prefixes, in tokens, are not shared: a separate segment in a pack would cost more.
_MIN_PREFIX = 8


def common_prefix(first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray) -> int:
    """Count the tokens that two sequences share at the beginning; 0 if fewer than ``_MIN_PREFIX``.

    The result is less than both lengths, because each sequence needs a last token outside the
    prefix. Arrays are compared faster than lists.
    """
    limit = min(len(first), len(second)) - 1
    if limit < _MIN_PREFIX:
        return 0
    differs = np.asarray(first[:limit]) != np.asarray(second[:limit])
    index = int(differs.argmax())
    prefix = index if differs[index] else limit
    return prefix if prefix >= _MIN_PREFIX else 0


def prefix_of_all(sequences: Sequence[Sequence[int] | np.ndarray]) -> int:
    """Count the tokens that all sequences share at the beginning; 0 for a single sequence.

    The prefix is measured with ``common_prefix``.
    """
    first, *following = sequences
    return min((common_prefix(first, sequence) for sequence in following), default=0)
