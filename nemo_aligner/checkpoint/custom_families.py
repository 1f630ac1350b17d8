"""Model families defined in a user's code, made known to the processes that this one starts.

The environment variable ``NEMO_ALIGNER_FAMILIES`` names them, as ``package.module:NAME`` separated
by commas. ``register_family`` adds to it, because conversions, ranks and servers run in separate
processes. A user sets it to make a family known to ``nemo-aligner`` commands.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.utils.dotted import import_dotted, source_digest

VARIABLE = "NEMO_ALIGNER_FAMILIES"


def announce_family(family: Any) -> None:
    """Add a family to the environment variable, under the name that it has in a module.

    A family that no module but the main script names is added as ``:family``. Other processes
    cannot import it; ``unreachable_families`` lists it there.
    """
    entries = _entries()
    entry = next((entry for entry in entries if _is_entry_of(entry, family)), None)
    if entry is None:
        os.environ[VARIABLE] = ",".join([*entries, _find_name(family) or f":{family.name}"])


def load_families() -> list[Any]:
    """Import the families that the environment variable names.

    Raises:
        ConfigError: there is no such module, or no such name in it.
    """
    return [_import(entry) for entry in _entries() if not entry.startswith(":")]


def unreachable_families() -> list[str]:
    """List the names of families that the parent process could not pass on."""
    return [entry.removeprefix(":") for entry in _entries() if entry.startswith(":")]


def describe_custom_family(model: Path) -> list[str]:
    """Return a digest of the code of the custom family that the model may have; often empty.

    Args:
        model: a folder with ``config.json``, or a GGUF file, which any of the families may have.
    """
    families = {entry: _import(entry) for entry in _entries() if not entry.startswith(":")}
    if not families:
        return []
    kind = read_json(model / "config.json").get("model_type") if model.is_dir() else None
    return [
        source_digest(entry)
        for entry, family in families.items()
        if not model.is_dir() or getattr(family, "name", None) == kind
    ]


def _entries() -> list[str]:
    return [entry for entry in os.environ.get(VARIABLE, "").split(",") if entry]


def _import(entry: str) -> Any:
    return import_dotted(entry, VARIABLE, "wanted package.module:NAME of a ModelFamily")


def _is_entry_of(entry: str, family: Any) -> bool:
    module, _, name = entry.partition(":")
    return entry == f":{family.name}" or getattr(sys.modules.get(module), name, None) is family


def _find_name(family: Any) -> str | None:
    """Find a module that has ``family`` under a name at its top level: ``package.module:NAME``."""
    for module_name, module in list(sys.modules.items()):
        if module_name == "__main__":
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is family:
                return f"{module_name}:{name}"
    return None
