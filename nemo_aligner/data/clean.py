"""Rules for records that cannot be used: which are errors, which are malformed, which are dropped.

Training, evaluation and the tools for data files all drop records by these rules.

=============================================================================  ====================
no file, not UTF-8, no JSON object in it, a broken JSON list, an odd number of DataError
comparison lines, no record that fits a format
malformed JSON on a line, a missing key, a value of the wrong type, a          malformed: DataError,
conversation that does not end with the reply, a label that is not finite, a   or dropped and
record of another format than the others                                       counted
chosen and rejected are the same (``identical``)                               dropped and counted
the reply is empty or shows nothing when printed (``empty_reply``)             dropped and counted
a rating without any label (``no_label``)                                      dropped and counted
a comparison has the opposite verdict of another (``contradicting``)           kept and counted,
                                                                               dropped if the
                                                                               settings say so
all samples are tied (``tied``)                                                dropped and counted,
                                                                               kept if the
                                                                               objective learns
                                                                               from ties
chosen and rejected answer different prompts (``different_prompts``)           kept and counted
a cell of a table has lines that look like rows (``rows_in_cells``)            kept and counted
=============================================================================  ====================

Further rules apply once a record is tokenized, in training and in evaluation:

=============================================================================  ====================
the contract rejects a sample, for example one with the template's markers     malformed, as above
a sample is longer than ``seq_length`` (``overlong``)                          dropped and counted,
                                                                               truncated and
                                                                               counted
                                                                               (``truncated``), or
                                                                               DataError
labels of steps that were truncated (``labels_cut_off``)                       counted
the number of step labels is not the number of steps                           malformed, as above
all samples have the same tokens (``same_tokens``)                             dropped and counted
=============================================================================  ====================

``MalformedRule`` decides whether malformed records are an error or dropped; all files are read
before the error is raised. Empty lines are skipped. A dropped record is not replaced.
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

# Malformed records, and the rule that lets a run continue in spite of them.

MOST_LISTED = 10
_LINES_NAMED = 5


class ReadFile(Protocol):
    """What ``check_malformed`` needs to know about a file that was read.

    ``counts`` maps reasons to numbers of records, and has at least the key ``read``. ``malformed``
    may have only the first malformed records; ``counts["malformed"]`` then has the number of all.
    """

    @property
    def path(self) -> str: ...

    @property
    def counts(self) -> Mapping[str, int]: ...

    @property
    def malformed(self) -> Sequence[MalformedRecord]: ...


@dataclass(frozen=True)
class MalformedRule:
    """Rule that decides whether malformed records are dropped or are an error.

    Attributes:
        action: whether to drop malformed records or to raise an error.
        max_fraction: largest fraction of a file's records that may be dropped as malformed.
        section: prefix of the names of settings for reading a file, in errors: ``model.data.`` in
            training, and empty for the options of a command.
    """

    action: Malformed = DataConfig.malformed
    max_fraction: float = DataConfig.max_malformed
    section: str = "model.data."

    def __post_init__(self) -> None:
        if not 0 <= self.max_fraction <= 1:
            raise ConfigError(
                f"{self.section}max_malformed: got {self.max_fraction}, wanted a number from 0 to 1"
            )

    def allows(self, file: ReadFile) -> bool:
        """True if a file has no more malformed records than the rule allows."""
        if self.action is Malformed.error:
            return not file.malformed
        return malformed_fraction(file) <= self.max_fraction


def check_malformed(files: Sequence[ReadFile], rule: MalformedRule) -> None:
    """Check that the rule allows the malformed records of all files.

    Raises:
        DataError: a file has too many malformed records. One error covers all such files, with the
            number of their malformed records and a list of the first ones.
    """
    # Key by path: a file that is both a training and a validation file is reported once.
    rejected = {file.path: file for file in files if not rule.allows(file)}
    if not rejected:
        return
    lines = []
    for file in rejected.values():
        listed = list_malformed(file.malformed, MOST_LISTED, _count_malformed(file))
        lines += [f"{file.path}: {_describe_malformed(file)}", *listed]
    raise DataError("\n".join([*lines, _advise(list(rejected.values()), rule)]))


def list_first(items: Sequence[object], limit: int) -> list[str]:
    """Render the first ``limit`` items as indented lines, one an item, for an error message.

    If there are more items, a last line says how many more.
    """
    lines = [f"  {item}" for item in items[:limit]]
    num_unlisted = len(items) - limit
    return [*lines, f"  and {num_unlisted} more"] if num_unlisted > 0 else lines


def list_malformed(
    records: Sequence[MalformedRecord], limit: int, total: int | None = None
) -> list[str]:
    """Write at most ``limit`` lines that list malformed records, and the number of the others.

    Records with the same reason share a line. ``total`` is the number of all malformed records, if
    ``records`` has only the first ones.
    """
    by_reason: dict[tuple[str, str], list[MalformedRecord]] = {}
    for record in records:
        by_reason.setdefault((record.origin.path, record.reason), []).append(record)
    listed = list(by_reason.values())[:limit]
    lines = [f"  {first}{_list_repeats(repeats)}" for first, *repeats in listed]
    num_unlisted = (len(records) if total is None else total) - sum(map(len, listed))
    return [*lines, f"  and {num_unlisted} more"] if num_unlisted > 0 else lines


def _list_repeats(repeats: Sequence[MalformedRecord]) -> str:
    if not repeats:
        return ""
    lines = ", ".join(str(record.origin.line) for record in repeats[:_LINES_NAMED])
    more = ", ..." if len(repeats) > _LINES_NAMED else ""
    return f" ({len(repeats)} more on line{'s' * (len(repeats) > 1)} {lines}{more})"


def malformed_fraction(file: ReadFile) -> float:
    """Compute the fraction of a file's records that are malformed, from 0 to 1."""
    return _count_malformed(file) / max(file.counts.get("read", 0), 1)


