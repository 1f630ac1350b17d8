"""``common.pt``: what a checkpoint holds beside tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nemo_aligner.errors import CheckpointError


def read_common(folder: Path) -> dict[str, Any]:
    """``common.pt``: what a checkpoint holds beside tensors, as plain data.

    megatron-core's list of harmless classes counts as plain, ``argparse.Namespace`` among them.
    """
    common = folder / "common.pt"
    try:
        return torch.load(common, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{common}: refused or unreadable: {error}") from error
