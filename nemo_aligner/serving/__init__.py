"""Serve reward models and critics: servers, the gateway, and clients.

A request passes through these files in this order:

``front/``          sockets, limits, tokens and routes of the HTTP front
``protocols/``      translates the bodies of all protocols to a ``ScoreRequest``, and back
``scoring.py``      ``ScoringService``, the interface between the front and the model
``reward.py``       the reward model's service and backend; ``critic.py`` has those of a critic
``intake.py``       checks a request and encodes its samples by the scoring contract
``engine/``         batches rows, runs them on all ranks, caches prefixes and shapes rewards

``run.py`` runs a server from its settings. ``server.py`` starts all of the above on the ranks, and
drains and stops it at SIGTERM; in a gateway, ``front/listen.py`` does that. ``service.py`` has the
types ``Backend`` and ``Service``. ``endpoints.py`` has the endpoints of KServe v2, which
``triton.py`` (with ``triton_internals.py``) also serves over gRPC.

A gateway (``gateway.py``) has the same front, but its service (``upstream.py``) forwards requests
to servers through ``client/``; neither imports torch. ``composed.py`` combines their rewards with
those of a judge and of Python functions (``parts.py``). Servers and gateways share ``failures.py``,
the table of failure kinds, ``backpressure.py``, the limit of rows in flight, ``reward_log.py``, the
log of the highest-rewarded samples, ``drift.py``, the drift of rewards, and ``tokens.py``, bearer
tokens.
"""
