"""The trained runs of ``tests/distributed/conftest.py``, for tests of whole code paths."""

from __future__ import annotations

from tests.distributed.conftest import inputs, one_process, plain

__all__ = ["inputs", "one_process", "plain"]
