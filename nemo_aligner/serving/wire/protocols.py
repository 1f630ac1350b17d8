"""Every protocol that the gateway speaks; each file has its own, and none knows another."""

from __future__ import annotations

from typing import Any

from nemo_aligner.serving.wire import gym, gym_run, openrlhf, rewards, vllm
from nemo_aligner.serving.wire.route import PlainRoute, Route

ROUTES: list[Route[Any]] = [*rewards.ROUTES, *openrlhf.ROUTES, *vllm.ROUTES, *gym.ROUTES]
PLAIN_ROUTES: list[PlainRoute] = [*gym_run.PLAIN_ROUTES]
