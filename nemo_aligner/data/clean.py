"""Records that cannot be used: what is an error, what is malformed, and what is a counted drop.

Training, evaluation and the tools for data files all drop by these rules.

=============================================================================  ====================
no file, no UTF-8, no JSON object in it, a broken JSON list, an odd number of  DataError
comparison lines, no record that fits a format
malformed JSON on a line, a missing key, a value of the wrong type, a          malformed: DataError,
conversation that does not end with the reply, a label that is not finite, a   or dropped and
record of another format than the others                                       counted
chosen and rejected are the same (``identical``)                               dropped and counted
the reply is empty or nobody can see it (``empty_reply``)                      dropped and counted
a rating without any label (``no_label``)                                      dropped and counted
a comparison says the opposite of another (``contradicting``)                  kept and counted,
                                                                               dropped where the
                                                                               settings say so
all completions are tied (``tied``)                                            dropped and counted,
                                                                               kept where the
                                                                               objective learns
                                                                               from ties
chosen and rejected answer different prompts (``different_prompts``)           kept and counted
a cell of a table has lines that look like rows (``rows_in_cells``)            kept and counted
=============================================================================  ====================

Tokens can show more, in training and in evaluation alike:

=============================================================================  ====================
a text that the contract refuses, as one with the template's own markers       malformed, as above
a text is longer than ``seq_length`` (``overlong``)                            dropped and counted,
                                                                               cut and counted as
                                                                               ``truncated``, or
                                                                               DataError
labels of steps that were cut off so (``labels_cut_off``)                      counted
labels of other steps than the text has                                        malformed, as above
all texts have the same tokens (``same_tokens``)                               dropped and counted
=============================================================================  ====================

Which of the two a malformed record is, ``MalformedRule`` decides; with an error, all files are read
before it. Empty lines are skipped. A dropped record is never replaced by another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from nemo_aligner.config.common import Malformed
from nemo_aligner.config.model import DataConfig
from nemo_aligner.contract.contract import EncodedText, NoTemplateError, OverlongError
from nemo_aligner.contract.messages import Text, reply_of
from nemo_aligner.data.records import (
    Comparison,
    MalformedRecord,
    Rating,
    Record,
    is_blank,
    text_names,
)
from nemo_aligner.utils.errors import ConfigError, DataError

Item = TypeVar("Item")

# Malformed records: the one place that decides whether a run goes on.

MOST_LISTED = 10
_LINES_NAMED = 5


class ReadFile(Protocol):
    """A file that was read, whose ``counts`` have ``read``; at least its first ``malformed``."""

    @property
    def path(self) -> str: ...

    @property
    def counts(self) -> Mapping[str, int]: ...

    @property
    def malformed(self) -> Sequence[MalformedRecord]: ...


@dataclass(frozen=True)
class MalformedRule:
    """``action`` says whether malformed records are left out, ``most`` how many of a file's.

    ``section`` is where the two settings stand, as errors name them: ``model.data.`` in training.
    """

    action: Malformed = DataConfig.malformed
    most: float = DataConfig.max_malformed
    section: str = "model.data."

    def __post_init__(self) -> None:
        if not 0 <= self.most <= 1:
            raise ConfigError(
                f"{self.section}max_malformed: got {self.most}, wanted a number from 0 to 1"
            )

    def allows(self, file: ReadFile) -> bool:
        """True if the file's remaining records may be used."""
        if self.action is Malformed.error:
            return not file.malformed
        return malformed_fraction(file) <= self.most


def check_malformed(files: Sequence[ReadFile], rule: MalformedRule) -> None:
    """Refuse files with more malformed records than the rule allows, all of them in one error.

    Raises:
        DataError: it lists the first malformed records of every such file, and how many there are.
    """
    # A file may be given twice, to train and to validate on.
    bad = {file.path: file for file in files if not rule.allows(file)}
    if not bad:
        return
    lines = []
    for file in bad.values():
        listed = list_malformed(file.malformed, MOST_LISTED, _count(file))
        lines += [f"{file.path}: {_how_many(file)}", *listed]
    raise DataError("\n".join([*lines, _advice(list(bad.values()), rule)]))


def list_first(items: Sequence[object], most: int) -> list[str]:
    """A line for each of the first ``most`` items, and how many more there are."""
    lines = [f"  {item}" for item in items[:most]]
    rest = len(items) - most
    return [*lines, f"  and {rest} more"] if rest > 0 else lines


def list_malformed(
    records: Sequence[MalformedRecord], most: int, total: int | None = None
) -> list[str]:
    """``list_first`` of malformed records, those of a file with the same reason on one line.

    ``total`` is their number where not all of them are in ``records``.
    """
    alike: dict[tuple[str, str], list[MalformedRecord]] = {}
    for record in records:
        alike.setdefault((record.origin.path, record.reason), []).append(record)
    shown = list(alike.values())[:most]
    lines = [f"  {first}{_same_reason(others)}" for first, *others in shown]
    rest = (len(records) if total is None else total) - sum(map(len, shown))
    return [*lines, f"  and {rest} more"] if rest > 0 else lines


def _same_reason(others: Sequence[MalformedRecord]) -> str:
    if not others:
        return ""
    lines = ", ".join(str(record.origin.line) for record in others[:_LINES_NAMED])
    more = ", ..." if len(others) > _LINES_NAMED else ""
    return f" ({len(others)} more on line{'s' * (len(others) > 1)} {lines}{more})"


def malformed_fraction(file: ReadFile) -> float:
    """Share of the file's records that are malformed."""
    return _count(file) / max(file.counts.get("read", 0), 1)


def _count(file: ReadFile) -> int:
    # Of many, only the first are at hand.
    return max(len(file.malformed), file.counts.get("malformed", 0))


