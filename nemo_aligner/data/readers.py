"""A data file to records, in any of the formats.

What is an error, what is malformed, and what is a counted drop:

=============================================================================  ====================
no file, no UTF-8, no JSON object in it, a broken JSON list, an odd number of  DataError
comparison lines, no record that fits a format
malformed JSON on a line, a missing key, a value of the wrong type, a          malformed: DataError,
conversation that does not end with the reply, a label that is not finite, a   or dropped and
record of another format than the others                                       counted
chosen and rejected are the same (``identical``)                               dropped and counted
the reply is empty or blank (``empty_reply``)                                  dropped and counted
a rating without any label (``no_label``)                                      dropped and counted
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from nemo_aligner.config.common import Malformed, RecordKind
from nemo_aligner.config.model import DataConfig
from nemo_aligner.contract.contract import EncodedText, NoTemplateError, OverlongError
from nemo_aligner.contract.messages import (
    Conversation,
    Messages,
    Text,
    messages_of,
    question_of,
    reply_of,
    said,
    with_messages,
)
from nemo_aligner.data.files import AnyLine, Block, BlockFile, count_swallowed
from nemo_aligner.data.formats import (
    check_lines_are_whole,
    choose_format,
    format_named,
    parse_lines,
)
from nemo_aligner.data.formats.base import PairKeys, WantedLabels
from nemo_aligner.data.records import Comparison, MalformedRecord, Rating, Record, text_names
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


def list_first(items: Sequence[object], most: int, total: int | None = None) -> list[str]:
    """A line for each of the first ``most`` items, and how many more there are.

    ``total`` is their number where not all of them are in ``items``.
    """
    lines = [f"  {item}" for item in items[:most]]
    rest = (len(items) if total is None else total) - most
    return [*lines, f"  and {rest} more"] if rest > 0 else lines


def list_malformed(
    records: Sequence[MalformedRecord], most: int, total: int | None = None
) -> list[str]:
    """``list_first`` of malformed records, those of a file with the same reason on one line."""
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


# Text around the prompts of a file: a system prompt, more words, or a raw text.
#
# A system prompt and a prompt's own words come from files, as NVIDIA-NeMo/RL's data sets have them
# (``system_prompt_file``, ``prompt_file``); a raw text is written by OpenRLHF's ``input_template``.
# In the last two ``{}`` is where the prompt goes.

PLACE = "{}"


@dataclass(frozen=True)
class PromptWrapping:
    """Text to put around every conversation of a file; None adds nothing.

    Attributes:
        system: said by the system, first; a conversation that has a system prompt keeps its own.
        words: around the last user turn.
        raw: around the one user turn of a conversation, which becomes a raw text: this and then
            the reply.
    """

    system: str | None = None
    words: str | None = None
    raw: str | None = None

    @classmethod
    def of(cls, settings: ReaderSettings, section: str) -> PromptWrapping | None:
        """Read a section of the settings; None where nothing is set.

        Raises:
            ConfigError: a file cannot be read, or the prompt has no place, or two, in a template.
        """
        files = {"system_prompt_file": settings.system_prompt_file}
        files["prompt_file"] = settings.prompt_file
        system, words = (_read(path, f"{section}.{name}") for name, path in files.items())
        _check_place(words, f"{section}.prompt_file")
        _check_place(settings.input_template, f"{section}.input_template")
        if settings.input_template is not None and system is not None:
            raise ConfigError(
                f"{section}.input_template: a raw text has no turns, so the one of "
                f"{section}.system_prompt_file cannot be put in front; write it into the template"
            )
        found = cls(system, words, settings.input_template)
        return None if found == cls() else found

    def put_around(self, record: Record) -> Record:
        """``record`` with what its conversations get; raw texts stay as they are.

        Raises:
            DataError: a conversation has no user turn to write anything around, or, where it is to
                become a raw text, something else than one user turn and the reply.
        """
        if isinstance(record, Rating):
            return replace(record, response=self._write(record.response))
        return replace(record, texts=tuple(map(self._write, record.texts)))

    def _write(self, text: Text) -> Text:
        if isinstance(text, str):
            return text
        messages = messages_of(text)
        if self.words is not None:
            messages = _around_last_question(messages, self.words)
        if self.raw is not None:
            if isinstance(text, Conversation):
                raise DataError(
                    "got tools or documents, wanted none, as input_template cannot write them"
                )
            return _as_raw(messages, self.raw)
        if self.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system}, *messages]
        return with_messages(text, messages)


def _read(path: str | None, key: str) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from error


def _check_place(template: str | None, key: str) -> None:
    if template is not None and template.count(PLACE) != 1:
        raise ConfigError(
            f"{key}: got {PLACE} {template.count(PLACE)} times in {template!r:.80}, wanted it "
            "once, where the prompt goes"
        )


def _around_last_question(conversation: Messages, words: str) -> Messages:
    roles = [turn["role"] for turn in conversation]
    if "user" not in roles:
        raise DataError(f"got turns of {', '.join(roles)}, wanted a user turn for prompt_file")
    last = len(roles) - 1 - roles[::-1].index("user")
    asked = {**conversation[last], "content": _put(words, said(conversation[last]))}
    return [*conversation[:last], asked, *conversation[last + 1 :]]


def _as_raw(conversation: Messages, template: str) -> str:
    roles = [turn["role"] for turn in conversation]
    if roles != ["user", "assistant"]:
        raise DataError(
            f"got turns of {', '.join(roles)}, wanted one user turn and the reply, as "
            "input_template needs"
        )
    return _put(template, said(conversation[0])) + said(conversation[1])


def _put(template: str, prompt: str) -> str:
    # Not str.format: a template may have other braces.
    return template.replace(PLACE, prompt)


class ReaderSettings(Protocol):
    """A section of the settings that says how files are read."""

    format: str
    prompt_key: str | None
    chosen_key: str | None
    rejected_key: str | None
    system_prompt_file: str | None
    prompt_file: str | None
    input_template: str | None
    malformed: Malformed
    max_malformed: float
    neutral_label: float | None


@dataclass(frozen=True)
class Reading:
    """Rules by which files are read.

    Attributes:
        kind: what their records are; None takes either.
        format: ``auto``, or a name of ``formats/``.
        attributes: the labels of ratings, in order; without them ratings come with no labels.
        loss_mask_val: the number that, like null, stands for a missing label.
        pair_columns: the labels of comparisons, in order.
        pair_keys: which fields of pairs have their texts, where they have other names.
        prompts: what is put around them.
        rule: what becomes of malformed records.
        ties: keep comparisons whose completions are all tied.
        neutral: label of a step that is rated as neither right nor wrong; None leaves it out.
    """

    kind: RecordKind | None = None
    format: str = "auto"
    attributes: Sequence[str] = ()
    loss_mask_val: float | None = None
    pair_columns: Sequence[str] = ()
    pair_keys: PairKeys | None = None
    prompts: PromptWrapping | None = None
    rule: MalformedRule = field(default_factory=MalformedRule)
    ties: bool = False
    neutral: float | None = 1.0

    @classmethod
    def of(cls, settings: ReaderSettings, section: str, **others: Any) -> Reading:
        """The rules of a ``section`` of the settings; ``others`` are what it does not say.

        Raises:
            ConfigError: see ``PromptWrapping.of``.
        """
        return cls(
            format=settings.format,
            pair_keys=PairKeys.of(settings.prompt_key, settings.chosen_key, settings.rejected_key),
            prompts=PromptWrapping.of(settings, section),
            rule=MalformedRule(settings.malformed, settings.max_malformed, f"{section}."),
            neutral=settings.neutral_label,
            **others,
        )

    def columns_of(self, kind: RecordKind) -> tuple[str, ...]:
        """Names of the label columns of such records."""
        return tuple(self.attributes if kind is RecordKind.rating else self.pair_columns)

    def set_columns_of(self, kind: RecordKind) -> tuple[str, ...]:
        """The same of a data set that they may be in beside others, where both kinds are taken."""
        return self.columns_of(kind if self.kind is not None else RecordKind.rating)


@dataclass(frozen=True)
class RecordFile:
    """The records of one file; ``counts`` has ``read``, ``kept`` and every reason that occurred.

    ``columns`` are what the records' labels are called; where files of both kinds are taken, what
    those of ratings are.
    """

    path: str
    kind: RecordKind
    format: str
    records: list[Any]
    columns: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict)
    malformed: list[MalformedRecord] = field(default_factory=list)


def read_files(paths: Sequence[str | Path], how: Reading) -> list[RecordFile]:
    """Read files of comparisons or ratings.

    Raises:
        ConfigError: there is no format of that name.
        DataError: see the table above; a file with nothing left to use is one, too.
    """
    files = [parse_file(path, how) for path in paths]
    check_malformed(files, how.rule)
    for file in files:
        if not file.records:
            raise nothing_left(file.path, file.counts)
    return files


def read_records(path: str | Path, how: Reading) -> RecordFile:
    """``read_files`` for one file."""
    return read_files([path], how)[0]


@dataclass(frozen=True)
class FileRules:
    """Rules by which the lines of one file, of which the format is known, become records."""

    path: str
    format: str
    kind: RecordKind
    reading: Reading

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the label columns; a label that a record lacks is missing."""
        return self.reading.set_columns_of(self.kind)

    def records(
        self, lines: Sequence[AnyLine], counts: Counter[str], malformed: list[MalformedRecord]
    ) -> Iterator[Record]:
        """Yield the records of a block that are not dropped for what their texts say.

        The others are counted, or put into ``malformed``.
        """
        how = self.reading
        columns = how.columns_of(self.kind)
        counts["rows_in_cells"] += count_swallowed(lines)
        chosen = format_named(self.format, how.pair_keys)
        parsed = parse_lines(
            chosen, lines, self.path, WantedLabels(columns, how.loss_mask_val, how.neutral)
        )
        for each in parsed:
            record = _with_prompts(each, how.prompts)
            counts["read"] += 1
            if isinstance(record, MalformedRecord):
                counts["malformed"] += 1
                malformed.append(record)
                continue
            reason = _why_drop(record, bool(columns), how.ties)
            if reason is not None:
                counts[reason] += 1
                continue
            if isinstance(record, Comparison) and _have_different_prompts(record):
                counts["different_prompts"] += 1
            yield record


