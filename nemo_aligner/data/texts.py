"""Samples to score from a command line or a file, each with a short label to print.

``nemo-aligner score`` and the quickstart use this module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_aligner.contract.messages import (
    as_json,
    flatten_message,
    messages_of,
    principle_of,
    prompt_of,
    read_text,
    reply_of,
    with_principle,
    with_tools,
)
from nemo_aligner.data.clean import MOST_LISTED, list_malformed
from nemo_aligner.data.files import AnyLine, BadLine, Line, read_lines
from nemo_aligner.data.formats import FORMATS, choose_format, format_named, parse_lines
from nemo_aligner.data.formats.base import Fields, Format, PairKeys, WantedLabels, check_text
from nemo_aligner.data.formats.pairs import CHAT_PAIRS, COMPARISON_TEXT
from nemo_aligner.data.formats.prompts import with_prompt_columns
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.data.records import PAIR_COLUMNS, MalformedRecord, Origin, Rating, text_names
from nemo_aligner.utils.errors import ConfigError, DataError, shown

# Largest length of a sample's label on the console, in characters (see ``label_of``).
_LABEL_LENGTH = 80
_PLAIN = ("text", "messages")
_READING = ReaderConfig()


def labelled_conversation(option: str) -> tuple[str, Any]:
    """Parse the JSON of the option ``--conversation``.

    Returns:
        A label to print, which is the conversation on one short line; and the conversation.

    Raises:
        ConfigError: the option is not JSON, or not a conversation that ends with a reply.
    """
    try:
        messages = json.loads(option)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--conversation: got {option[:60]!r}, wanted JSON: {error}") from error
    if isinstance(messages, str):
        raise ConfigError(f"--conversation: got {shown(messages)}, wanted a list of messages")
    try:
        conversation = read_text(messages)
    except DataError as error:
        raise ConfigError(f"--conversation: {error}") from error
    return label_of(conversation), conversation


def labelled_texts(path: str | Path, reading: ReaderConfig = _READING) -> Iterator[tuple[str, Any]]:
    """Yield (label, sample) for each sample of a file; the label is one line to print.

    A line is ``{"text": ...}``, ``{"messages": [...]}``, or a record of preference data, which is
    read as in training and evaluation and has several samples. A pair with only ``chosen`` or only
    ``rejected`` has one sample; so has a ``prompt`` with a ``completion``, as TRL logs them. A
    ``text`` field next to a pair repeats the pair, and is not read.
    No sample is dropped.

    Raises:
        ConfigError: ``reading`` names a format that does not exist.
        DataError: the file cannot be read, or has lines without a sample, which are listed.
    """
    keys = reading.pair_keys or PairKeys()
    is_auto = reading.pair_keys is None and reading.format == "auto"
    lines_read = read_lines(path, reading.named_columns)
    read = (_join_completion(line) if is_auto else line for line in lines_read)
    lines = [_complete_pair(line, keys) for line in read]
    _check_keys_occur(keys, lines, str(path))
    record_lines = [
        line for line, _ in lines if isinstance(line, Line) and not _is_plain(line.value, reading)
    ]
    chosen = None
    if record_lines:
        section = reading.rule.section
        try:
            chosen = choose_format(
                reading.format, None, record_lines, str(path), reading.pair_keys, section=section
            )
        except DataError as error:
            raise DataError(
                f'{error}. A line to score may also be {{"text": ...}} or {{"messages": [...]}}'
            ) from error
    texts: list[tuple[str, Any]] = []
    malformed: list[MalformedRecord] = []
    for line, side in lines:
        try:
            if chosen is None or isinstance(line, BadLine) or _is_plain(line.value, reading):
                texts += _plain_texts(line)
            else:
                texts += _record_texts(line, side, chosen, str(path))
        except DataError as error:
            malformed.append(MalformedRecord(Origin(str(path), line.number), str(error)))
    if malformed:
        heading = f"{path}: {len(malformed)} of its {len(lines)} lines are malformed"
        raise DataError("\n".join([heading, *list_malformed(malformed, MOST_LISTED)]))
    yield from texts


def label_of(text: Any) -> str:
    """Render a sample as one line of at most 80 characters; long ones lose their middle."""
    if not isinstance(text, str):
        principle = principle_of(text)
        principles = [] if principle is None else [f"principle: {principle}"]
        text = " | ".join([*map(flatten_message, messages_of(text)), *principles])
    line = " ".join(text.split())
    return line if len(line) <= _LABEL_LENGTH else f"{line[:38]} ... {line[-37:]}"


def _is_plain(value: dict[str, Any], reading: ReaderConfig) -> bool:
    """True if a line has a ``text`` or ``messages`` to score, and fits no preference format."""
    if reading.pair_keys is not None:
        formats = [format_named(CHAT_PAIRS.name, reading.pair_keys)]
    else:
        # Exclude COMPARISON_TEXT: its records are two lines with a ``text`` each, so it would match
        # any line with a text to score.
        formats = [fmt for fmt in FORMATS.values() if fmt is not COMPARISON_TEXT]
        if ":" in reading.format:
            formats.append(format_named(reading.format, None))
    return any(key in value for key in _PLAIN) and not any(fmt.matches(value) for fmt in formats)


def _join_completion(line: AnyLine) -> AnyLine:
    """Replace the prompt and completion of a line that TRL has logged by the sample they make.

    TRL's trainers write such lines with ``log_completions=True``. Both are strings or lists of
    messages, and are joined as in the reward function (``integrations/trl.py``). Any other line,
    such as one of TRL's unpaired preferences, which has a ``label``, is returned unchanged.
    """
    if isinstance(line, BadLine) or not line.value.keys() >= {"prompt", "completion"}:
        return line
    if any(fmt.matches(line.value) for fmt in FORMATS.values()):
        return line
    prompt, completion = line.value["prompt"], line.value["completion"]
    kinds = [type(prompt), type(completion)]
    if kinds not in ([str, str], [list, list]):
        names = " and ".join(kind.__name__ for kind in kinds)
        reason = f"prompt and completion: got {names}, wanted strings, or lists of messages"
        return BadLine(line.number, line.raw, reason)
    tools = {key: value for key, value in line.value.items() if key == "tools"}
    key = "text" if isinstance(prompt, str) else "messages"
    return replace(line, value={**tools, key: prompt + completion})


def _complete_pair(line: AnyLine, keys: PairKeys) -> tuple[AnyLine, str | None]:
    """Complete a pair that has only a chosen or only a rejected reply, by copying the reply.

    The formats of pairs need both replies.

    Returns:
        The line, and the side that had the reply, ``chosen`` or ``rejected``. Any other line is
        returned unchanged, with None.
    """
    sides = (keys.chosen, keys.rejected)
    present = [key for key in sides if isinstance(line, Line) and key in line.value]
    if isinstance(line, BadLine) or len(present) != 1:
        return line, None
    both_sides = dict.fromkeys(sides, line.value[present[0]])
    side = PAIR_COLUMNS[sides.index(present[0])]
    return replace(line, value={**line.value, **both_sides}), side


def _check_keys_occur(keys: PairKeys, lines: list[tuple[AnyLine, str | None]], path: str) -> None:
    """Raise DataError if no line has a reply under a name that the user has chosen.

    Otherwise a misspelt name would leave out one reply of each pair without a word.
    """
    usual = PairKeys()
    sides = [alone for line, alone in lines if isinstance(line, Line)]
    for side, flag in (("chosen", "--chosen-key"), ("rejected", "--rejected-key")):
        key = getattr(keys, side)
        other = next(name for name in PAIR_COLUMNS if name != side)
        if key != getattr(usual, side) and sides and all(alone == other for alone in sides):
            raise DataError(f"{path}: no record has the field {key!r} of {flag}")


def _plain_texts(line: AnyLine) -> list[tuple[str, Any]]:
    if isinstance(line, BadLine):
        raise DataError(line.reason)
    value = line.value
    fields, origin = Fields(value), Origin("", line.number)
    texts = []
    for key in (key for key in _PLAIN if key in value):
        record = Rating(check_text(value[key], key), (), origin)
        # Put ``system`` and ``history`` columns into the prompt, as for preference data.
        texts.append(_add_tools(with_prompt_columns(record, fields, ()).texts[0], value))
    return [(label_of(text), text) for text in texts]


def _add_tools(text: Any, value: dict[str, Any]) -> Any:
    if isinstance(text, str):
        return text
    text = with_tools(text, value.get("tools"), value.get("documents"))
    return with_principle(text, value.get("principle"))


def _record_texts(line: Line, side: str | None, chosen: Format, path: str) -> list[tuple[str, Any]]:
    """List the samples of a line's records, each with a label to print.

    ``side`` selects the reply that a pair had before ``_complete_pair``; None selects all samples.
    """
    texts = []
    for record in parse_lines(chosen, [line], path, WantedLabels()):
        if isinstance(record, MalformedRecord):
            raise DataError(record.reason)
        for name, text in zip(text_names(record), record.texts, strict=True):
            if side in (None, name):
                texts.append((f"{name:8}  {label_of(text)}", text))
    return texts


def write_first_replies(source: Path, target: Path) -> str:
    """Write the first two samples of the file ``source`` to ``target``, as lines to score.

    Returns:
        The prompt of the first sample and both replies, as text to print.

    Raises:
        DataError: the file cannot be read.
    """
    records = read_records(source, ReaderConfig()).records
    texts = [text for record in records[:2] for text in record.texts][:2]
    rows = [{"text": text} if isinstance(text, str) else _as_row(as_json(text)) for text in texts]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "\n".join(
        [f"{turn['role']}: {flatten_message(turn)}" for turn in prompt_of(texts[0])]
        + [f"reply: {reply_of(text)}" for text in texts]
    )


def _as_row(conversation: Any) -> Any:
    return {"messages": conversation} if isinstance(conversation, list) else conversation
