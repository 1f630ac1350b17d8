"""TCP ports of a server: free ones, and why one is not."""

from __future__ import annotations

import random
import socket

from nemo_aligner.utils.errors import ServingError

# Ports below those that the kernel gives to outgoing connections: such a connection could take the
# port between this check and the server's start.
_ANY_PORT = range(20_000, 32_000)


def free_port(host: str, port: int, section: str, count: int = 1) -> int:
    """Return the first of ``count`` consecutive ports that nobody listens on.

    Args:
        host: address that the server is to listen on.
        port: the first port; 0 looks for any.
        section: prefix of the settings, ``server.`` of ``server.host`` and ``server.port``.
        count: number of ports that the server needs.

    Raises:
        ServingError: one is taken, or ``host`` is no address of this machine.
    """
    if port == 0:
        for candidate in random.SystemRandom().sample(_ANY_PORT, 100):
            if all(why_taken(host, candidate + offset) is None for offset in range(count)):
                return candidate
        raise ServingError(
            f"{section}host: {host}: found no free port. Set it to an address of this machine."
        )
    for number in range(port, port + count):
        reason = why_taken(host, number)
        if reason is not None:
            wish = "another one" if count == 1 else f"the first of {count} free ones"
            raise ServingError(
                f"{section}port: {host}:{number} is not free: {reason}. Set it to {wish}, or to 0 "
                "for any."
            )
    return port


def why_taken(host: str, port: int) -> Exception | None:
    """Return the error of an attempt to listen there; None if the port is free."""
    with socket.socket() as probe:
        # As servers do: connections of an earlier server that are still closing do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            return error
    return None
