"""The HTTP front: one port on which a server or gateway answers every protocol.

A request passes through these files in this order:

``listen.py``      opens the port, and runs uvicorn in the main thread or in another one
``handshake.py``   TLS handshakes, which count as connections while they last
``connection.py``  one connection: enforces ``limits.py`` before bytes fill the memory
``sweep.py``       ends connections at their deadlines, or to make room for a new one
``exchange.py``    one request and its answer on a connection
``app.py``         checks the token, and finds the model (``models.py``) and the route
``bodies.py``      reads a body within the memory limit of all requests
``routes.py``      parses a body, calls the model's ``ScoringService``, and builds the answer
``kserve.py``      answers KServe v2; the other protocols are in ``serving/protocols``

``metrics.py`` counts requests, rows and connections for Prometheus; ``notices.py`` logs the first
request of each kind that its sender has to correct. No module here imports torch, because a gateway
also uses the front, and runs without torch.
"""
