"""Clients of the servers: ``from nemo_aligner.serving.client import RewardClient``.

A call passes through these files in this order; none of them needs torch:

``reward.py``            ``RewardClient``: splits a call into requests and collects their rewards
``partial_requests.py``  the samples of one request of a call, which are encoded when it is sent
``critic.py``            ``RewardCriticClient``: values, training and saving of a PPO critic
``calls.py``             base of both clients: deadline of a call, the thread with the event loop
``pool.py``              chooses the least busy available server, and waits for one that comes back
``server.py``            one server: handshake, requests over HTTP, pauses after errors
``running_calls.py``     ends the requests of a server that hangs, so that others get them
``contract_check.py``    compares the scoring contracts of all answers
``fingerprint.py``       compares the model fingerprints of all answers
``causes.py``            explains why a connection failed, or where it redirects

``scorers.py`` has the ``Scorer`` classes with which an evaluation queries servers of this package,
of vLLM and of OpenRLHF. ``posting.py`` sends their JSON requests.
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
