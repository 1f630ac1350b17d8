"""The HTTP front: one port on which a server answers every protocol.

Bytes pass through these files in this order: ``listen`` opens the port and runs uvicorn,
``connection`` enforces the ``limits`` of a connection before anything is kept in memory, and starts
an ``exchange`` for each request, ``app`` checks the token and routes a request to its protocol,
``kserve`` answers KServe v2, and ``metrics`` answers ``/metrics``.
"""
