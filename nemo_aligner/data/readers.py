"""Read the records of a data file, in any of the formats.

``open_file`` finds the format of a file, and returns ``FileRules``, which turn lines into records,
and the file's blocks, which training tokenizes one by one. ``read_records`` and ``parse_file`` read
a whole file for evaluation and ``nemo-aligner data``. ``clean.py`` decides which records are
dropped.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from nemo_aligner.config.common import Contradicting, RecordKind
from nemo_aligner.config.evaluation import EvaluateDataConfig
from nemo_aligner.config.model import DataConfig
from nemo_aligner.contract.messages import (
    Conversation,
    Messages,
    Text,
    flatten_message,
    messages_of,
    question_of,
    with_messages,
)
from nemo_aligner.data.clean import MalformedRule, check_malformed, find_drop_reason, nothing_left
from nemo_aligner.data.files import AnyLine, Block, BlockFile, Line, count_swallowed
from nemo_aligner.data.formats import (
    check_lines_are_whole,
    choose_format,
    format_named,
    parse_lines,
)
from nemo_aligner.data.formats.base import Format, PairKeys, WantedLabels
from nemo_aligner.data.prompt_template import check_template, fill_template
from nemo_aligner.data.records import (
    Comparison,
    MalformedRecord,
    Record,
    prompt_key,
    verdict_keys,
    with_texts,
)
from nemo_aligner.data.tables import NamedColumns
from nemo_aligner.utils.errors import ConfigError, DataError
from nemo_aligner.utils.missing import describe_unreadable

ReaderSettings: TypeAlias = DataConfig | EvaluateDataConfig
"""A section of the settings that has the keys for reading files."""


@dataclass(frozen=True)
class ReaderConfig:
    """Rules by which files are read.

    Attributes:
        kind: kind of records that files must have; None accepts comparisons and ratings.
        format: ``auto``, or the name of a format in ``formats/``.
        attributes: label columns of ratings, in order; if empty, ratings have no labels.
        loss_mask_val: number that stands for a missing label, like null.
        pair_columns: label columns of comparisons, in order.
        pair_keys: names of the fields with prompt and replies of pairs; None for the usual names.
        prompts: text to put around prompts; None adds nothing.
        rule: whether malformed records are dropped or an error.
        ties: keep comparisons whose samples are all tied.
        neutral: label of a step that is rated neither right nor wrong; None has no label for it.
        contradicting: whether comparisons with opposite verdicts are kept or dropped.
        name: name of the file in its records and in errors about them; None means its path.
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
    contradicting: Contradicting = Contradicting.keep
    # Progress files of ``data label`` store the repr, and rewards do not depend on the name.
    name: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, settings: ReaderSettings, section: str, **fields: Any) -> ReaderConfig:
        """Build the rules from settings; ``fields`` are attributes that the settings do not decide.

        ``section`` is the prefix of the settings in errors, such as ``model.data``.

        Raises:
            ConfigError: a prompt file cannot be read, or ``check_template`` rejects a template.
        """
        return cls(
            format=settings.format,
            pair_keys=PairKeys.of(settings.prompt_key, settings.chosen_key, settings.rejected_key),
            prompts=PromptWrapping.of(settings, section),
            rule=MalformedRule(settings.malformed, settings.max_malformed, f"{section}."),
            neutral=settings.neutral_label,
            contradicting=settings.contradicting,
            **fields,
        )

    def columns_of(self, kind: RecordKind) -> tuple[str, ...]:
        """Return the names of the label columns of a kind of records."""
        return tuple(self.attributes if kind is RecordKind.rating else self.pair_columns)

    @property
    def named_columns(self) -> NamedColumns:
        """The columns of a CSV file that the settings name: fields of pairs, and labels."""
        keys = self.pair_keys
        texts = () if keys is None else (keys.prompt, keys.chosen, keys.rejected)
        return NamedColumns(texts, (*self.attributes, *self.pair_columns))

    def set_columns_of(self, kind: RecordKind) -> tuple[str, ...]:
        """Return the label columns that all records of a data set share.

        These are the columns of ``kind``. If ``self.kind`` is None, a data set may have both kinds
        of records, and has the columns of ratings.
        """
        return self.columns_of(kind if self.kind is not None else RecordKind.rating)


