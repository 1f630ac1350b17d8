"""Subcommands (verbs) for HTTP: ``serve``, ``serve-critic``, ``gateway`` and ``score``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from nemo_aligner.cli.data import add_format, read_format
from nemo_aligner.cli.parser import (
    Parser,
    read_settings,
    settings_parser,
    start_ranks,
    starts_ranks,
)
from nemo_aligner.config.gateway import GatewayRunConfig
from nemo_aligner.config.serving import ServeConfig, ServeCriticConfig
from nemo_aligner.utils.errors import ConfigError, DataError, ServingError

if TYPE_CHECKING:
    from nemo_aligner.contract.scorer import StepRewards

_SERVE = """\
Serve a reward model over HTTP, by all protocols, until SIGTERM or Ctrl-C.

nemo-aligner serve rm_model_file=megatron_gpt.nemo server.port=5555
"""


def serve_parser() -> Parser:
    """Build the parser of ``nemo-aligner serve``."""
    return settings_parser("serve", _SERVE, ServeConfig)


def run_serve(options: argparse.Namespace) -> int:
    """Run the reward server until a signal arrives; return the exit code."""
    config = read_settings(ServeConfig, options, ["rm_model_file"])
    if starts_ranks(options):
        return start_ranks("serve", options)
    # Imported here: torch takes seconds, and invalid settings must be reported before.
    from nemo_aligner.serving.run import run_server

    return run_server(config)


_SERVE_CRITIC = """\
Serve the critic of PPO over HTTP: values, training and saving, until SIGTERM or Ctrl-C.

nemo-aligner serve-critic pretrained_checkpoint.restore_from_path=rm.nemo
"""

_VERB = "serve-critic"


def serve_critic_parser() -> Parser:
    """Build the parser of ``nemo-aligner serve-critic``."""
    return settings_parser(_VERB, _SERVE_CRITIC, ServeCriticConfig)


def run_serve_critic(options: argparse.Namespace) -> int:
    """Run the critic server until a signal arrives; return the exit code."""
    needed = ["pretrained_checkpoint.restore_from_path"]
    config = read_settings(ServeCriticConfig, options, needed)
    if starts_ranks(options):
        return start_ranks(_VERB, options)
    from nemo_aligner.serving.run import run_critic_server

    return run_critic_server(config)


_GATEWAY = """\
Put several servers of the same reward model behind one address, with the same protocols.

nemo-aligner gateway 'backends=[http://127.0.0.1:5555]' gateway.port=8000
"""


def gateway_parser() -> Parser:
    """Build the parser of ``nemo-aligner gateway``."""
    return settings_parser("gateway", _GATEWAY, GatewayRunConfig, has_ranks=False)


def run_gateway(options: argparse.Namespace) -> int:
    """Run the gateway until a signal arrives; return the exit code."""
    config = read_settings(GatewayRunConfig, options)
    from nemo_aligner.serving.gateway import run_gateway

    return run_gateway(config)


_SCORE = """\
Query a reward server: print the reward of each sample.

  nemo-aligner score "some text" "another text"
  nemo-aligner score --file pairs.jsonl
  nemo-aligner score --conversation '[{"role": "user", ...}, ...]'

