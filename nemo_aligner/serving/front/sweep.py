"""The deadlines of a server's connections, and which of them have been idle the longest."""

from __future__ import annotations

import asyncio
from typing import Any

from nemo_aligner.serving.front.limits import LINGER_SECS, ConnectionLimits


class Sweep:
    """One timer that ends the connections of a server whose deadlines have passed.

    A timer per connection would be set and cleared with every request. ``now`` is the loop's time
    at the last run. Deadlines are computed from it, because reading the clock costs more.

    ``idle`` has as keys the open connections that wait for the first byte of a request, the longest
    idle one first.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: ConnectionLimits) -> None:
        self.loop = loop
        self.now = loop.time()
        self.idle: dict[Any, None] = {}
        shortest = min(limits.receive_timeout_secs, limits.keep_alive_secs, LINGER_SECS)
        self.interval = max(0.02, shortest / 4)
        self.timer: asyncio.TimerHandle | None = None

    def start(self, connections: set[Any]) -> None:
        """Start the timer, which runs as long as there are connections."""
        if self.timer is None:
            self.now = self.loop.time()
            self.timer = self.loop.call_later(self.interval, self._run, connections)

    def close_longest_idle(self) -> bool:
        """Close the connection that has been idle the longest; return False if none is idle."""
        longest_idle = next(iter(self.idle), None)
        if longest_idle is None:
            return False
        longest_idle.expire()
        if longest_idle.unsent_bytes == 0:
            # TLS ends only when the client answers, which an idle client may never do.
            longest_idle.deadline = self.now + LINGER_SECS
        return True

    def _run(self, connections: set[Any]) -> None:
        # ``now`` may be one interval old when a deadline is set, so compare with the previous one.
        earlier, self.now = self.now, self.loop.time()
        self.timer = None
        if connections:
            self.start(connections)
        for connection in [peer for peer in connections if peer.deadline < earlier]:
            connection.expire()
