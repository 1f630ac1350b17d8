"""Run the gateway from its settings until it is stopped.

The gateway has no model, so no module that it uses may import torch, which takes seconds and 300
MB.
"""

from __future__ import annotations

import logging
import os

from nemo_aligner.config.serving import GatewayRunConfig
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.endpoints import reward_endpoints
from nemo_aligner.serving.front.app import Front
from nemo_aligner.serving.front.listen import FrontServer, ReadyFile, open_socket, url_of
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.serving.tokens import find_token, hide_password, warn_of_open_server
from nemo_aligner.serving.upstream import UpstreamService


def run_gateway(config: GatewayRunConfig) -> int:
    """Serve every protocol in front of the backends, and return the exit code.

    The gateway starts even if no backend answers; ``/ready`` tells whether one is available.

    Raises:
        AlignerError: the settings are invalid, or the port is taken.
    """
    # Silence the client's warnings about rejected and cut rows: the gateway's answers already have
    # them.
    logging.getLogger("nemo_aligner.serving.client.reward").setLevel(logging.ERROR)
    settings = config.gateway
    token = find_token(settings.token_file, settings.token_variable, "gateway.token")
    backend_token = find_token(
        config.backend_token_file, config.backend_token_variable, "backend_token"
    )
    client = RewardClient(
        config.backends,
        expect=config.expect_contract,
        expect_fingerprint=config.expect_fingerprint,
        timeout_s=settings.timeout_s,
        wait_s=settings.retry_s,
        retry_s=settings.retry_s,
        max_connections=settings.max_connections,
        token=backend_token,
        in_callers_loop=True,
    )
    service = UpstreamService(client, settings)
    endpoints = reward_endpoints(service, settings.max_queue_rows, kserve.OPTIONAL_NAMES)
    listener = open_socket(settings)
    url, ready = url_of(listener, settings), ReadyFile(settings.ready_file)

    def announce() -> None:
        ready.write(url)
        print(f"Gateway at {url} (pid {os.getpid()})", flush=True)

    front = Front(service, endpoints, settings, token, service.statistics)
    server = FrontServer(front, settings, announce, ready.remove)
    print(f"Backends: {', '.join(map(hide_password, config.backends))}", flush=True)
    warn_of_open_server(settings.host, token, "gateway.token")
    server.run(listener)
    print("Stopped", flush=True)
    return 0
