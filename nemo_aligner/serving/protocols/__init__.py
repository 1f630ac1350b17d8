"""Every protocol that the gateway speaks; each file has its own, and none knows another."""

from __future__ import annotations

from typing import Any

from nemo_aligner.serving.protocols import gym, openrlhf, rewards, vllm
from nemo_aligner.serving.protocols.base import PlainRoute, Route

ROUTES: list[Route[Any]] = [*rewards.ROUTES, *openrlhf.ROUTES, *vllm.ROUTES, *gym.ROUTES]
PLAIN_ROUTES: list[PlainRoute] = [*gym.PLAIN_ROUTES]
