"""Explain why a connection to a server failed, and what to change."""

from __future__ import annotations

import asyncio

import aiohttp

from nemo_aligner.utils.errors import short

CONNECT_S = 3.0
# A handshake costs a server almost nothing, so an answer later than this means that the server
# hangs. Requests for rewards have no such limit, only the deadline of the call, because the model
# may be slow.
HANDSHAKE_S = 10.0


def cause_of(error: BaseException) -> str:
    """Explain in a few words, for an error message, why a connection failed with ``error``."""
    text = str(error)
    if isinstance(error, aiohttp.ClientSSLError):
        return _tls_cause_of(error)
    if isinstance(error, aiohttp.ClientConnectorError) and (
        isinstance(error.os_error, ConnectionRefusedError) or "Connect call failed" in text
    ):
        return "connection refused: no server listens there"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"no such host: {error.host}"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {CONNECT_S:g} s"
    if isinstance(error, asyncio.TimeoutError):
        return f"the server accepts connections, but did not answer within {HANDSHAKE_S:g} s"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "the connection was lost before the answer was complete"
    return short(text) or type(error).__name__


def _tls_cause_of(error: aiohttp.ClientSSLError) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or str(error)
        if "mismatch" in reason:
            return (
                f"{short(reason)}. Use a host name in the URL that is in the server's certificate"
            )
        return (
            f"the server's certificate is not trusted ({short(reason)}). Set the environment "
            "variable SSL_CERT_FILE to a PEM file with the certificate of its authority, or with "
            "the certificate itself if it is self-signed"
        )
    if getattr(error.os_error, "reason", "") == "WRONG_VERSION_NUMBER":
        return "the server does not speak TLS. Use http:// in the URL, or set up TLS on the server"
    return short(str(error))
