"""Clients of the servers: ``from nemo_aligner.serving.client import RewardClient``.

A call passes these files in this order; none of them needs torch:

``reward.py``       ``RewardClient``: splits a call into requests and collects their rewards
``critic.py``       ``RewardCriticClient``: values, training and saving of a PPO critic
``calls.py``        what both share: one deadline per call, and the thread with the event loop
``pool.py``         chooses the least busy available server, and waits for one that comes back
``server.py``       one server: handshake, requests over HTTP, pauses after errors
``fingerprint.py``  compares the model fingerprints of all answers
``causes.py``       explains why a connection failed

``scorers.py`` evaluates on servers through the ``Scorer`` protocol: ours, vLLM's and OpenRLHF's.
``posting.py`` posts JSON for it.
"""

from nemo_aligner.serving.client.critic import RewardCriticClient
from nemo_aligner.serving.client.reward import RewardClient
from nemo_aligner.serving.failures import RefusedError
from nemo_aligner.serving.protocols import ScoredRows
from nemo_aligner.serving.protocols.critic import CriticValues

__all__ = [
    "CriticValues",
    "RefusedError",
    "RewardClient",
    "RewardCriticClient",
    "ScoredRows",
]
