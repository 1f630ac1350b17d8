"""Which model the rewards of a client come from: its servers' fingerprints, compared.

The scoring contract does not cover the weights. With ``expect_fingerprint`` only the model of that
fingerprint is accepted. Without it a client goes on when another model takes a server's place, and
logs a warning, once for each further model.
"""

from __future__ import annotations

import logging
import re

from nemo_aligner.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_FINGERPRINT = re.compile("[0-9a-f]{32}")


class FingerprintCheck:
    """Compares the fingerprints that servers publish and answer with.

    Attributes:
        latest: the fingerprint that was accepted last; None before any, and from a server that
            tells none.
    """

    def __init__(self, expected: str | None) -> None:
        """Raise ConfigError if ``expected`` is no fingerprint."""
        if expected is not None and not _FINGERPRINT.fullmatch(expected):
            raise ConfigError(
                f"expect_fingerprint: got {expected!r:.80}, wanted 32 hexadecimal characters, as a "
                "server prints them at its start"
            )
        self.expected = expected
        self.latest: str | None = None
        self._servers: dict[str, str] = {}

    def find_fault(self, server: str, fingerprint: str | None) -> str | None:
        """Say why the model of a server is not accepted; None if it is."""
        if self.expected is not None and fingerprint != self.expected:
            return (
                f"got the model fingerprint {fingerprint or '(none)'}, wanted {self.expected}. "
                "Serve the model that has it, or set expect_fingerprint to the new model's"
            )
        self._warn_if_new(server, fingerprint)
        self.latest = fingerprint
        return None

    def _warn_if_new(self, server: str, fingerprint: str | None) -> None:
        # Servers of earlier versions tell none, which says nothing about the model.
        if fingerprint is None or fingerprint in self._servers:
            return
        if self._servers:
            before, whose = next(reversed(self._servers.items()))
            logger.warning(
                "rewards now come from another model: %s has the model fingerprint %s, before %s "
                "had %s, by the same scoring contract. expect_fingerprint accepts one model alone",
                *(server, fingerprint, whose, before),
            )
        self._servers[fingerprint] = server