def _count_malformed(file: ReadFile) -> int:
    # ``file.malformed`` may have only the first malformed records, and then ``counts`` has the
    # number of all.
    return max(len(file.malformed), file.counts.get("malformed", 0))


def _describe_malformed(file: ReadFile) -> str:
    return (
        f"{_count_malformed(file)} of its {file.counts['read']} records "
        f"({malformed_fraction(file):.2%}) are malformed"
    )


def _advise(files: Sequence[ReadFile], rule: MalformedRule) -> str:
    settings = f"{rule.section}malformed", f"{rule.section}max_malformed"
    action, limit = settings if rule.section else ("--malformed", "--max-malformed")
    limit += f"={rule.max_fraction:g}"
    if rule.action is Malformed.drop:
        return f"{limit} allows {rule.max_fraction:.2%} of a file. Fix the data, or raise the limit"
    advice = f"fix the data, or drop these records with {action}=drop"
    if max(map(malformed_fraction, files)) > rule.max_fraction:
        return f"{advice} (but {limit} allows {rule.max_fraction:.2%} of a file)"
    return advice


# Rules that drop a record because of its text.


def find_drop_reason(record: Record, labelled: bool, ties: bool) -> str | None:
    """Return the reason for dropping a record because of its text, labels or ranks.

    The reasons are the names in the first table of this module, such as ``empty_reply``. None
    means that the record is kept.

    Args:
        labelled: True drops ratings without any label.
        ties: True keeps comparisons whose samples are all tied.
    """
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
    """Build the error about a file that has no usable record.

    ``counts`` maps each reason for dropping a record to the number of records; the message lists
    it.
    """
    advice = (
        ". Overlong samples have more tokens than model.data.seq_length: raise it, or set "
        "model.data.overlong=truncate_left"
    ) * bool(counts.get("overlong"))
    return DataError(f"{path}: it has no usable record: {_describe_counts(counts)}{advice}")


def _describe_counts(counts: Mapping[str, int]) -> str:
    parts = (f"{count} {name}" for name, count in counts.items() if count)
    return ", ".join(parts) or "it is empty"


# Rules that drop a record because of its tokens.


class EncodedRecord(NamedTuple):
    """A record with the tokens of its samples.

    Attributes:
        record: the record.
        texts: for each sample, its tokens, or an error if the sample is too long.
        reply_tokens: number of tokens of each sample's reply; empty if the caller did not count
            them.
        step_tokens: for each reply, the number of tokens of each of its steps; empty if the caller
            did not count them.
    """

    record: Record
    texts: Sequence[EncodedText | OverlongError]
    reply_tokens: Sequence[int] = ()
    step_tokens: Sequence[Sequence[int]] = ()