@dataclass(frozen=True)
class RecordFile:
    """The usable records of one file, and counts of the others.

    Attributes:
        path: the file, or ``ReaderConfig.name``.
        kind: kind of the records.
        format: name of the file's format.
        records: the records that were kept, in the order of the file.
        malformed: the malformed records, in the order of the file.
        columns: names of the label columns (see ``ReaderConfig.set_columns_of``).
        counts: ``read``, ``kept``, and the count of each reason in ``clean.py`` that occurred.
        unread: for each column that was not read, the number of lines that have it.
        lines: the lines that are a JSON object, in the order of the file; only if requested.
    """

    path: str
    kind: RecordKind
    format: str
    records: list[Any]
    columns: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict)
    malformed: list[MalformedRecord] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    lines: list[Line] = field(default_factory=list)


def read_records(
    path: str | Path, reading: ReaderConfig, *, with_lines: bool = False
) -> RecordFile:
    """Read all usable records of a file of comparisons or ratings; check that there are some.

    ``with_lines`` also keeps the lines that they were read from.

    Raises:
        ConfigError: ``reading`` names a format that does not exist.
        DataError: the file cannot be read, too many records are malformed, or none is usable.
    """
    file = parse_file(path, reading, with_lines=with_lines)
    check_malformed([file], reading.rule)
    if not file.records:
        raise nothing_left(file.path, file.counts)
    return file


