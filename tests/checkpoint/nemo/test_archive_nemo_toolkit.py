"""nemo-toolkit's connector reads archives of this package, and writes ones that it reads."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.write import write_nemo
from tests.harness.environments import kept_environment, make_environment

REQUIREMENTS = ("nemo_toolkit[core]==3.0.0", "lightning==2.4.0")
CONFIG = {"num_layers": 2, "layernorm_epsilon": 1e-5, "bias": False, "vocab_size": 320}
WORKER = """
import json, os, sys
from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
from omegaconf import OmegaConf

ours, folder, theirs = sys.argv[1:]
os.makedirs(folder)
SaveRestoreConnector._unpack_nemo_file(path2file=ours, out_folder=folder)
SaveRestoreConnector._make_nemo_file_from_folder(filename=theirs, source_dir=folder)
config = OmegaConf.load(os.path.join(folder, "model_config.yaml"))
print("config:" + json.dumps(OmegaConf.to_container(config, resolve=True)))
"""


@pytest.fixture(scope="module")
def nemo_python() -> Path:
    """Python with nemo-toolkit, in a separate environment."""
    if not hasattr(tarfile, "data_filter"):
        pytest.skip("nemo-toolkit unpacks with tarfile's filters, which Python 3.11.4 brought")

    def make(folder: Path) -> None:
        make_environment(folder, *REQUIREMENTS)

    return kept_environment("nemo_toolkit", REQUIREMENTS, make) / "bin" / "python"


def test_both_directions(nemo_python: Path, tmp_path: Path) -> None:
    weights, tokenizer = tmp_path / "w", tmp_path / "t"
    for folder, name in ((weights, ".metadata"), (tokenizer, "tokenizer.json")):
        folder.mkdir()
        (folder / name).write_text(name)
    ours, unpacked, theirs = (tmp_path / name for name in ("ours.nemo", "unpacked", "theirs.nemo"))
    write_nemo(ours, CONFIG, weights, tokenizer, {"version": 1})

    done = subprocess.run(
        [nemo_python, "-c", WORKER, ours, unpacked, theirs],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("config:"))
    config = json.loads(line.removeprefix("config:"))
    assert config == {**CONFIG, "tokenizer": {"library": "huggingface", "type": "nemo:tokenizer"}}
    with open_nemo(theirs) as folder:
        assert folder.config == config
        assert folder.contract == {"version": 1}
        assert (folder.weights / ".metadata").read_text() == ".metadata"
        assert (folder.tokenizer / "tokenizer.json").read_text() == "tokenizer.json"
