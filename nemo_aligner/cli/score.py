"""Ask a reward model server for rewards.

  nemo-aligner score "some text" "another text"
  nemo-aligner score --file pairs.jsonl
  nemo-aligner score --conversation '[{"role": "user", ...}, ...]'

A conversation gets the model's chat template; a text is scored as it stands. A file has lines of
{"text": ...}, {"messages": [...]} or pairs (prompt, chosen, rejected), one reward per reply.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

from nemo_aligner.cli.parser import Parser
from nemo_aligner.errors import ConfigError, ServingError

_QUIET_S = 2.0


def new_parser() -> Parser:
    """The options of ``nemo-aligner score``."""
    parser = Parser("score", __doc__)
    parser.add_argument("texts", nargs="*", help="texts, scored without a chat template")
    parser.add_argument("--url", default="http://127.0.0.1:5555", help="default: %(default)s")
    parser.add_argument(
        "--conversation", action="append", default=[], metavar="JSON",
        help="a list of messages",
    )  # fmt: skip
    parser.add_argument("--file", type=Path, metavar="JSONL", help="texts of a file")
    parser.add_argument("--expect", metavar="HASH", help="refuse rewards by another contract")
    parser.add_argument(
        "--token-variable", metavar="NAME",
        help="environment variable with the server's bearer token",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=float, default=0, metavar="SECONDS",
        help="for a server that is not up yet (default: 0)",
    )  # fmt: skip
    return parser


def run(options: argparse.Namespace) -> int:
    """A line for each text: its rewards, and the text."""
    texts = list(_texts(options))
    if not texts:
        raise ConfigError("nothing to score: give texts, --conversation or --file")
    from nemo_aligner.serving.client.reward import RewardClient
    from nemo_aligner.serving.tokens import find_token

    token = find_token(None, options.token_variable, "--token")
    with RewardClient(
        options.url, expect=options.expect, wait_s=options.wait, token=token
    ) as client:
        patience = f"waiting for an answer of {options.url} ..."
        waiting = Timer(_QUIET_S, lambda: print(patience, file=sys.stderr))
        waiting.start()
        try:
            rewards = client.score([text for _, text in texts])
        except ServingError as error:  # the client's argument, by its name here
            raise ServingError(str(error).replace("wait_s", "--wait")) from error
        finally:
            waiting.cancel()
    for (label, _), row in zip(texts, rewards, strict=True):
        print("  ".join(f"{reward:10.4f}" for reward in row), "", label, sep="  ")
    return 0


def _texts(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    from nemo_aligner.data.texts import label_of, labelled_conversation, labelled_texts

    yield from ((label_of(text), text) for text in options.texts)
    yield from map(labelled_conversation, options.conversation)
    if options.file is not None:
        yield from labelled_texts(options.file)
