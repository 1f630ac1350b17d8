"""A model's config, wherever it lies, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_aligner.errors import ConfigError


def read_model_config(path: Path) -> Mapping[str, Any]:
    """A model_config.yaml, or that of a .nemo archive or of the folder it unpacks to.

    Raises:
        ConfigError: it is not there, or no YAML mapping.
        CheckpointError: an archive or a folder that cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"config: got {path}, which is not there")
    if path.suffix == ".nemo" or path.is_dir():
        from nemo_aligner.checkpoint.nemo.open import open_nemo

        with open_nemo(path, with_weights=False) as folder:
            return folder.config
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config: {path}: got {type(config).__name__}, wanted a mapping")
    return config
