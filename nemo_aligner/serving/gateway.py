"""A gateway from its settings until it is told to stop."""

from __future__ import annotations

import logging

from nemo_aligner.config.gateway import GatewayConfig, GatewayRunConfig
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.tokens import find_token, say_who_may_ask
from nemo_aligner.serving.transports.http import build_app
from nemo_aligner.serving.transports.http_server import open_socket, run_app
from nemo_aligner.serving.wire.protocols import PLAIN_ROUTES, ROUTES


def run_gateway(config: GatewayRunConfig) -> int:
    """Answer every protocol in front of the backends; the exit code.

    It starts without them: ``/ready`` says whether one is there.

    Raises:
        AlignerError: the settings are unfit, or the port is taken.
    """
    # Answers say which rows are refused or cut: a line for each would only fill the log.
    logging.getLogger("nemo_aligner.serving.client.rows").setLevel(logging.ERROR)
    own = config.gateway
    token = read_token(own)
    backend_token = find_token(
        config.backend_token_file, config.backend_token_variable, "backend_token"
    )
    client = RewardClient(
        config.backends,
        expect=config.expect_contract,
        timeout_s=own.timeout_s,
        wait_s=own.retry_s,
        retry_s=own.retry_s,
        max_connections=own.max_connections,
        token=backend_token,
        in_callers_loop=True,
    )
    with open_socket(own) as listening:
        print(f"Backends: {', '.join(config.backends)}", flush=True)
        say_who_may_ask(own.host, token, "gateway.token")
        ends = client.turn_end_async if own.complete_turns else None
        app = build_app(ROUTES, client, own, token, client.aclose, PLAIN_ROUTES, ends)
        return run_app(app, listening, own)


def read_token(config: GatewayConfig) -> str | None:
    """The bearer token that requests must have, None if they need none.

    Raises:
        ConfigError: it cannot be read, is empty, or is none that a header can have.
    """
    return find_token(config.token_file, config.token_variable, "gateway.token")
