"""What PyTriton's client says beside what it raises."""

from __future__ import annotations

import logging
import warnings

from pytriton.client.warnings import NotSupportedTimeoutWarning


def silence_pytriton_client() -> None:
    """Hide what PyTriton's client logs and also raises, and its warning of timeouts that differ.

    Both come from threads of its own, where no setting of a caller's block reaches. A level that
    the application gave this logger stays.
    """
    logger = logging.getLogger("pytriton.client")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=NotSupportedTimeoutWarning)