def _how_many(file: ReadFile) -> str:
    return (
        f"{_count(file)} of its {file.counts['read']} records "
        f"({malformed_fraction(file):.2%}) are malformed"
    )


def _advice(files: Sequence[ReadFile], rule: MalformedRule) -> str:
    allowed = f"{rule.section}max_malformed={rule.most:g}"
    if rule.action is Malformed.drop:
        return f"{allowed} allows {rule.most:.2%} of a file; fix the data, or raise the limit"
    advice = f"{rule.section}malformed=drop would leave them out"
    if max(map(malformed_fraction, files)) > rule.most:
        return f"{advice}, but {allowed} allows {rule.most:.2%} of a file"
    return advice


# What the texts of a record show.


def why_drop(record: Record, labelled: bool, ties: bool) -> str | None:
    """The reason why a record cannot be learned from, by its texts; None if it can."""
    if any(is_blank(reply_of(text)) for text in record.texts):
        return "empty_reply"
    if isinstance(record, Comparison):
        if all(text == record.texts[0] for text in record.texts):
            return "identical"
        return "tied" if record.is_tied and not ties else None
    rows = [record.labels] if record.steps is None else record.steps
    if labelled and all(label is None for row in rows for label in row):
        return "no_label"
    return None


def nothing_left(path: str, counts: Mapping[str, int]) -> DataError:
    """Build the error of a file that has no record to use."""
    advice = (
        "; they are longer than model.data.seq_length: raise it, or set "
        "model.data.overlong=truncate_left"
    ) * bool(counts.get("overlong"))
    return DataError(f"{path}: no usable record in it: {_describe(counts)}{advice}")


def _describe(counts: Mapping[str, int]) -> str:
    found = (f"{count} {name}" for name, count in counts.items() if count)
    return ", ".join(found) or "it is empty"


# What the tokens of a record show.


class EncodedRecord(NamedTuple):
    """A record with the tokens of its texts; for one that is too long, the error that says so.

    ``reply_tokens`` are the lengths of all replies, ``step_tokens`` those of all their steps, where
    somebody needs them.
    """

    record: Record
    texts: Sequence[EncodedText | OverlongError]
    reply_tokens: Sequence[int] = ()
    step_tokens: Sequence[Sequence[int]] = ()


def encode_record(
    record: Record, encode: Callable[[Sequence[Text]], list[Item]]
) -> list[Item] | MalformedRecord:
    """Encode a record's texts; where one of them is refused, the reason names it and says why.

    Raises:
        DataError: there is no chat template, which is no fault of this record.
    """
    try:
        return encode(record.texts)
    except NoTemplateError as error:
        raise DataError(f"{record.origin}: {error}") from error
    except DataError as error:
        # Which of the texts it was is only known from each alone.
        for name, text in zip(text_names(record), record.texts, strict=True):
            try:
                encode([text])
            except DataError as why:
                # Places in a conversation are counted from the first message of its prompt.
                where = name if isinstance(text, str) else f"prompt and {name}"
                return MalformedRecord(record.origin, f"{where}: {why}")
        return MalformedRecord(record.origin, str(error))


def usable_encoded(
    encoded: Iterable[EncodedRecord | MalformedRecord],
    counts: Counter[str],
    malformed: list[MalformedRecord],
    overlong_error: str | None,
) -> Iterator[tuple[EncodedRecord, list[EncodedText]]]:
    """Yield the records that are not dropped for what their tokens show, with their tokens.

    The others are counted, or put into ``malformed``.

    Raises:
        DataError: a text is too long, and ``overlong_error``, which ends the message, is not None.
    """
    for each in encoded:
        if isinstance(each, MalformedRecord):
            malformed.append(each)
            counts["malformed"] += 1
            continue
        texts = [text for text in each.texts if isinstance(text, EncodedText)]
        if len(texts) < len(each.texts):
            if overlong_error is not None:
                first = next(text for text in each.texts if isinstance(text, OverlongError))
                raise DataError(f"{each.record.origin}: {first}{overlong_error}") from first
            counts["overlong"] += 1
        elif _are_same_tokens(texts):
            counts["same_tokens"] += 1
        else:
            if (reason := _check_steps(each.record, texts[0])) is not None:
                malformed.append(MalformedRecord(each.record.origin, reason))
                counts["malformed"] += 1
                continue
            counts["truncated"] += any(text.truncated for text in texts)
            counts["labels_cut_off"] += _count_cut_off(each.record, texts[0])
            yield each, texts


def _check_steps(record: Record, text: EncodedText) -> str | None:
    """Why the labels of a record's steps are not those of the steps that the contract finds.

    Raises:
        DataError: the contract has no steps at all, which is no fault of this record.
    """
    if not isinstance(record, Rating) or record.steps is None:
        return None
    if text.reads is None:
        raise DataError(
            f"{record.origin}: got labels of {len(record.steps)} turns or steps, wanted a model "
            "that has a reward for each: model.head.reads=turns or step_ends, for example"
        )
    found = len(text.reads) + text.lost
    if found != len(record.steps):
        return (
            f"got labels of {len(record.steps)} turns or steps, and the scoring contract finds "
            f"{found} in the text (model.head.reads, model.data.step_separator)"
        )
    return None


def _count_cut_off(record: Record, text: EncodedText) -> int:
    """Steps of a rated record that are cut off and have a label."""
    steps = record.steps if isinstance(record, Rating) else None
    return sum(any(label is not None for label in own) for own in (steps or ())[: text.lost])


def _are_same_tokens(encoded: Sequence[EncodedText]) -> bool:
    first, *others = (text.token_ids for text in encoded)
    return bool(others) and all(other == first for other in others)