def encode_record(
    record: Record, encode: Callable[[Sequence[Text]], list[Item]]
) -> list[Item] | MalformedRecord:
    """Encode the samples of a record with ``encode``, which raises DataError to reject a sample.

    Returns:
        The encoded samples; or a ``MalformedRecord`` that names the sample that was rejected.

    Raises:
        DataError: the record has conversations, and there is no chat template to encode them.
    """
    try:
        return encode(record.texts)
    except NoTemplateError as error:
        raise DataError(f"{record.origin}: {error}") from error
    except DataError as error:
        # Encode the samples one by one, to find the one that was rejected.
        for name, text in zip(text_names(record), record.texts, strict=True):
            try:
                encode([text])
            except DataError as cause:
                # The error counts messages from the start of the prompt, so name both fields.
                location = name if isinstance(text, str) else f"prompt and {name}"
                return MalformedRecord(record.origin, f"{location}: {cause}")
        return MalformedRecord(record.origin, str(error))


def keep_usable(
    encoded: Iterable[EncodedRecord | MalformedRecord],
    counts: Counter[str],
    malformed: list[MalformedRecord],
    overlong_error: str | None,
) -> Iterator[tuple[EncodedRecord, list[EncodedText]]]:
    """Yield each record that is still usable after tokenization, with the tokens of its samples.

    Records are dropped for the reasons in the second table of this module, such as ``overlong``.
    They are counted by reason in ``counts``, and malformed ones are also added to ``malformed``.

    Args:
        overlong_error: end of the message of the error about a sample that is too long; None drops
            such a record instead of raising an error.

    Raises:
        DataError: a sample is too long, and ``overlong_error`` is not None.
    """
    for item in encoded:
        if isinstance(item, MalformedRecord):
            malformed.append(item)
            counts["malformed"] += 1
            continue
        texts = [text for text in item.texts if isinstance(text, EncodedText)]
        if len(texts) < len(item.texts):
            if overlong_error is not None:
                first = next(text for text in item.texts if isinstance(text, OverlongError))
                raise DataError(f"{item.record.origin}: {first}{overlong_error}") from first
            counts["overlong"] += 1
        elif _are_same_tokens(texts):
            counts["same_tokens"] += 1
        else:
            if (reason := _check_steps(item.record, texts[0])) is not None:
                malformed.append(MalformedRecord(item.record.origin, reason))
                counts["malformed"] += 1
                continue
            counts["truncated"] += any(text.truncated for text in texts)
            counts["labels_cut_off"] += _count_cut_off(item.record, texts[0])
            yield item, texts


def _check_steps(record: Record, text: EncodedText) -> str | None:
    """Return why a record's step labels do not fit the steps of its sample; None if they do.

    Raises:
        DataError: the record has step labels, but the contract does not score steps.
    """
    if not isinstance(record, Rating) or record.steps is None:
        return None
    if text.reads is None:
        raise DataError(
            f"{record.origin}: got labels of {len(record.steps)} turns or steps, but this model "
            "has one reward for the whole sample. Train a model that scores each of them, for "
            "example with model.head.reads=turns or step_ends"
        )
    steps = len(text.reads) + text.lost
    return None if steps == len(record.steps) else describe_step_counts(len(record.steps), steps)


def describe_step_counts(num_labelled: int, num_scored: int) -> str:
    """Return why a rating with labels of fewer or more steps than its sample has is malformed."""
    return (
        f"got labels of {num_labelled} turns or steps, and the scoring contract finds {num_scored} "
        "in the sample (model.head.reads, model.data.step_separator)"
    )


def _count_cut_off(record: Record, text: EncodedText) -> int:
    """Count the labelled steps of a rating that truncation removed; 0 for other records."""
    steps = record.steps if isinstance(record, Rating) else None
    return sum(any(label is not None for label in row) for row in (steps or ())[: text.lost])


def _are_same_tokens(encoded: Sequence[EncodedText]) -> bool:
    first, *following = (text.token_ids for text in encoded)
    return bool(following) and all(token_ids == first for token_ids in following)
