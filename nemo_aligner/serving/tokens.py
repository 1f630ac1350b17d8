"""Secrets of a server: read and compare the bearer token, and hide passwords in URLs."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from nemo_aligner.utils.errors import ConfigError

_VALID_TOKEN = "one word of ASCII letters, digits and punctuation"


def find_token(file: str | None, variable: str | None, key: str) -> str | None:
    """Read the bearer token from a file or an environment variable; None if neither is configured.

    ``key`` is the common prefix of both settings, which end in ``_file`` and ``_variable``, or in
    ``-file`` and ``-variable`` if the prefix is that of a command-line flag.

    Raises:
        ConfigError: the token cannot be read, is empty, or cannot be sent in a header.
    """
    joint = "-" if key.startswith("--") else "_"
    if file is not None:
        location = f"{key}{joint}file: {file}"
        try:
            token = Path(file).read_text(encoding="utf-8").strip()
        except OSError as error:  # strerror has only the reason; the location already has the path
            raise ConfigError(f"{location}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{location}: it is not text, wanted {_VALID_TOKEN}") from error
        except ValueError as error:  # the path has a null byte
            raise ConfigError(f"{location}: {error}. Correct the path") from error
    elif variable is not None:
        location = f"{key}{joint}variable: environment variable {variable}"
        if variable not in os.environ:
            raise ConfigError(f"{location} is not set: export it")
        token = os.environ[variable].strip()
    else:
        return None
    if not is_token(token):
        raise ConfigError(f"{location}: it holds no token, wanted {_VALID_TOKEN}")
    return token


def is_token(token: str) -> bool:
    """Return whether an HTTP header can carry the token: ASCII letters, digits and punctuation."""
    return bool(token) and token.isascii() and token.isprintable() and " " not in token


def has_token(sent: Sequence[bytes], token: str) -> bool:
    """Return whether a request has exactly one ``Authorization`` header, and the right token."""
    if len(sent) != 1:
        return False
    scheme, _, credentials = sent[0].strip().partition(b" ")
    # In constant time, so that the duration does not reveal how many characters were right.
    is_right = hmac.compare_digest(credentials.strip(), token.encode())
    return scheme.lower() == b"bearer" and is_right


def hide_password(url: str) -> str:
    """Remove the user and password from a URL, for messages and logs."""
    return re.sub(r"^([a-zA-Z]+://)?[^/?#]*@", r"\1", url)


def warn_of_open_server(host: str, token: str | None, key: str) -> None:
    """Print a warning if other machines can reach a server that requires no token."""
    if token is None and not is_loopback(host):
        print(
            f"Warning: other machines can reach {host}, and no token is set ({key}_file, "
            f"{key}_variable): anyone who reaches the port gets answers",
            flush=True,
        )


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached only from this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
