"""uvicorn around the gateway's application: its socket, TLS, and every end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import uvicorn
from starlette.types import ASGIApp

from nemo_aligner.config.gateway import GatewayConfig
from nemo_aligner.errors import ServingError
from nemo_aligner.serving.transports.ready import ready_file

_WAITING_CONNECTIONS = 2048


def open_socket(config: GatewayConfig) -> socket.socket:
    """Where the gateway listens.

    Raises:
        ServingError: the port is taken, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server(
            (config.host, config.port), family=family, backlog=_WAITING_CONNECTIONS
        )
    except OSError as error:
        raise ServingError(
            f"gateway.port: {config.host}:{config.port} is not free: {error}"
        ) from error


def run_app(app: ASGIApp, listening: socket.socket, config: GatewayConfig) -> int:
    """Answer requests until SIGTERM or SIGINT, then what is in flight; the exit code.

    Raises:
        ServingError: the certificate or its key cannot be used.
    """
    try:
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ssl_certfile=config.certificate_file,
            ssl_keyfile=config.key_file,
            timeout_graceful_shutdown=config.exit_timeout_secs,
            server_header=False,
        )
        settings.load()
    except OSError as error:  # ssl's errors are among them
        files = f"{config.certificate_file}, {config.key_file}"
        raise ServingError(f"gateway.certificate_file, key_file: {files}: {error}") from error
    url = _url(listening, config)
    with closing(listening), _ends_quietly():
        server = _Gateway(settings, url, config.ready_file)
        server.run(sockets=[listening])
    print("Stopped", flush=True)
    return 0


def _url(listening: socket.socket, config: GatewayConfig) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.certificate_file is None else "https"
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


class _Gateway(uvicorn.Server):
    """uvicorn's server, which says when it answers and when it drains."""

    def __init__(self, settings: uvicorn.Config, url: str, ready: str | None) -> None:
        super().__init__(settings)
        self._url, self._ready = url, ready

    async def main_loop(self) -> None:
        """Until it shall stop."""
        with ready_file(self._ready, self._url):
            print(f"Gateway at {self._url} (pid {os.getpid()})", flush=True)
            await super().main_loop()
        print("Draining: in-flight requests are answered, new ones are refused", flush=True)


@contextmanager
def _ends_quietly() -> Iterator[None]:
    """Have the signal that uvicorn raises again after it has drained end nothing."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
