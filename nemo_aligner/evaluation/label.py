"""Label comparisons with the rewards of teachers: the data that a smaller model is distilled from.

``nemo-aligner data label`` calls ``label_file``. Every teacher scores all replies, part by part.
The rewards of a finished part are appended to a progress file next to the output, so that the same
command continues a run that was stopped. Rewards do not depend on the batch, so a continued run
writes the same file. A server without a model fingerprint scores all records again, because nothing
tells whether it still has the same model.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.checkpoint.nemo.reward_model import CheckpointDescription
from nemo_aligner.checkpoint.nemo.training_data import training_data_of
from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.evaluation import EvaluateConfig, SourceConfig, is_url
from nemo_aligner.contract.readout import one_reward
from nemo_aligner.data.formats import format_named
from nemo_aligner.data.formats.base import PairKeys
from nemo_aligner.data.formats.teacher import (
    CHOSEN_PROBABILITY,
    TEACHER,
    TEACHER_REWARDS,
    TEACHER_SPREAD,
)
from nemo_aligner.data.hub import local_file
from nemo_aligner.data.label_summary import SoftLabelSummary
from nemo_aligner.data.readers import ReaderConfig, RecordFile, read_records
from nemo_aligner.data.records import Comparison, Record, as_json
from nemo_aligner.data.token_cache import FileStat, check_unchanged, content_digest
from nemo_aligner.distributed.collectives import on_main, once_per_node
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.evaluation.pseudo_labels import check_orderable, order_by_teacher, rank_by_rewards
from nemo_aligner.evaluation.sources import (
    RewardSource,
    check_finite,
    list_used_keys,
    load_source,
    open_server,
    sizes_of_model,
)
from nemo_aligner.serving.client.scorers import ServerSettings
from nemo_aligner.utils.console import fit_row, say
from nemo_aligner.utils.errors import ConfigError, DataError, ServingError
from nemo_aligner.utils.processes import find_process
from nemo_aligner.utils.writing import check_outputs, write_lines

logger = logging.getLogger(__name__)
# Number of records that are scored at once, and whose rewards a stopped run keeps.
_PART = 512
_ATTEMPTS = 3  # to get the reward of a sample that is too slow
_OPTIONS = ServerSettings(
    server="--model",
    attribute_weights="--attribute-weights",
    tokenizer="--tokenizer",
    token="--token",
    timeout_s="--timeout",
)


@dataclass(frozen=True)
class Labelling:
    """Options of ``label_file``.

    Attributes:
        source: file of comparisons, or name of a data set on the hub.
        output: file to write.
        teachers: reward models, each a ``.nemo`` file, a Hugging Face folder or name, or the URL of
            a server.
        config: precision, layout, and facts about and access to servers; its model and data are
            not read.
        reading: rules by which the file is read.
        keep_confident: write only pairs for which the teachers give one of the replies at least
            this probability; None writes all.
        pseudo_labels: rank the replies of each record by the teachers' rewards.
    """

    source: str
    output: Path
    teachers: tuple[str, ...]
    config: EvaluateConfig = field(default_factory=EvaluateConfig)
    reading: ReaderConfig = field(default_factory=ReaderConfig)
    keep_confident: float | None = None
    pseudo_labels: bool = False


def label_file(options: Labelling) -> None:
    """Write the records of a file with the teachers' rewards, and print a report; on all ranks.

    Raises:
        AlignerError: a teacher, the file or an option cannot be used.
    """
    for teacher in filter(is_url, options.teachers):
        if find_process(os.environ).world_size > 1:
            raise ConfigError(
                f"--model: {teacher} is a server, which needs one process here. Omit --processes"
            )
    _check_source_used(options)
    path = once_per_node(lambda: local_file(options.source))
    _check_output(options, path)
    reading = replace(options.reading, kind=RecordKind.comparison, ties=True)
    previous = FileStat.of(path)
    file = read_records(path, reading, with_lines=True)
    rows = _read_rows(file, reading)
    if options.keep_confident is not None:
        _check_pairs(file)
    if options.pseudo_labels:
        check_orderable(file)
    digest = content_digest(path)
    check_unchanged(path, previous, "read")
    with ExitStack() as stack:
        layout = None
        if any(not is_url(teacher) for teacher in options.teachers):
            stack.enter_context(launch())
            layout = initialize_layout(**sizes_of_model(_with_model(options.config, "any")))
        progress = _Progress.open(options, file, digest)
        # All are inspected before one scores, and those whose work an error would lose come last.
        teachers = [_Teacher.inspect(name, options, digest) for name in options.teachers]
        order = sorted(range(len(teachers)), key=lambda n: not teachers[n].has_fingerprint)
        scored = {n: _score_with(teachers[n], options, file, layout, progress) for n in order}
        descriptions, rewards = zip(*(scored[n] for n in range(len(teachers))), strict=True)
        labelled = _Labelled(file, list(descriptions), np.stack(rewards))
        on_main(partial(_write, options, labelled, rows, progress))


def _check_output(options: Labelling, source: str) -> None:
    """Raise ConfigError if the output is the file to label, or is read for a teacher."""
    read = {"the file to label": source}
    for teacher in options.teachers:
        if not is_url(teacher):
            read[f"the file of --model={teacher}"] = teacher
    if options.config.source.tokenizer is not None:
        read["the file of --tokenizer"] = options.config.source.tokenizer
    check_outputs({"output": options.output}, {name: Path(path) for name, path in read.items()})


def _check_source_used(options: Labelling) -> None:
    """Raise ConfigError if an option about servers has no effect on any teacher."""
    servers = filter(is_url, options.teachers)
    used_keys = {key for url in servers for key in list_used_keys("server", url, _OPTIONS)}
    for field_ in fields(SourceConfig):
        value, default = (
            getattr(source, field_.name) for source in (options.config.source, SourceConfig())
        )
        if value != default and field_.name not in used_keys:
            option = "--" + field_.name.removesuffix("_s").replace("_", "-")
            raise ConfigError(
                f"{option}: got {value!r}, which has no effect on any --model. Omit it"
            )


# Reading: the objects of the records, to which fields are added.


def _read_rows(file: RecordFile, reading: ReaderConfig) -> list[list[dict[str, Any]]]:
    """Read the objects of each record: one, or two for the format of two lines.

    Raises:
        DataError: a line has several records, or a record has another soft label already.
    """
    size = format_named(file.format, reading.pair_keys).lines_per_record
    places = {line.number: place for place, line in enumerate(file.lines)}
    rows, previous = [], None
    for record in file.records:
        if record.origin == previous:
            raise DataError(
                f"{record.origin}: the format {file.format} has several comparisons on this line, "
                "whose rewards cannot be told apart. Write each comparison to its own line"
            )
        previous, place = record.origin, places[record.origin.line]
        # A row of a table may hold dates or bytes, which JSON does not have; ``raw`` is without.
        rows.append([json.loads(line.raw) for line in file.lines[place : place + size]])
        if rows[-1][0].get(CHOSEN_PROBABILITY) is not None:
            raise DataError(
                f"{record.origin}: it has a {CHOSEN_PROBABILITY!r}, and a record cannot have two "
                "soft labels. Remove the field"
            )
    return rows


def _check_pairs(file: RecordFile) -> None:
    for record in file.records:
        if len(record.texts) != 2:
            raise DataError(
                f"{record.origin}: it has {len(record.texts)} replies, and --keep-confident "
                "compares the two of a pair. Omit the option"
            )


# Scoring with one teacher.


def _with_model(config: EvaluateConfig, name: str) -> EvaluateConfig:
    # Without ``source``, which is about servers and would be rejected as having no effect.
    return replace(config, rm_model_file=name, hf_model=None, server=None, source=SourceConfig())


@dataclass(frozen=True)
class _Teacher:
    """What is known of a teacher before it scores.

    Attributes:
        name: its ``--model``.
        trained_on_input: True if it was trained on the file to label; None if that is unknown.
        has_fingerprint: False for a server without one, whose progress is not kept.
    """

    name: str
    trained_on_input: bool | None
    has_fingerprint: bool

    @classmethod
    def inspect(cls, name: str, options: Labelling, digest: str) -> _Teacher:
        """Read a checkpoint's description, or connect to a server; every rank calls this.

        Raises:
            AlignerError: the teacher cannot be opened.
        """
        if is_url(name):
            with open_server(name, options.config.source, settings=_OPTIONS) as source:
                return cls(name, None, _fingerprint_of(source) is not None)
        trained_on = training_data_of(CheckpointDescription.read(name).config)
        if trained_on is None:
            return cls(name, None, True)
        return cls(name, digest in [trained.get("sha256") for trained in trained_on], True)


def _fingerprint_of(source: RewardSource) -> str | None:
    return getattr(source.scorer, "fingerprint", None)


def _score_with(
    teacher: _Teacher,
    options: Labelling,
    file: RecordFile,
    layout: ParallelLayout | None,
    progress: _Progress,
) -> tuple[dict[str, Any], np.ndarray]:
    """Open a teacher and score all samples with it, except those that ``progress`` has.

    Returns:
        What is written about the teacher into each record, and its rewards ``[Q]`` float32, NaN for
        a sample that it rejects.
    """
    if is_url(teacher.name):
        with open_server(teacher.name, options.config.source, settings=_OPTIONS) as source:
            return _score_records(source, None, file, progress)
    assert layout is not None  # there is one if a teacher is a checkpoint
    source = load_source(_with_model(options.config, teacher.name), layout)
    return _score_records(source, teacher.trained_on_input, file, progress)


def _score_records(
    source: RewardSource, trained_on_input: bool | None, file: RecordFile, progress: _Progress
) -> tuple[dict[str, Any], np.ndarray]:
    fingerprint = _fingerprint_of(source)
    description = {
        "name": source.name,
        "model_fingerprint": fingerprint,
        "contract_hash": None if source.contract is None else source.contract.hash,
        "trained_on_input": trained_on_input,
    }
    # Without a fingerprint, earlier rewards may be those of another model at the same address.
    keeps_progress = fingerprint is not None
    parts = progress.rewards_of(description) if keeps_progress else []
    if not keeps_progress:
        say(
            f"note: {source.name} reports no model fingerprint, so if this run stops, the same "
            "command scores all records with it again"
        )
    done, total = min(len(parts) * _PART, len(file.records)), len(file.records)
    if done:
        say(f"{source.name}: {done} of {total} records were scored before")
    for start in range(done, total, _PART):
        rewards = _score_part(source, file.records[start : start + _PART], fingerprint)
        if keeps_progress:
            on_main(partial(progress.append, description, len(parts), rewards))
        parts.append(rewards)
        say(f"{source.name}: {min(start + _PART, total)} of {total} records")
    return description, np.concatenate(parts)


def _score_part(
    source: RewardSource, records: Sequence[Record], fingerprint: str | None
) -> np.ndarray:
    """Compute the rewards ``[Q]`` float32 of records, NaN for samples without one.

    A record with a sample that was too slow is scored again, but not for ever.
    """
    samples = [(record, text) for record in records for text in record.texts]
    rewards = np.full(len(samples), np.nan, dtype=np.float32)
    rows = list(range(len(samples)))
    for _ in range(_ATTEMPTS):
        scored = source.scorer.score_rows([samples[row][1] for row in rows])
        check_finite(scored.rewards, [samples[row][0].origin for row in rows], scored.errors)
        if scored.model_fingerprint not in (None, fingerprint):
            raise ServingError(
                f"{source.name}: the model was replaced while it labelled: the fingerprint was "
                f"{fingerprint}, and is {scored.model_fingerprint}. Run the command again"
            )
        rewards[rows] = one_reward(source.rewards_of(scored), source.weights)
        # All samples of such a record, because a judge may compare them.
        slow = {id(samples[rows[number]][0]) for number in scored.temporary}
        rows = [row for row in rows if id(samples[row][0]) in slow]
        if not rows:
            break
    return rewards


@dataclass(frozen=True)
class _Progress:
    """The file with the rewards of all finished parts, so that a stopped run continues.

    Its first line identifies the data; each other line has the rewards of a part by one teacher.

    Attributes:
        path: the file; it does not exist before the first part is finished.
        header: its first line.
        parts: JSON about the teacher, number of the part -> its rewards, as the file had them when
            it was opened.
    """

    path: Path
    header: str
    parts: dict[tuple[str, int], np.ndarray]

    @classmethod
    def open(cls, options: Labelling, file: RecordFile, digest: str) -> _Progress:
        """Read the file, or remove it if it belongs to other data; every rank calls this."""
        path = options.output.with_name(f".{options.output.name}.progress")
        identity = {
            "data": digest,
            "records": [record.origin.line for record in file.records],
            "reading": repr(options.reading),
        }
        header = json.dumps({"part": _PART, **identity})
        return cls(path, header, on_main(lambda: _read_progress(path, header)))

    def rewards_of(self, description: dict[str, Any]) -> list[np.ndarray]:
        """Return the rewards of a teacher's first parts, up to the first one that is missing."""
        parts: list[np.ndarray] = []
        key = json.dumps(description)
        while (key, len(parts)) in self.parts:
            parts.append(self.parts[key, len(parts)])
        return parts

    def append(self, description: dict[str, Any], part: int, rewards: np.ndarray) -> None:
        """Add a finished part to the file, on the first rank."""
        row = {"teacher": json.dumps(description), "part": part, "rewards": _shortest(rewards)}
        with self.path.open("a", encoding="utf-8") as file:
            if file.tell() == 0:
                file.write(self.header + "\n")
            file.write(json.dumps(row) + "\n")


