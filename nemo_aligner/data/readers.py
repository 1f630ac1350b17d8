"""A data file to records, in any of the formats; what of them is dropped, ``clean.py`` decides."""

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
from nemo_aligner.data.clean import MalformedRule, check_malformed, nothing_left, why_drop
from nemo_aligner.data.files import AnyLine, Block, BlockFile, count_swallowed
from nemo_aligner.data.formats import (
    check_lines_are_whole,
    choose_format,
    format_named,
    parse_lines,
)
from nemo_aligner.data.formats.base import Format, PairKeys, WantedLabels
from nemo_aligner.data.records import Comparison, MalformedRecord, Rating, Record, verdict_keys
from nemo_aligner.utils.errors import ConfigError, DataError

ReaderSettings: TypeAlias = DataConfig | EvaluateDataConfig
"""A section of the settings that says how files are read."""


@dataclass(frozen=True)
class ReaderConfig:
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
        contradicting: what becomes of comparisons that say the opposite of each other.
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

    @classmethod
    def of(cls, settings: ReaderSettings, section: str, **others: Any) -> ReaderConfig:
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
            contradicting=settings.contradicting,
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
    those of ratings are. ``unread`` has the columns that nothing was read of, and how many lines
    have them.
    """

    path: str
    kind: RecordKind
    format: str
    records: list[Any]
    columns: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict)
    malformed: list[MalformedRecord] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)


def read_records(path: str | Path, how: ReaderConfig) -> RecordFile:
    """Read a file of comparisons or ratings.

    Raises:
        ConfigError: there is no format of that name.
        DataError: see the table of ``clean.py``; a file with nothing left to use is one, too.
    """
    file = parse_file(path, how)
    check_malformed([file], how.rule)
    if not file.records:
        raise nothing_left(file.path, file.counts)
    return file


@dataclass(frozen=True)
class FileRules:
    """Rules by which the lines of one file, of which the format is known, become records.

    Records with a verdict whose key is in ``contradicted``, or the opposite one, are dropped.
    """

    path: str
    format: str
    kind: RecordKind
    reading: ReaderConfig
    contradicted: frozenset[int] = frozenset()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the label columns; a label that a record lacks is missing."""
        return self.reading.set_columns_of(self.kind)

    def records(
        self,
        lines: Sequence[AnyLine],
        counts: Counter[str],
        malformed: list[MalformedRecord],
        unread: Counter[str] | None = None,
    ) -> Iterator[Record]:
        """Yield the records of a block that are not dropped for what their texts say.

        The others are counted, or put into ``malformed``; columns that are not read are counted in
        ``unread``.
        """
        how = self.reading
        columns = how.columns_of(self.kind)
        counts["rows_in_cells"] += count_swallowed(lines)
        chosen = format_named(self.format, how.pair_keys)
        wanted = WantedLabels(columns, how.loss_mask_val, how.neutral)
        parsed = parse_lines(chosen, lines, self.path, wanted, counts, unread)
        for each in parsed:
            record = _with_prompts(each, how.prompts)
            counts["read"] += 1
            if isinstance(record, MalformedRecord):
                counts["malformed"] += 1
                malformed.append(record)
                continue
            reason = why_drop(record, bool(columns), how.ties)
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


def open_file(path: str | Path, how: ReaderConfig) -> tuple[FileRules, Iterator[Block]]:
    """Find out a file's format; return the rules that make records of it, and its blocks.

    Raises:
        ConfigError: there is no format of that name.
        DataError: the file as a whole cannot be read; see the table of ``clean.py``.
    """
    file = BlockFile(path)
    labels = (*how.attributes, *how.pair_columns)
    chosen = choose_format(how.format, how.kind, file.objects(), str(path), how.pair_keys, labels)
    # Before any record: an error in the middle would come after hours of tokenizing.
    check_lines_are_whole(chosen, file.lines(), str(path))
    rules = FileRules(str(path), chosen.name, chosen.kind, how)
    if how.contradicting is Contradicting.drop and chosen.kind is RecordKind.comparison:
        rules = replace(rules, contradicted=_find_contradicted(rules, file, chosen))
    return rules, file.blocks(chosen.lines_per_record)


def _find_contradicted(rules: FileRules, file: BlockFile, chosen: Format) -> frozenset[int]:
    """Read the whole file once more than otherwise, for the verdicts that it has both ways."""
    keys = array("Q")
    for block in file.blocks(chosen.lines_per_record):
        for record in rules.records(block.lines(rules.path), Counter(), []):
            keys.extend(verdict_keys(record))
    different = np.unique(np.frombuffer(keys, dtype=np.uint64)) if keys else np.zeros(0, np.uint64)
    # Next to each other, as they differ in the lowest bit.
    both = different[1:][different[1:] ^ np.uint64(1) == different[:-1]]
    return frozenset((both & ~np.uint64(1)).tolist())


def parse_file(path: str | Path, how: ReaderConfig) -> RecordFile:
    """Read one file, whatever number of its records is malformed, or left to use.

    Raises:
        ConfigError: there is no format of that name.
        DataError: the file as a whole cannot be read; see the table of ``clean.py``.
    """
    rules, blocks = open_file(path, how)
    counts: Counter[str] = Counter()
    file = RecordFile(rules.path, rules.kind, rules.format, [], rules.columns)
    for block in blocks:
        lines = block.lines(rules.path)
        file.records.extend(rules.records(lines, counts, file.malformed, file.unread))
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
    asked = {**conversation[last], "content": _put(words, flatten_message(conversation[last]))}
    return [*conversation[:last], asked, *conversation[last + 1 :]]


def _as_raw(conversation: Messages, template: str) -> str:
    roles = [turn["role"] for turn in conversation]
    if roles != ["user", "assistant"]:
        raise DataError(
            f"got turns of {', '.join(roles)}, wanted one user turn and the reply, as "
            "input_template needs"
        )
    return _put(template, flatten_message(conversation[0])) + flatten_message(conversation[1])


def _put(template: str, prompt: str) -> str:
    # Not str.format: a template may have other braces.
    return template.replace(PLACE, prompt)
