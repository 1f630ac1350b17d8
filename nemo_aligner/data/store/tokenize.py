"""A block of a data file to arrays of token ids.

It runs in processes that have nothing else to do, so nothing here imports torch.

What only tokens can show is counted, beside the reasons of ``reading.py``; a record whose text the
contract refuses is malformed:

================  ===============================================================================
``overlong``      dropped: a sequence is longer than ``seq_length`` and the rule is ``drop`` (a
                  comparison goes as a whole; with ``error`` it is a DataError with file:line)
``same_tokens``   dropped: chosen and rejected differ as texts and not as tokens
``truncated``     kept: ``truncate_left`` cut a sequence of it
``all_tied``      kept, as the objective learns from ties: no completion is better than another
``some_tied``     kept: some of three or more completions are tied
================  ===============================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from nemo_aligner.config.common import Overlong, RecordKind
from nemo_aligner.data.blocks import Block
from nemo_aligner.data.formats import format_named, parse_lines
from nemo_aligner.data.formats.base import WantedLabels
from nemo_aligner.data.length_baseline import better_and_worse
from nemo_aligner.data.overlap import prompt_hash, short_hash
from nemo_aligner.data.reading import Reading, usable_records
from nemo_aligner.data.records import Comparison, MalformedRecord, Origin, Record
from nemo_aligner.data.sources import count_swallowed
from nemo_aligner.errors import DataError
from nemo_aligner.prefix import prefix_of_all
from nemo_aligner.text.contract import EncodedText, NoTemplateError, OverlongError, ScoringContract
from nemo_aligner.text.shared_text import TextIds
from nemo_aligner.text.tokenizer import Tokenizer

_RECORDS_AT_ONCE = 256
# The largest id that 16 bits hold.
_MOST_IN_16_BITS = 65535
# The token ids of a record's texts, unless the contract refuses one of them.
_Tokenized: TypeAlias = list[TextIds] | MalformedRecord


@dataclass(frozen=True)
class FileRules:
    """How the blocks of one file, of a format that has records of ``kind``, become tokens."""

    path: str
    format: str
    kind: RecordKind
    reading: Reading
    contract: ScoringContract
    tokenizer: Tokenizer

    @property
    def columns(self) -> tuple[str, ...]:
        """What the labels are called; those that a record has none of are NaN."""
        return self.reading.set_columns_of(self.kind)

    @property
    def token_type(self) -> np.dtype:
        """Of the ids: 16 bits where the vocabulary allows."""
        small = self.tokenizer.vocab_size - 1 <= _MOST_IN_16_BITS
        return np.dtype(np.uint16 if small else np.int32)


class Longer(NamedTuple):
    """Of so many pairs of completions how often the better is the longer; a tie is one half."""

    wins: float = 0.0
    pairs: int = 0


@dataclass
class TokenizedBlock:
    """N records with S sequences, what became of the others, and what is to be told of them.

    Attributes:
        counts: as in ``reading.py`` and above, without ``kept``.
        parsed: records that were read and not dropped before they were tokenized.
        arrays: ``tokens [T]``, ``lengths [S]``, ``ranks [S]``, ``reply_lengths [S]``,
            ``sizes [N]`` (sequences of a record), ``prefixes [N]``, ``lines [N]``,
            ``labels [N, C]``, ``record_keys [N]``, ``prompt_keys [N]``.
        sources: of every record.
    """

    counts: Counter[str] = field(default_factory=Counter)
    parsed: int = 0
    malformed: list[MalformedRecord] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    longer: Longer = field(default_factory=Longer)


class _Kept(NamedTuple):
    record: Record
    sequences: list[np.ndarray]
    reply_lengths: list[int]


def tokenize_block(block: Block, rules: FileRules) -> TokenizedBlock:
    """The arrays of a block.

    Raises:
        DataError: it is not UTF-8, a record is too long and the contract's rule is ``error``, or
            there is no chat template.
    """
    done = TokenizedBlock()
    how = rules.reading
    columns, lines = how.columns_of(rules.kind), block.lines(rules.path)
    done.counts["rows_in_cells"] = count_swallowed(lines)
    wanted = WantedLabels(columns, how.loss_mask_val)
    parsed = parse_lines(format_named(rules.format, how.pair_keys), lines, rules.path, wanted)
    records = list(usable_records(parsed, how, bool(columns), done.counts, done.malformed))
    done.parsed = len(records)
    kept = list(_kept(records, rules, done))
    done.sources = [each.record.source for each in kept]
    done.malformed.sort(key=lambda record: record.origin.line)
    pairs = better_and_worse(
        [each.record for each in kept], [n for each in kept for n in each.reply_lengths]
    )
    done.longer = Longer(sum((a > b) + 0.5 * (a == b) for a, b in pairs), len(pairs))
    done.arrays = _arrays(kept, rules)
    return done


def _kept(records: Sequence[Record], rules: FileRules, done: TokenizedBlock) -> Iterator[_Kept]:
    contract, counts = rules.contract, done.counts
    for record, texts in _tokenize_all(records, contract, rules.tokenizer):
        if isinstance(texts, MalformedRecord):
            done.malformed.append(texts)
            counts["malformed"] += 1
            continue
        encoded = [_fit(text.token_ids, contract, record.origin) for text in texts]
        whole = [text for text in encoded if text is not None]
        if len(whole) < len(encoded):
            counts["overlong"] += 1
            continue
        if are_same_tokens(whole):
            counts["same_tokens"] += 1
            continue
        counts["truncated"] += any(text.truncated for text in whole)
        if isinstance(record, Comparison) and record.has_ties:
            counts["all_tied" if record.is_tied else "some_tied"] += 1
        sequences = [np.array(text.token_ids, dtype=np.int32) for text in whole]
        yield _Kept(record, sequences, [text.reply_tokens for text in texts])


def _arrays(kept: Sequence[_Kept], rules: FileRules) -> dict[str, np.ndarray]:
    sequences = [sequence for each in kept for sequence in each.sequences]
    none = (None,) * len(rules.columns)
    labels = [
        [float("nan") if n is None else n for n in each.record.labels or none] for each in kept
    ]
    tokens = np.concatenate(sequences) if sequences else np.zeros(0)
    return {
        "tokens": tokens.astype(rules.token_type),
        "lengths": _integers([len(sequence) for sequence in sequences]),
        "ranks": _counts([rank for each in kept for rank in each.record.ranks]),
        "reply_lengths": _counts([n for each in kept for n in each.reply_lengths]),
        "sizes": _integers([len(each.sequences) for each in kept]),
        "prefixes": _counts([prefix_of_all(each.sequences) for each in kept]),
        "lines": _integers([each.record.origin.line for each in kept]),
        "labels": np.array(labels, dtype=np.float32).reshape(len(kept), len(rules.columns)),
        "record_keys": np.array([_record_key(each) for each in kept], dtype=np.uint64),
        "prompt_keys": np.array([prompt_hash(each.record) for each in kept], dtype=np.uint64),
    }


def _integers(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _counts(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _record_key(kept: _Kept) -> int:
    """The same for records that are one, token for token and label for label."""
    said = repr((kept.record.labels, kept.record.ranks, [len(ids) for ids in kept.sequences]))
    return short_hash(said.encode(), *(ids.tobytes() for ids in kept.sequences))


def _tokenize_all(
    records: Sequence[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Iterator[tuple[Record, _Tokenized]]:
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        some = records[start : start + _RECORDS_AT_ONCE]
        yield from zip(some, _tokenize(some, contract, tokenizer), strict=True)


def _tokenize(
    records: Sequence[Record], contract: ScoringContract, tokenizer: Tokenizer
) -> Sequence[_Tokenized]:
    try:
        return contract.tokenize_records(tokenizer, [record.texts for record in records])
    except DataError:
        # Once more, one by one, to see which records it is.
        return [_tokenize_alone(record, contract, tokenizer) for record in records]


def _tokenize_alone(record: Record, contract: ScoringContract, tokenizer: Tokenizer) -> _Tokenized:
    try:
        return contract.tokenize_records(tokenizer, [record.texts])[0]
    except NoTemplateError as error:
        # It is no fault of this record.
        raise DataError(f"{record.origin}: {error}") from error
    except DataError as error:
        return MalformedRecord(record.origin, str(error))


def _fit(token_ids: list[int], contract: ScoringContract, origin: Origin) -> EncodedText | None:
    try:
        return contract.fit(token_ids)
    except OverlongError as error:
        if contract.overlong == Overlong.error.value:
            raise DataError(f"{origin}: {error} (model.data.overlong is 'error')") from error
        return None


def are_same_tokens(encoded: Sequence[EncodedText | None]) -> bool:
    """Whether all of several completions are one, token for token."""
    first, *others = (None if text is None else text.token_ids for text in encoded)
    return bool(others) and all(other == first for other in others)