@dataclass(frozen=True)
class FileRules:
    """Rules that turn the lines of one file into records, once its format is known.

    The rules are pickled and sent to the processes that tokenize blocks of the file.

    Attributes:
        path: the file, or ``ReaderConfig.name``, for records and errors.
        format: name of its format.
        kind: kind of its records.
        reading: the rules that the caller passed.
        contradicted: pairs of samples for which the file has opposite verdicts, as ``verdict_keys``
            with the lowest bit set to 0; records with such a pair are dropped.
    """

    path: str
    format: str
    kind: RecordKind
    reading: ReaderConfig
    contradicted: frozenset[int] = frozenset()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the label columns of the data set."""
        return self.reading.set_columns_of(self.kind)

    def records(
        self,
        lines: Sequence[AnyLine],
        counts: Counter[str],
        malformed: list[MalformedRecord],
        unread: Counter[str] | None = None,
    ) -> Iterator[Record]:
        """Yield the records in ``lines`` that are usable by their text, labels and ranks.

        Dropped records are counted by reason in ``counts``, and malformed ones are also added to
        ``malformed``. Lines with a column that is not read are counted in ``unread``.
        """
        reading = self.reading
        columns = reading.columns_of(self.kind)
        counts["rows_in_cells"] += count_swallowed(lines)
        chosen = format_named(self.format, reading.pair_keys)
        labels = WantedLabels(columns, reading.loss_mask_val, reading.neutral)
        for parsed in parse_lines(chosen, lines, self.path, labels, counts, unread):
            record = _wrap_prompts(parsed, reading.prompts)
            counts["read"] += 1
            if isinstance(record, MalformedRecord):
                counts["malformed"] += 1
                malformed.append(record)
                continue
            reason = find_drop_reason(record, bool(columns), reading.ties)
            if reason is None and self._is_contradicted(record):
                reason = "contradicting"
            if reason is not None:
                counts[reason] += 1
                continue
            if isinstance(record, Comparison) and _have_different_prompts(record):
                counts["different_prompts"] += 1
            yield record

    def _is_contradicted(self, record: Record) -> bool:
        return bool(self.contradicted) and not self.contradicted.isdisjoint(
            key & ~1 for key in verdict_keys(record)
        )


def open_file(path: str | Path, reading: ReaderConfig) -> tuple[FileRules, Iterator[Block]]:
    """Find the format of a file; return the rules that turn it into records, and its blocks.

    Raises:
        ConfigError: ``reading`` names a format that does not exist, or puts text around prompts
            and the file has only raw texts.
        DataError: the file cannot be read, or no format fits its records.
    """
    file = BlockFile(path, reading.named_columns)
    name = str(path) if reading.name is None else reading.name
    labels = (*reading.attributes, *reading.pair_columns)
    chosen = choose_format(
        reading.format,
        reading.kind,
        file.objects(),
        name,
        reading.pair_keys,
        labels,
        reading.rule.section,
    )
    # Check all lines first, because an error in the middle of the file could otherwise come after
    # hours of tokenizing.
    check_lines_are_whole(chosen, file.lines(), name)
    rules = FileRules(name, chosen.name, chosen.kind, reading)
    if reading.prompts is not None:
        _check_has_prompts(rules, file, chosen, reading.prompts)
    if reading.contradicting is Contradicting.drop and chosen.kind is RecordKind.comparison:
        rules = replace(rules, contradicted=_find_contradicted(rules, file, chosen))
    return rules, file.blocks(chosen.lines_per_record)


def _check_has_prompts(
    rules: FileRules, file: BlockFile, chosen: Format, prompts: PromptWrapping
) -> None:
    """Raise ConfigError if a file has only raw texts, around whose prompts no text can be put."""
    unwrapped = replace(rules, reading=replace(rules.reading, prompts=None))
    are_raw = (
        isinstance(record.texts[0], str)
        for block in file.blocks(chosen.lines_per_record)
        for record in unwrapped.records(block.lines(rules.path), Counter(), [])
    )
    # Reading ends at the first conversation, which is usually the first record.
    if next(are_raw, False) and all(are_raw):
        section = rules.reading.rule.section
        raise ConfigError(
            f"{section}{prompts.settings[0]}: {rules.path} has only raw texts (format "
            f"{chosen.name}), which are used as they are. Omit {' and '.join(prompts.settings)}, "
            "or give prompt and replies in fields of their own, in a format of conversations"
        )


def _find_contradicted(rules: FileRules, file: BlockFile, chosen: Format) -> frozenset[int]:
    """Read the file to find pairs of samples for which it has opposite verdicts.

    Returns:
        The ``verdict_keys`` of these pairs, with the lowest bit set to 0.
    """
    keys = array("Q")
    for block in file.blocks(chosen.lines_per_record):
        for record in rules.records(block.lines(rules.path), Counter(), []):
            keys.extend(verdict_keys(record))
    different = np.unique(np.frombuffer(keys, dtype=np.uint64)) if keys else np.zeros(0, np.uint64)
    # Opposite verdicts are neighbours, as their keys differ in the lowest bit.
    contradicted = different[1:][different[1:] ^ np.uint64(1) == different[:-1]]
    return frozenset((contradicted & ~np.uint64(1)).tolist())


def parse_file(path: str | Path, reading: ReaderConfig, *, with_lines: bool = False) -> RecordFile:
    """Read a file, without an error if many records are malformed or no usable one is left.

    ``with_lines`` also keeps the lines that the records were read from.

    Raises:
        ConfigError: ``reading`` names a format that does not exist.
        DataError: the file cannot be read, or no format fits its records.
    """
    rules, blocks = open_file(path, reading)
    counts: Counter[str] = Counter()
    file = RecordFile(rules.path, rules.kind, rules.format, [], rules.columns)
    for block in blocks:
        lines = block.lines(rules.path)
        file.records.extend(rules.records(lines, counts, file.malformed, file.unread))
        if with_lines:
            file.lines.extend(line for line in lines if isinstance(line, Line))
    file.counts.update(+counts, kept=len(file.records))
    return file


def _wrap_prompts(
    record: Record | MalformedRecord, prompts: PromptWrapping | None
) -> Record | MalformedRecord:
    if prompts is None or isinstance(record, MalformedRecord):
        return record
    try:
        return prompts.put_around(record)
    except DataError as error:
        return MalformedRecord(record.origin, str(error))


def _have_different_prompts(record: Comparison) -> bool:
    first, *following = map(question_of, record.texts)
    return any(prompt != first for prompt in following)


# Text around the prompts of a file: a system prompt, instructions, or a raw text.
#
# System prompt and instructions come from files, as for data sets of NVIDIA-NeMo/RL
# (``system_prompt_file``, ``prompt_file``). A template like OpenRLHF's ``input_template`` makes a
# raw text. Instructions and templates have the syntax of ``prompt_template.py``.


@dataclass(frozen=True)
class PromptWrapping:
    """Text to put around every conversation of a file; None adds nothing.

    Attributes:
        system: system prompt for conversations that have none.
        words: template that is put around the last user turn.
        raw: template for conversations of one user turn and a reply. The conversation becomes a raw
            text: the template with the user turn in it, followed by the reply.
    """

    system: str | None = None
    words: str | None = None
    raw: str | None = None

    @classmethod
    def of(cls, settings: ReaderSettings, section: str) -> PromptWrapping | None:
        """Read the prompts and templates that a section of the settings names; None if it has none.

        ``section`` is the prefix of the settings in errors; empty for options of a command.

        Raises:
            ConfigError: a file cannot be read, or ``check_template`` rejects a template.
        """
        prefix = section and f"{section}."
        system = _read_template(settings.system_prompt_file, f"{prefix}system_prompt_file")
        words = _read_template(settings.prompt_file, f"{prefix}prompt_file")
        templates = {"prompt_file": words, "input_template": settings.input_template}
        for key, template in templates.items():
            if template is not None:
                check_template(template, f"{prefix}{key}")
        if settings.input_template is not None and system is not None:
            raise ConfigError(
                f"{prefix}input_template: it makes a raw text, which has no system turn, so "
                f"{prefix}system_prompt_file cannot be used with it. Write the system prompt "
                "into the template"
            )
        wrapping = cls(system, words, settings.input_template)
        return None if wrapping == cls() else wrapping

    @property
    def settings(self) -> list[str]:
        """Names of the settings that put text around prompts, without their section."""
        texts = {
            "system_prompt_file": self.system,
            "prompt_file": self.words,
            "input_template": self.raw,
        }
        return [name for name, text in texts.items() if text is not None]

    def put_around(self, record: Record) -> Record:
        """Put the text around each conversation of a record; raw texts are not changed.

        Raises:
            DataError: a conversation has no user turn for the template ``words``, or has other
                turns than one user turn and the reply for the template ``raw``.
        """
        if self.raw is not None and not isinstance(record.texts[0], str):
            # The raw texts will not show where their prompt ends.
            record = replace(record, known_prompt=prompt_key(record))
        return with_texts(record, [*map(self._wrap, record.texts)])

    def _wrap(self, text: Text) -> Text:
        if isinstance(text, str):
            return text
        messages = messages_of(text)
        if self.words is not None:
            messages = _wrap_last_question(messages, self.words)
        if self.raw is not None:
            if isinstance(text, Conversation):
                raise DataError(
                    "input_template cannot render tools, documents or a principle, and this "
                    "conversation has one of them. Remove input_template, or remove them"
                )
            return _render_raw(messages, self.raw)
        if self.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system}, *messages]
        return with_messages(text, messages)


def _read_template(path: str | None, key: str) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {describe_unreadable(path, error)}") from error


def _wrap_last_question(conversation: Messages, words: str) -> Messages:
    roles = [turn["role"] for turn in conversation]
    if "user" not in roles:
        raise DataError(
            f"got turns of {', '.join(roles)}, but prompt_file needs a user turn to put its text "
            "around"
        )
    last = len(roles) - 1 - roles[::-1].index("user")
    question = {
        **conversation[last],
        "content": fill_template(words, flatten_message(conversation[last])),
    }
    return [*conversation[:last], question, *conversation[last + 1 :]]


def _render_raw(conversation: Messages, template: str) -> str:
    roles = [turn["role"] for turn in conversation]
    if roles != ["user", "assistant"]:
        raise DataError(
            f"got turns of {', '.join(roles)}, but input_template needs one user turn and the reply"
        )
    return fill_template(template, flatten_message(conversation[0])) + flatten_message(
        conversation[1]
    )
