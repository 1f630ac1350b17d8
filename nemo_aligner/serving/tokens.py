"""Secrets of a server: its bearer token from settings, checks of requests for it, and URLs without
passwords.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from nemo_aligner.utils.errors import ConfigError

_WANTED = "one word of ASCII letters, digits and signs"


def find_token(file: str | None, variable: str | None, key: str) -> str | None:
    """The token that a file or an environment variable holds, None where neither is named.

    ``key`` begins the names of both settings, which end in ``_file`` and ``_variable``; of a flag
    with hyphens.

    Raises:
        ConfigError: it cannot be read, is empty, or is none that a header can have.
    """
    joint = "-" if key.startswith("--") else "_"
    if file is not None:
        where = f"{key}{joint}file: {file}"
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except OSError as error:  # in words alone: the path is there already
            raise ConfigError(f"{where}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    elif variable is not None:
        where = f"{key}{joint}variable: {variable}"
        if variable not in os.environ:
            raise ConfigError(f"{where}: it is not set, wanted {_WANTED}")
        token = os.environ[variable].strip()
    else:
        return None
    if not is_token(token):
        raise ConfigError(f"{where}: it holds no token, wanted {_WANTED}")
    return token


def is_token(token: str) -> bool:
    """Tell whether a header can carry it."""
    return bool(token) and token.isascii() and token.isprintable() and " " not in token


def has_token(sent: Sequence[bytes], token: str) -> bool:
    """Tell whether a request's ``Authorization`` headers are a single one with the token."""
    if len(sent) != 1:
        return False
    scheme, _, given = sent[0].strip().partition(b" ")
    # In constant time: how much of it was right, nobody learns from the clock.
    is_right = hmac.compare_digest(given.strip(), token.encode())
    return scheme.lower() == b"bearer" and is_right


def hide_password(url: str) -> str:
    """A URL for people and logs: without the user and password that a proxy may ask for in it."""
    return re.sub(r"^([a-zA-Z]+://)?[^/?#]*@", r"\1", url)


def warn_of_open_server(host: str, token: str | None, key: str) -> None:
    """Warn of a server without a token that other machines can reach."""
    if token is None and not is_loopback(host):
        print(
            f"Warning: {host} is reached from other machines, and there is no token ({key}_file, "
            f"{key}_variable): whoever reaches the port is answered",
            flush=True,
        )


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