def _read_progress(path: Path, header: str) -> dict[tuple[str, int], np.ndarray]:
    """Read the parts of the file, up to the first line that a crash has damaged."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = text.split("\n")
    parts, valid_lines = {}, [header]
    # The last piece is what follows the last line end: nothing, or a line that was not finished.
    for number, line in enumerate(lines[1:-1] if lines[0] == header else [], start=2):
        try:
            row = json.loads(line)
            rewards = [np.nan if reward is None else reward for reward in row["rewards"]]
            parts[row["teacher"], row["part"]] = np.array(rewards, dtype=np.float32)
        except (ValueError, KeyError, TypeError):
            logger.warning(
                "%s:%d: the line is damaged. The parts from there on are scored again", path, number
            )
            break
        valid_lines.append(line)
    # Written even without parts, so that a folder that cannot be written is an error at once.
    write_lines(path, valid_lines)
    if not parts:
        path.unlink()
    return parts


def _shortest(rewards: np.ndarray) -> list[float | None]:
    """Convert float32 numbers to the shortest ones that are read as the same; NaN becomes None."""
    return [None if np.isnan(reward) else float(str(reward)) for reward in rewards]


# Writing the labelled records.


@dataclass(frozen=True)
class _Labelled:
    """The records of a file with the rewards of M teachers.

    Attributes:
        file: the records, with Q samples.
        descriptions: M descriptions of teachers.
        rewards: ``[M, Q]`` float32; NaN for a sample that the teacher rejects.
    """

    file: RecordFile
    descriptions: list[dict[str, Any]]
    rewards: np.ndarray

    def by_record(self) -> Iterator[tuple[Comparison, np.ndarray]]:
        """Yield each record, and its rewards ``[M, K]`` in float64."""
        end = 0
        for record in self.file.records:
            start, end = end, end + len(record.texts)
            yield record, self.rewards[:, start:end].astype(np.float64)


def _write(
    options: Labelling,
    labelled: _Labelled,
    rows: Sequence[list[dict[str, Any]]],
    progress: _Progress,
) -> None:
    """Write the output, print the report, and remove the progress file; on the first rank.

    Raises:
        DataError: no record is left to write.
    """
    lines: list[str] = []
    labels: list[Comparison] = []
    counts = {"not scored": 0, "not confident": 0, "reordered": 0}
    for (record, rewards), objects in zip(labelled.by_record(), rows, strict=True):
        if np.isnan(rewards).any():
            counts["not scored"] += 1
            continue
        if options.keep_confident is not None and confidence(rewards) < options.keep_confident:
            counts["not confident"] += 1
            continue
        first = _label(objects[0], record, rewards, labelled.descriptions)
        if options.pseudo_labels:
            keys = options.reading.pair_keys or PairKeys()
            first, is_reordered = order_by_teacher(first, labelled.file.format, keys)
            counts["reordered"] += is_reordered
        means = rewards.mean(axis=0).tolist()
        ranks = rank_by_rewards(means) if options.pseudo_labels else record.ranks
        labels.append(replace(record, ranks=ranks, teacher_rewards=tuple(means)))
        lines += map(as_json, (first, *objects[1:]))
    if not lines:
        raise DataError(f"{labelled.file.path}: no record is left to write: {counts}")
    written = write_lines(options.output, lines)
    progress.path.unlink(missing_ok=True)
    say(_render_report(labelled, labels, counts, written))


def _label(
    row: dict[str, Any], record: Comparison, rewards: np.ndarray, descriptions: list[dict[str, Any]]
) -> dict[str, Any]:
    """Add the teachers' opinion to the object of a record, whose rewards are ``[M, K]``.

    The rewards are written in the record's order, as the mean over the teachers, in float32.
    """
    in_order = rewards[:, np.argsort(record.positions_in_record)]
    means = in_order.mean(axis=0).astype(np.float32)
    labelled = {**row, TEACHER_REWARDS: _shortest(means), TEACHER: descriptions}
    labelled.pop(TEACHER_SPREAD, None)
    if len(rewards) > 1 and len(record.texts) == 2:
        labelled[TEACHER_SPREAD] = _spread(rewards)
    return labelled


def _spread(rewards: np.ndarray) -> float:
    """Compute the standard deviation of a pair's margin over M teachers, from ``[M, 2]``."""
    return float(np.std(rewards[:, 0] - rewards[:, 1]))


