"""Ask a reward model server: ``python examples/score.py "some text" "another text"``.

``--conversation '[{"role": "user", "content": "Hi"}, ...]'`` gets the model's chat template;
``--file`` reads a JSONL of ``{"text": ...}``, ``{"messages": [...]}`` or pairs
(``prompt``/``chosen``/``rejected``), one reward per reply.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_aligner.cli.common import new_parser
from nemo_aligner.data.texts import label_of, labelled_texts
from nemo_aligner.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """A line for each text: its rewards, and the text."""
    options = _parse(argv)
    texts = list(_texts(options))
    if not texts:
        raise ConfigError("nothing to score: give texts, --conversation or --file")

    from nemo_aligner.serving.client.reward import RewardClient

    with RewardClient(options.url, expect=options.expect, init_timeout_s=options.wait) as client:
        rewards = client.score([text for _, text in texts])
    for (label, _), row in zip(texts, rewards, strict=True):
        print("  ".join(f"{reward:10.4f}" for reward in row), "", label, sep="  ")
    return 0


def _texts(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    yield from ((label_of(text), text) for text in options.texts)
    yield from ((label_of(messages), messages) for messages in options.conversation)
    if options.file is not None:
        yield from labelled_texts(options.file)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("texts", nargs="*", help="raw texts, scored without a chat template")
    parser.add_argument("--url", default="http://127.0.0.1:5555")
    parser.add_argument(
        "--conversation", action="append", type=_messages, default=[], metavar="JSON"
    )
    parser.add_argument("--file", type=Path, metavar="JSONL")
    parser.add_argument("--expect", metavar="HASH", help="refuse rewards by another contract")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for the server")
    return parser.parse_args(argv)


def _messages(text: str) -> list[dict[str, str]]:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"got {text[:60]!r}, wanted JSON: {error}") from error
