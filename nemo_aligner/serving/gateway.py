"""Run the gateway from its settings until it is stopped.

The gateway has no model, so no module that it uses may import torch: that would take seconds and
300 MB.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from nemo_aligner.config.gateway import MODEL_PART, GatewayRunConfig
from nemo_aligner.config.ineffective import describe_ineffective_settings
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.client.judge import JudgeClient
from nemo_aligner.serving.composed import ComposedService
from nemo_aligner.serving.endpoints import reward_endpoints
from nemo_aligner.serving.front.app import Front
from nemo_aligner.serving.front.listen import FrontServer, ReadyFile, open_socket, url_of
from nemo_aligner.serving.front.models import HostedModel
from nemo_aligner.serving.parts import FunctionPart, JudgePart, Part
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.serving.scoring import ScoringService
from nemo_aligner.serving.tokens import find_token, hide_password, warn_of_open_server
from nemo_aligner.serving.upstream import UpstreamService


def run_gateway(config: GatewayRunConfig) -> int:
    """Serve every protocol in front of the backends, and return the exit code.

    The gateway starts even if no backend answers; ``/ready`` reports whether one is available.

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
    for note in describe_ineffective_settings(config):
        print(note, flush=True)
    service = build_service(config, backend_token)
    endpoints = reward_endpoints(service, settings.max_queue_rows, kserve.OPTIONAL_NAMES)
    listener = open_socket(settings)
    url, ready = url_of(listener, settings), ReadyFile(settings)

    def announce() -> None:
        ready.write(url)
        print(f"Gateway at {url} (pid {os.getpid()})", flush=True)

    front = Front([HostedModel(service, endpoints)], endpoints, settings, token, service.statistics)
    server = FrontServer(front, settings, announce, ready.remove)
    if config.backends:
        print(f"Backends: {', '.join(map(hide_password, config.backends))}", flush=True)
    if config.parts != (MODEL_PART,):
        print(f"Parts of a reward: {', '.join(config.parts)}", flush=True)
    warn_of_open_server(settings.host, token, "gateway.token")
    server.run(listener)
    print("Stopped", flush=True)
    return 0


def build_service(config: GatewayRunConfig, backend_token: str | None) -> ScoringService:
    """Build the service that scores requests: with the backends only, or also with other parts.

    Raises:
        ConfigError: the judge's token cannot be read, or a function cannot be imported.
    """
    settings, combine = config.gateway, config.combine
    is_composed = config.parts != (MODEL_PART,) or combine.weights or combine.offsets
    model = None
    if config.backends:
        # A composed service logs the highest of its own rewards, and not those of its model.
        alone = replace(settings, top_rewards_file=None) if is_composed else settings
        model = UpstreamService(_build_client(config, backend_token), alone)
    if model is not None and not is_composed:
        return model
    parts: list[Part] = []
    if config.judge.url is not None:
        judge = config.judge
        client = JudgeClient(
            judge, find_token(judge.token_file, judge.token_variable, "judge.token")
        )
        parts.append(JudgePart(client, judge, settings.timeout_s))
    parts += [
        FunctionPart(name, location, config.function_timeout_s, config.function_threads)
        for name, location in config.functions.items()
    ]
    return ComposedService(model, parts, config)


def _build_client(config: GatewayRunConfig, token: str | None) -> RewardClient:
    settings = config.gateway
    return RewardClient(
        config.backends,
        expect=config.expect_contract,
        expect_fingerprint=config.expect_fingerprint,
        timeout_s=settings.timeout_s,
        wait_s=settings.retry_s,
        retry_s=settings.retry_s,
        max_connections=settings.max_connections,
        token=token,
        in_callers_loop=True,
    )