def confidence(rewards: np.ndarray) -> float:
    """Compute how sure M teachers are of a pair, from its rewards ``[M, 2]``.

    It is the probability, from 0.5 on, that they give the better of the two replies, with their
    mean margin shrunk towards 0 by its standard deviation over the teachers.
    """
    margin = abs(float(np.mean(rewards[:, 0] - rewards[:, 1])))
    return float(1 / (1 + np.exp(-max(0.0, margin - _spread(rewards)))))


def _render_report(
    labelled: _Labelled,
    labels: Sequence[Comparison],
    counts: dict[str, int],
    written: str,
) -> str:
    """Render what was labelled, how soft the labels are, and how often teachers agree with them."""
    dropped = {name: count for name, count in labelled.file.counts.items() if name != "kept"}
    outcomes = {**dropped, **counts, "written": len(labels)}
    lines = [f"{labelled.file.path} ({labelled.file.format}) -> {written}"]
    for description in labelled.descriptions:
        name, fingerprint = description["name"], description["model_fingerprint"]
        lines.append(fit_row("  teacher", f"{name}, fingerprint {fingerprint}", 28))
    parts = [f"{count} {name}" for name, count in outcomes.items() if count]
    lines.append(fit_row("  records", ", ".join(parts), 28))
    summary = SoftLabelSummary.of_records(labels)
    assert summary is not None  # every record that is written has rewards
    lines += [fit_row(f"  {name}", value, 28) for name, value in summary.render_rows()]
    for description in labelled.descriptions:
        name = description["name"]
        if description["trained_on_input"]:
            lines.append(
                f"warning: {name} was trained on this very file, so it remembers its "
                "labels. Label records that it has not seen, such as those of another fold."
            )
        elif description["trained_on_input"] is None:
            lines.append(
                f"note: {name} does not say what it was trained on. If it has seen these "
                "records, it remembers their labels."
            )
    return "\n".join(lines)
