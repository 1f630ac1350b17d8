"""Compare the model fingerprints of a client's servers, to notice rewards of other weights.

The scoring contract does not cover the weights. With ``expect_fingerprint``, only the model with
that fingerprint is accepted. Without it, a client continues if a server's model is replaced, and
logs one warning for each new model.
"""

from __future__ import annotations

import logging
import re

from nemo_aligner.utils.errors import ConfigError

logger = logging.getLogger(__name__)

_FINGERPRINT = re.compile("[0-9a-f]{32}")


class FingerprintCheck:
    """Compares the fingerprints that servers publish and send with rewards.

    Attributes:
        latest: the fingerprint that was accepted last; None at first, and if the server does not
            publish one.
    """

    def __init__(self, expected: str | None) -> None:
        """Store the expected fingerprint; None accepts every model.

        Raises:
            ConfigError: ``expected`` is not a fingerprint.
        """
        if expected is not None and not _FINGERPRINT.fullmatch(expected):
            raise ConfigError(
                f"expect_fingerprint: got {expected!r:.80}, wanted 32 hexadecimal characters, as "
                "the server logs them at its start"
            )
        self.expected = expected
        self.latest: str | None = None
        self._servers: dict[str, str] = {}

    def find_fault(self, fingerprint: str | None) -> str | None:
        """Return an error text if a server's model is not the expected one; None if it is."""
        if self.expected is not None and fingerprint != self.expected:
            return (
                f"got the model fingerprint {fingerprint or '(none)'}, wanted {self.expected}. "
                "Serve the model with that fingerprint, or set expect_fingerprint to the new one"
            )
        return None

    def accept(self, server: str, fingerprint: str | None) -> None:
        """Store the fingerprint of a server that has the right contract; warn of a new model."""
        self.latest = fingerprint
        # None: servers of earlier versions send no fingerprint, so their model is unknown.
        if fingerprint is None or fingerprint in self._servers:
            return
        if self._servers:
            previous, previous_server = next(reversed(self._servers.items()))
            logger.warning(
                "rewards now come from another model: %s has the model fingerprint %s, previously "
                "%s had %s, with the same scoring contract. Set expect_fingerprint to accept only "
                "one model",
                *(server, fingerprint, previous_server, previous),
            )
        self._servers[fingerprint] = server
