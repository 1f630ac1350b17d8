"""The servers and models of ``tests/serving/conftest.py``, for tests of whole code paths."""

from __future__ import annotations

from tests.serving.conftest import archive, lone, model_server, scorer, server, servers

__all__ = ["archive", "lone", "model_server", "scorer", "server", "servers"]
