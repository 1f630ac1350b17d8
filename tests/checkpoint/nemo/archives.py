"""Small archives, whose weights and tokenizer are not looked into; and hostile ones."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from nemo_aligner.checkpoint.nemo.open import open_nemo

CONFIG = {"vocab_size": 320, "num_layers": 2, "layernorm_epsilon": 1e-5, "precision": "bf16"}


CONTRACT = {"version": 1, "template": "{{ messages }} é"}


def check(path: Path) -> Path:
    """Open an archive, compare its content, and give the folder it was unpacked to."""
    with open_nemo(path) as folder:
        assert folder.config == {
            **CONFIG,
            "tokenizer": {"library": "huggingface", "type": "nemo:tokenizer"},
        }
        assert folder.contract == CONTRACT
        assert (folder.weights / "__0_0.distcp").read_bytes() == b"__0_0.distcp" * 1000
        assert [file.name for file in folder.tokenizer.iterdir()] == ["tokenizer.json"]
        return folder.root


def write_tar(path: Path, *members: tuple[str, dict], config: str = "vocab_size: 320") -> Path:
    """An otherwise good archive with the given extra members (name, TarInfo attributes)."""
    with tarfile.open(path, "w") as tar:
        for name, attributes in (*members, ("./model_weights", {"type": tarfile.DIRTYPE})):
            member = tarfile.TarInfo(name)
            data = attributes.pop("data", b"")
            member.size = len(data)
            for key, value in attributes.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(data))
        member = tarfile.TarInfo("./model_config.yaml")
        member.size = len(config.encode())
        tar.addfile(member, io.BytesIO(config.encode()))
    return path