A conversation is rendered with the model's chat template; a raw text is scored verbatim. A file has
lines of {"text": ...} or {"messages": [...]}, or is preference data in any format of `evaluate`, of
which each reply gets a reward, or has completions that TRL has logged (log_completions=True).
"""

# Seconds without an answer after which a line reports that the client is waiting.
_QUIET_S = 2.0
# Deadline of one request, in seconds. A file of any size is one call, which has no deadline.
_REQUEST_S = 600.0


def score_parser() -> Parser:
    """Build the parser of ``nemo-aligner score``."""
    parser = Parser("score", _SCORE)
    parser.add_argument("texts", nargs="*", help="raw texts, scored without a chat template")
    parser.add_argument(
        "--url", default="http://127.0.0.1:5555", help="the server (default: %(default)s)"
    )
    parser.add_argument(
        "--conversation", action="append", default=[], metavar="JSON",
        help="a list of messages, or an object with messages, tools and documents",
    )  # fmt: skip
    parser.add_argument(
        "--file", type=Path, metavar="JSONL",
        help="file with samples to score; - is the standard input",
    )  # fmt: skip
    add_format(parser, of_ratings=False, drops_records=False)
    parser.add_argument(
        "--steps", action="store_true", help="also print the reward of each turn or step"
    )
    parser.add_argument(
        "--expect", metavar="HASH", help="fail if the model's scoring contract has another hash"
    )
    parser.add_argument(
        "--expect-fingerprint", metavar="HEX",
        help="fail if the model's weights have another fingerprint",
    )  # fmt: skip
    parser.add_argument(
        "--token-variable", metavar="NAME",
        help="environment variable with the server's bearer token",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=float, default=0, metavar="SECONDS",
        help="wait this long for a server that is not up yet (default: 0)",
    )  # fmt: skip
    return parser


def run_score(options: argparse.Namespace) -> int:
    """Print a line for each sample: its rewards, or why it has none, and its label.

    The exit code is 1 if a sample has no rewards.
    """
    samples = list(_read_samples(options))
    if not samples and options.file is not None:
        raise DataError(f"{options.file}: it has no samples")
    if not samples:
        raise ConfigError("nothing to score: give texts, --conversation or --file")
    from nemo_aligner.serving.client.reward import RewardClient
    from nemo_aligner.serving.tokens import find_token, hide_password

    token = find_token(None, options.token_variable, "--token")
    with RewardClient(
        options.url,
        expect=options.expect,
        expect_fingerprint=options.expect_fingerprint,
        timeout_s=None,
        request_timeout_s=_REQUEST_S,
        wait_s=options.wait,
        token=token,
    ) as client:
        patience = f"waiting for an answer from {hide_password(options.url)} ..."
        waiting = Timer(_QUIET_S, lambda: print(patience, file=sys.stderr))
        waiting.start()
        try:
            scored = client.score_rows([sample for _, sample in samples])
            has_steps = options.steps and scored.steps is not None
            is_named = scored.rewards.shape[1] > 1
            needs_contract = scored.contract_hash is not None and (is_named or has_steps)
            contract = client.contract() if needs_contract else None
        except ServingError as error:
            raise ServingError(_name_flags(str(error), options.token_variable)) from error
        finally:
            waiting.cancel()
    if contract is not None and is_named:
        print("attributes:", ", ".join(contract.attributes))
    separator = contract.step_separator if contract is not None else None
    if options.steps and scored.steps is None and len(scored.errors) < len(samples):
        raise ConfigError("--steps: the model has one reward per sample. Omit the option")
    for row, (label, sample) in enumerate(samples):
        rewards = _show_rewards(scored.rewards[row])
        if row in scored.errors:
            outcome = "unscored" if row in scored.unscored else "rejected"
            rewards, label = f"{outcome:>10}", f"{label}: {scored.errors[row]}"
        print(rewards, "", label, sep="  ")
        if options.steps and scored.steps is not None and scored.steps[row] is not None:
            print(*_list_steps(scored.steps[row], sample, separator), sep="\n")
    return 1 if scored.errors else 0


def _show_rewards(rewards: Iterable[float]) -> str:
    return "  ".join(f"{reward:10.4f}" for reward in rewards)


def _list_steps(steps: StepRewards, sample: Any, separator: str | None) -> Iterator[str]:
    """Yield a line for each turn or step of a sample: its rewards and its text.

    ``separator`` is the contract's ``step_separator``; None for turns.
    """
    from nemo_aligner.contract.steps import step_texts
    from nemo_aligner.data.texts import label_of

    texts = step_texts(sample, steps.spans, separator)
    for number, (rewards, text) in enumerate(zip(steps.rewards, texts, strict=True), 1):
        yield f"{_show_rewards(rewards)}      step {number}: {label_of(text)}"


def _name_flags(message: str, token_variable: str | None) -> str:
    """Replace the names of the client's arguments in its error by the flags of this command."""
    from nemo_aligner.serving.failures import NOT_SENT, WRONG_TOKEN

    not_sent = f"{NOT_SENT}: pass --token-variable NAME"
    wrong_token = f"the token in {token_variable} is not the server's"
    message = message.replace(NOT_SENT, not_sent).replace(WRONG_TOKEN, wrong_token)
    return message.replace(" (request_timeout_s)", "").replace("wait_s", "--wait")


def _read_samples(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield ``(label, sample)`` for each sample of the command line and of ``--file``.

    The label names the sample in the output.
    """
    from nemo_aligner.data.texts import label_of, labelled_conversation, labelled_texts

    yield from ((label_of(text), text) for text in options.texts)
    yield from map(labelled_conversation, options.conversation)
    if options.file is not None:
        is_piped = options.file == Path("-")
        path = Path("/dev/stdin") if is_piped else options.file
        yield from labelled_texts(path, read_format(options))