def open_file(path: str | Path, how: Reading) -> tuple[FileRules, Iterator[Block]]:
    """Find out a file's format; return the rules that make records of it, and its blocks.

    Raises:
        ConfigError: there is no format of that name.
        DataError: the file as a whole cannot be read; see the table above.
    """
    file = BlockFile(path)
    chosen = choose_format(how.format, how.kind, file.objects(), str(path), how.pair_keys)
    check_lines_are_whole(chosen, file.lines(), str(path))
    rules = FileRules(str(path), chosen.name, chosen.kind, how)
    return rules, file.blocks(chosen.lines_per_record)


def parse_file(path: str | Path, how: Reading) -> RecordFile:
    """Read one file, whatever number of its records is malformed, or left to use.

    Raises:
        ConfigError: there is no format of that name.
        DataError: the file as a whole cannot be read; see the table above.
    """
    rules, blocks = open_file(path, how)
    counts: Counter[str] = Counter()
    file = RecordFile(rules.path, rules.kind, rules.format, [], rules.columns)
    for block in blocks:
        file.records.extend(rules.records(block.lines(rules.path), counts, file.malformed))
    file.counts.update(+counts, kept=len(file.records))
    return file


def _with_prompts(
    record: Record | MalformedRecord, prompts: PromptWrapping | None
) -> Record | MalformedRecord:
    if prompts is None or isinstance(record, MalformedRecord):
        return record
    try:
        return prompts.put_around(record)
    except DataError as error:
        return MalformedRecord(record.origin, str(error))


def _have_different_prompts(record: Comparison) -> bool:
    first, *others = map(question_of, record.texts)
    return any(other != first for other in others)


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


def _why_drop(record: Record, labelled: bool, ties: bool) -> str | None:
    if any(not reply_of(text).strip() for text in record.texts):
        return "empty_reply"
    if isinstance(record, Comparison):
        if all(text == record.texts[0] for text in record.texts):
            return "identical"
        return "tied" if record.is_tied and not ties else None
    rows = [record.labels] if record.steps is None else record.steps
    if labelled and all(label is None for row in rows for label in row):
        return "no_label"
    return None


# What the tokens of a record show.


class EncodedRecord(NamedTuple):
    """A record with the tokens of its texts; for one that is too long, the error that says so.

    ``reply_tokens`` are the lengths of all replies, where somebody needs them.
    """

    record: Record
    texts: Sequence[EncodedText | OverlongError]
    reply_tokens: Sequence[int] = ()


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
