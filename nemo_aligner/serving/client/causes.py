"""Causes of failed connections, in words that say what to change."""

from __future__ import annotations

import asyncio

import aiohttp

from nemo_aligner.utils.errors import short

CONNECT_S = 3.0
# A request for rewards is limited by the call's deadline alone, as the model may be slow. A
# handshake costs a server nothing, so a late answer means that it hangs.
HANDSHAKE_S = 10.0


def cause_of(error: BaseException) -> str:
    """Cause of a failed connection, in few words."""
    text = str(error)
    if isinstance(error, aiohttp.ClientSSLError):
        return _cause_in_tls(error)
    if isinstance(error, aiohttp.ClientConnectorError) and (
        isinstance(error.os_error, ConnectionRefusedError) or "Connect call failed" in text
    ):
        return "connection refused: nobody listens there"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"no such host: {error.host}"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"no connection within {CONNECT_S:g} s"
    if isinstance(error, asyncio.TimeoutError):
        return f"it accepts connections, but gave no answer within {HANDSHAKE_S:g} s"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "connection lost before the whole answer came"
    return short(text) or type(error).__name__


def _cause_in_tls(error: aiohttp.ClientSSLError) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or str(error)
        if "mismatch" in reason:
            return f"{short(reason)}. Use a name in the URL that the server's certificate has"
        return (
            f"its certificate is not trusted ({short(reason)}). Set the environment variable "
            "SSL_CERT_FILE to a PEM file with the certificate of its authority, or with its own if "
            "it is self-signed"
        )
    if getattr(error.os_error, "reason", "") == "WRONG_VERSION_NUMBER":
        return "it does not answer by TLS. Use http:// in the URL, or set up the server's TLS"
    return short(str(error))
