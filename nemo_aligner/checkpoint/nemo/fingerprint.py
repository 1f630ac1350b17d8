"""The model fingerprint: which weights an archive holds, as 32 hexadecimal characters.

The scoring contract's hash covers how a sample becomes a score, but not the weights. The
fingerprint covers the weights, the head and the settings that shape the model. It is made once,
while the weights are saved, and stored in ``model_fingerprint.json``, near the beginning of the
archive, so that reading it reads no weights. It does not depend on the layout that a model was
saved with (see ``weights/sums.py``).

Archives written before have none stored. Theirs is the hash of what ``checksums.json`` lists for
settings and weights: the same for every copy of the archive, but another one once the model is
saved again, or at another layout.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from nemo_aligner.checkpoint.nemo.archive import CHECKSUMS_NAME, no_such_archive, read_members
from nemo_aligner.checkpoint.nemo.folder import (
    CONFIG_NAME,
    FINGERPRINT_NAME,
    WEIGHTS_NAME,
    NemoFolder,
)
from nemo_aligner.checkpoint.safe_load import parse_json, read_text
from nemo_aligner.checkpoint.weights.sums import WeightSums
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

_CHARACTERS = 32
_FINGERPRINT = re.compile(f"[0-9a-f]{{{_CHARACTERS}}}")


def build_fingerprint(sums: WeightSums, config: Mapping[str, Any]) -> str:
    """Fingerprint of a model with these weights and these settings."""
    shape = ModelShape.from_config(config)
    longrope = None if shape.longrope is None else asdict(shape.longrope)
    return _hash_of({"weights": sums, "shape": shape.as_fingerprint(), "longrope": longrope})


def fingerprint_of_ensemble(members: Sequence[str | None]) -> str | None:
    """Fingerprint of several models whose rewards are merged, in their order; of one its own."""
    if None in members or len(members) == 1:
        return None if None in members else members[0]
    return _hash_of(list(members))


def read_fingerprint(source: str | Path) -> str | None:
    """Read the fingerprint of a ``.nemo`` file, or of the folder it unpacks to.

    It reads the headers of the archive's members up to the fingerprint, and no weights.

    Returns:
        None if the archive has neither a fingerprint nor checksums.

    Raises:
        CheckpointError: there is no such archive, it cannot be read, or its fingerprint is none.
    """
    path = Path(source)
    if path.is_dir():
        return _of_folder(path, path)
    if not path.is_file():
        raise CheckpointError(no_such_archive(path))
    return _parse(read_members(path, FINGERPRINT_NAME, CHECKSUMS_NAME), path)


def fingerprint_of(folder: NemoFolder) -> str | None:
    """Read the fingerprint of an archive that is open; see ``read_fingerprint``."""
    return _of_folder(folder.root, folder.source)


def _of_folder(root: Path, source: Path) -> str | None:
    names = [name for name in (FINGERPRINT_NAME, CHECKSUMS_NAME) if (root / name).is_file()]
    return _parse({name: read_text(root / name, f"{source}: {name}") for name in names}, source)


def _parse(texts: Mapping[str, str], source: Path) -> str | None:
    """Find the fingerprint in an archive's small files, by their names."""
    if FINGERPRINT_NAME not in texts:
        if CHECKSUMS_NAME not in texts:
            return None
        return _of_checksums(parse_json(texts[CHECKSUMS_NAME], f"{source}: {CHECKSUMS_NAME}"))
    where = f"{source}: {FINGERPRINT_NAME}"
    fingerprint = parse_json(texts[FINGERPRINT_NAME], where).get("fingerprint")
    if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise CheckpointError(
            f"{where}: got {shown(fingerprint)}, wanted {_CHARACTERS} hexadecimal characters. "
            "Use a copy of the archive that was not changed"
        )
    return fingerprint


def check_expected_fingerprint(
    fingerprint: str | None, expected: str | None, key: str, source: str
) -> None:
    """Refuse a model whose fingerprint is not ``expected``; None takes any.

    Raises:
        ConfigError: it names both; ``key`` is the setting that held the expected one.
    """
    if expected is not None and expected != fingerprint:
        raise ConfigError(
            f"{key}: got a model with the fingerprint {fingerprint or '(none)'} ({source}), wanted "
            f"{expected}. Use the archive that has it, or set {key} to the new model's"
        )


def _of_checksums(sums: Mapping[str, Any]) -> str:
    of_model = {
        name: digest
        for name, digest in sums.items()
        if name == CONFIG_NAME or WEIGHTS_NAME in PurePosixPath(name).parts
    }
    return _hash_of(of_model)


def _hash_of(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_CHARACTERS]
