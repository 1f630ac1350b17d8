"""Explain why a connection to a server failed, or where it redirects, and what to change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import urljoin

import aiohttp

from nemo_aligner.serving.tokens import hide_password
from nemo_aligner.utils.errors import short

# Time limit in seconds for checking all servers. It is short, because a caller of the gateway's
# ``/ready`` or ``/metrics`` waits for the check. An example is Kubernetes, whose probe times out
# after 5 s (deploy/kubernetes).
PROBE_S = 1.0
CONNECT_S = 3.0
# A handshake costs a server almost nothing, so an answer later than this means that the server
# hangs. Requests for rewards have no such limit, only the deadline of the call, because the model
# may be slow.
HANDSHAKE_S = 10.0


_REDIRECTS = (301, 302, 303, 307, 308)


def cause_of(error: BaseException, limit_s: float | None = None) -> str:
    """Explain in a few words, for an error message, why a connection failed with ``error``.

    ``limit_s`` is the time limit of the whole request, in seconds; None if it had none.
    """
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
        if limit_s is None:
            return "no answer in time"
        # If the limit is not above that of a connection, it is unknown whether there was one.
        if limit_s <= CONNECT_S:
            return f"no answer within {limit_s:g} s"
        return f"the server accepts connections, but did not answer within {limit_s:g} s"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "the connection was lost before the answer was complete"
    return short(text) or type(error).__name__


def redirect_of(status: int, headers: Mapping[str, str], url: str, path: str = "") -> str | None:
    """Explain, for an error message, where an answer redirects a request; None if it does not.

    No client follows redirects: after a 301 or 302, the POST of a sample would become a GET.

    Args:
        status: HTTP status of the answer.
        headers: headers of the answer.
        url: URL of the request.
        path: the end of ``url`` that the client has added to the URL of the server.
    """
    location = headers.get("Location")
    if status not in _REDIRECTS or location is None:
        return None
    target = hide_password(urljoin(url, location))
    server = target.removesuffix(path)
    is_same = server == hide_password(url).removesuffix(path)  # e.g. a slash is added to the path
    if target == f"{server}{path}" and not is_same and "?" not in server:
        return f"it redirects to {short(server)}; use that URL"
    return f"it redirects to {short(target)}; pass the URL of the server itself"


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
