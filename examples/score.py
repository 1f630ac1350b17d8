"""Ask a reward model server: ``python examples/score.py "some text" "another text"``.

``--conversation '[{"role": "user", "content": "Hi"}, ...]'`` gets the model's chat template;
``--file`` reads a JSONL of ``{"text": ...}``, ``{"messages": [...]}`` or pairs
(``prompt``/``chosen``/``rejected``), one reward per reply.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> int:
    arguments = _parse(sys.argv[1:])
    texts = list(_texts(arguments))
    if not texts:
        sys.exit("nothing to score: give texts, --conversation or --file")

    from nemo_aligner.errors import ServingError
    from nemo_aligner.serving.client.reward import RewardClient

    with RewardClient(
        arguments.url, expect=arguments.expect, init_timeout_s=arguments.wait
    ) as client:
        try:
            rewards = client.score([text for _, text in texts])
        except ServingError as error:
            sys.exit(str(error))
    for (label, _), row in zip(texts, rewards, strict=True):
        print("  ".join(f"{reward:10.4f}" for reward in row), "", label, sep="  ")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="*", help="raw texts, scored without a chat template")
    parser.add_argument("--url", default="http://127.0.0.1:5555")
    parser.add_argument("--conversation", action="append", default=[], metavar="JSON")
    parser.add_argument("--file", type=Path, metavar="JSONL")
    parser.add_argument("--expect", metavar="HASH", help="refuse rewards by another contract")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for the server")
    return parser.parse_args(argv)


def _texts(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for text in arguments.texts:
        yield _shorten(text), text
    for conversation in arguments.conversation:
        messages = json.loads(conversation)
        yield _shorten(messages), messages
    if arguments.file is not None:
        for line in arguments.file.read_text().splitlines():
            yield from _record(json.loads(line))


def _record(record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("text", "messages"):
        if key in record:
            yield _shorten(record[key]), record[key]
    for key in ("chosen", "rejected"):
        if key in record:
            text = _reply_to(record.get("prompt", ""), record[key])
            yield f"{key:8}  {_shorten(text)}", text


def _reply_to(prompt: Any, reply: Any) -> Any:
    """A prompt and a reply, each a string or messages, as one conversation."""
    turns = _turns(prompt, "user") if prompt else []
    return turns + _turns(reply, "assistant")


def _turns(text: Any, role: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def _shorten(text: Any) -> str:
    if not isinstance(text, str):
        text = " | ".join(turn["content"] for turn in text)
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:38]} ... {line[-37:]}"


if __name__ == "__main__":
    sys.exit(main())
