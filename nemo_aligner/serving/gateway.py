"""A gateway from its settings until it is told to stop."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from nemo_aligner.config.gateway import GatewayConfig, GatewayRunConfig
from nemo_aligner.errors import ConfigError
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.transports.http import build_app
from nemo_aligner.serving.transports.http_server import open_socket, run_app
from nemo_aligner.serving.wire.protocols import ROUTES

_TOKEN = "one word of ASCII letters, digits and signs"


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
    client = RewardClient(
        config.backends,
        expect=config.expect_contract,
        timeout_s=own.timeout_s,
        wait_s=own.retry_s,
        retry_s=own.retry_s,
        max_connections=own.max_connections,
        in_callers_loop=True,
    )
    with open_socket(own) as listening:
        print(f"Backends: {', '.join(config.backends)}", flush=True)
        if token is None and own.host not in ("127.0.0.1", "localhost", "::1"):
            print("No bearer token is set: whoever reaches the port is answered", flush=True)
        return run_app(build_app(ROUTES, client, own, token, client.aclose), listening, own)


def read_token(config: GatewayConfig) -> str | None:
    """The bearer token that requests must have, None if they need none.

    Raises:
        ConfigError: it cannot be read, is empty, or is none that a header can have.
    """
    if config.token_file is not None:
        where = f"gateway.token_file: {config.token_file}"
        try:
            token = Path(config.token_file).read_text(encoding="utf-8").strip()
        except OSError as error:  # in words alone: the path is there already
            raise ConfigError(f"{where}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    elif config.token_variable is not None:
        where = f"gateway.token_variable: {config.token_variable}"
        if config.token_variable not in os.environ:
            raise ConfigError(f"{where}: it is not set, wanted {_TOKEN}")
        token = os.environ[config.token_variable].strip()
    else:
        return None
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise ConfigError(f"{where}: it holds no token, wanted {_TOKEN}")
    return token
