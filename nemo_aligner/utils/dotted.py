"""Objects of a user's code, named as ``package.module:NAME`` in settings and between processes."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from typing import Any

from nemo_aligner.utils.errors import ConfigError


def import_dotted(name: str, key: str, expected: str) -> Any:
    """Import the object that ``package.module:NAME`` names.

    Args:
        name: the value of the setting.
        key: the setting, for errors.
        expected: what the setting takes, for errors.

    Raises:
        ConfigError: ``name`` has another form, or there is no such module or name in it.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{key}: got {name!r}, {expected}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        is_lost = isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name))
        advice = ". Put the folder of the module on PYTHONPATH" if is_lost else ""
        raise ConfigError(f"{key}: got {name!r}, {expected}: {error}{advice}") from error


def source_digest(name: str) -> str:
    """Return the sha256 of the file of the module in ``package.module:NAME``, which is imported.

    A result made with an object of a user's code is made again if the digest changes. The digest is
    empty for a module without a file.
    """
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
