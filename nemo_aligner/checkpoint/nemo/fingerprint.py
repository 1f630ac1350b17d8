"""The model fingerprint: 32 hexadecimal characters that identify the weights in an archive.

The scoring contract's hash covers how a sample becomes a score, but not the weights. The
fingerprint covers the weights, the head and the settings that define the model's shape. It is
computed once, while the weights are saved, and stored in ``model_fingerprint.json``, near the
beginning of the archive, so that it can be read without the weights. It does not depend on the
parallel layout with which a model was saved (see ``weights/sums.py``).

The file also stores the fingerprint of the body, that is, of all weights except LoRA adapters and
the head. Models whose bodies have the same fingerprint can share the memory of these weights.

Archives of earlier versions store no fingerprint. Theirs is a hash of the checksums that
``checksums.json`` lists for settings and weights: the same for every copy of the archive, but
different after the model is saved again, or saved with another layout. They have no fingerprint of
the body.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import Any

from nemo_aligner.checkpoint.conversion_cache import find_archive
from nemo_aligner.checkpoint.decoder_tensors import HEAD_PREFIX, PREFIX
from nemo_aligner.checkpoint.nemo.archive import no_such_archive, read_members
from nemo_aligner.checkpoint.nemo.checksums import CHECKSUMS_NAME
from nemo_aligner.checkpoint.nemo.folder import (
    CONFIG_NAME,
    FINGERPRINT_NAME,
    WEIGHTS_NAME,
    NemoFolder,
)
from nemo_aligner.checkpoint.safe_load import parse_json, read_text
from nemo_aligner.checkpoint.weights.sums import WeightSums
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.lora import is_of_adapter
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

_CHARACTERS = 32
_FINGERPRINT = re.compile(f"[0-9a-f]{{{_CHARACTERS}}}")
# Keys of ``model_fingerprint.json``.
_MODEL, _BODY = "fingerprint", "body"


def build_fingerprint(sums: WeightSums, config: Mapping[str, Any]) -> str:
    """Compute a model's fingerprint from the checksums of its weights and from its settings."""
    return _hash_as_json(_describe_model(sums, ModelShape.from_config(config)))


def build_body_fingerprint(sums: WeightSums, config: Mapping[str, Any]) -> str:
    """Compute the fingerprint of a model's body, which has no LoRA adapters and no head."""
    shape = ModelShape.from_config(config)
    base_precision = None if shape.lora is None else shape.lora.base_precision
    description = _describe_model(
        {name: entry for name, entry in sums.items() if is_of_body(name)},
        replace(shape, lora=None, head=None),
    )
    precision = None if base_precision is None else base_precision.value
    return _hash_as_json({**description, "base_precision": precision})


def is_of_body(name: str) -> bool:
    """Tell from a tensor's stored name if it belongs to neither a LoRA adapter nor the head."""
    return not (is_of_adapter(name) or name.startswith(PREFIX + HEAD_PREFIX))


def _describe_model(sums: WeightSums, shape: ModelShape) -> dict[str, Any]:
    longrope = None if shape.longrope is None else asdict(shape.longrope)
    return {"weights": sums, "shape": shape.as_fingerprint(), "longrope": longrope}


def build_fingerprints(sums: WeightSums, config: Mapping[str, Any]) -> dict[str, str]:
    """Build the content of ``model_fingerprint.json``."""
    return {_MODEL: build_fingerprint(sums, config), _BODY: build_body_fingerprint(sums, config)}


def fingerprint_of_ensemble(members: Sequence[str | None]) -> str | None:
    """Compute an ensemble's fingerprint from its members' fingerprints, in their order.

    An ensemble of one model has that model's fingerprint. The result is None if a member has no
    fingerprint.
    """
    if None in members or len(members) == 1:
        return None if None in members else members[0]
    return _hash_as_json(list(members))


def read_fingerprint(source: str | Path) -> str | None:
    """Read the fingerprint of a ``.nemo`` file, or of the folder it unpacks to.

    It reads only the beginning of the archive, up to the fingerprint, and no weights. A Hugging
    Face model is converted first, as by ``open_nemo``.

    Returns:
        The fingerprint; None if the archive has neither a fingerprint nor checksums.

    Raises:
        CheckpointError: there is no such archive, it cannot be read, or its fingerprint is invalid.
    """
    path = find_archive(Path(source))
    if path.is_dir():
        return _read_from_folder(path, path)
    if not path.is_file():
        raise CheckpointError(no_such_archive(path))
    return _parse_fingerprint(read_members(path, FINGERPRINT_NAME, CHECKSUMS_NAME), path)


def fingerprint_of(folder: NemoFolder) -> str | None:
    """Read the fingerprint of an archive that is already open.

    The result is None if the archive has neither a fingerprint nor checksums.
    """
    return _read_from_folder(folder.root, folder.source)


def body_fingerprint_of(folder: NemoFolder) -> str | None:
    """Read the fingerprint of the body; None if the archive is of a version that wrote none.

    Raises:
        CheckpointError: the fingerprint is invalid.
    """
    path, location = folder.root / FINGERPRINT_NAME, f"{folder.source}: {FINGERPRINT_NAME}"
    if not path.is_file():
        return None
    stored = parse_json(read_text(path, location), location)
    return _check_fingerprint(stored[_BODY], location) if _BODY in stored else None


def _read_from_folder(root: Path, source: Path) -> str | None:
    names = [name for name in (FINGERPRINT_NAME, CHECKSUMS_NAME) if (root / name).is_file()]
    members = {name: read_text(root / name, f"{source}: {name}") for name in names}
    return _parse_fingerprint(members, source)


def _parse_fingerprint(members: Mapping[str, str], source: Path) -> str | None:
    """Return the stored fingerprint, or one derived from the checksums; None if both are missing.

    Args:
        members: content of the archive's small files, by their names.
    """
    if FINGERPRINT_NAME not in members:
        if CHECKSUMS_NAME not in members:
            return None
        checksums = parse_json(members[CHECKSUMS_NAME], f"{source}: {CHECKSUMS_NAME}")
        return _fingerprint_from_checksums(checksums)
    location = f"{source}: {FINGERPRINT_NAME}"
    return _check_fingerprint(parse_json(members[FINGERPRINT_NAME], location).get(_MODEL), location)


def _check_fingerprint(fingerprint: Any, location: str) -> str:
    if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise CheckpointError(
            f"{location}: got {shown(fingerprint)}, wanted {_CHARACTERS} hexadecimal characters. "
            "Use an unchanged copy of the archive"
        )
    return fingerprint


def check_expected_fingerprint(
    fingerprint: str | None, expected: str | None, key: str, source: str
) -> None:
    """Raise ConfigError if a model's ``fingerprint`` is not ``expected``.

    If ``expected`` is None, every model passes.

    Args:
        key: the setting that holds the expected fingerprint.
        source: name of the model, for the error.

    Raises:
        ConfigError: the fingerprints differ; the message has both.
    """
    if expected is not None and expected != fingerprint:
        raise ConfigError(
            f"{key}: got a model with the fingerprint {fingerprint or '(none)'} ({source}), wanted "
            f"{expected}. Use the archive that has it, or set {key} to the new model's fingerprint"
        )


def _fingerprint_from_checksums(checksums: Mapping[str, Any]) -> str:
    """Hash the checksums of an archive's settings and weights."""
    model_checksums = {
        name: digest
        for name, digest in checksums.items()
        if name == CONFIG_NAME or WEIGHTS_NAME in PurePosixPath(name).parts
    }
    return _hash_as_json(model_checksums)


def _hash_as_json(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_CHARACTERS]
