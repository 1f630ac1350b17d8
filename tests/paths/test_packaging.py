"""The wheel and its metadata, and the package as installed from a wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import nemo_aligner
from nemo_aligner.config import describe
from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.utils.errors import ConfigError
from tests.docs.pages import PAGES, name_of
from tests.harness import tiny
from tests.harness.launching import ROOT, run_code

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
ASK = """
from nemo_aligner.config.describe import checkout, install_command, settings_folder
from nemo_aligner.config.load import load_config
from nemo_aligner.config.training import TrainConfig
assert checkout() is None
print(settings_folder())
print(load_config(TrainConfig, [], "train_reward_model_cpu").model.freeze_layers)
print(install_command("gguf"))
print(install_command())
"""
# Prints which packages of others are loaded once a module has been imported, for each module.
LOADED = """
import importlib, sys
servers = {"pytriton", "fastapi", "uvicorn", "prometheus_client", "pydantic"}
slow = {"torch._dynamo", "lightning", "transformers"}
for name in sys.argv[1:]:
    importlib.import_module(f"nemo_aligner.{name}")
    print(name, *(servers | slow) & sys.modules.keys())
"""
NVIDIAS = "Metadata-Version: 2.2\nName: nemo_aligner\nVersion: 0.7.0\nAuthor: NVIDIA\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as ``pip wheel`` does. It builds a copy, since it leaves folders there."""
    source = tmp_path_factory.mktemp("source")
    for name in ("nemo_aligner", "conf"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-c", BUILD, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(wheel, folder, format="zip")
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python that finds the package and its metadata in ``folder`` first."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        cwd=folder.parent,
        env=tiny.environment(PYTHONPATH=str(folder)),
        capture_output=True,
        text=True,
    )


def test_wheel_has_every_file_of_the_package_and_the_settings(wheel: Path) -> None:
    package = ROOT / "nemo_aligner"
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    expected |= {
        f"nemo_aligner/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("conf/**/*.yaml")
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected


def test_wheel_metadata_limits_numpy_for_triton_alone(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    metadata = message_from_bytes((info / "METADATA").read_bytes())
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    limits = [
        requirement
        for requirement in requirements
        if requirement.name == "numpy" and "2.4" not in requirement.specifier
    ]
    assert [str(requirement.marker) for requirement in limits] == ['extra == "triton"']
    # No other extra, such as "all", installs it.
    assert "triton" not in {extra for requirement in requirements for extra in requirement.extras}


def test_wheel_metadata_has_the_name_that_the_package_looks_itself_up_by(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    metadata = message_from_bytes((info / "METADATA").read_bytes())
    assert (metadata["Name"], metadata["Version"]) == (
        describe.DISTRIBUTION,
        nemo_aligner.__version__,
    )
    assert "nemo-aligner = nemo_aligner.cli.main:main" in (info / "entry_points.txt").read_text()
    extras = set(metadata.get_all("Provides-Extra", []))
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    ours = [
        requirement
        for requirement in requirements
        if requirement.extras and requirement.name == metadata["Name"]
    ]
    assert len(ours) == 4
    assert {name for requirement in ours for name in requirement.extras} <= extras
    assert not [
        requirement
        for requirement in requirements
        if requirement.name.replace("_", "-") == "nemo-aligner"
    ]


def test_package_out_of_a_wheel_finds_its_settings_and_says_what_extras_bring(
    unpacked: Path,
) -> None:
    done = run(unpacked, "-c", ASK)
    assert done.returncode == 0, done.stderr
    folder, frozen, gguf, itself = done.stdout.splitlines()
    assert Path(folder) == unpacked / "nemo_aligner" / "conf"
    assert frozen == "20"
    assert gguf == "pip install 'gguf>=0.17' 'transformers>=5.23'"
    assert itself == "pip install megatron_reward-0.1.0-py3-none-any.whl"


def test_settings_are_found_by_name_where_there_is_no_such_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(TrainConfig, [], "recipes/lora_one_gpu").model.lora.rank > 0
    (tmp_path / "train_reward_model").write_text("model: {seed: 7}\n")
    assert load_config(TrainConfig, [], "train_reward_model").model.seed == 7
    messages = {
        "conf/train_reward_modle.yaml": "no such file; did you mean train_reward_model, which",
        "xyzzy.yaml": "no such file, and the package has evaluate_reward_model, gateway, ",
    }
    for name, message in messages.items():
        with pytest.raises(ConfigError, match=f"^{re.escape(name)}: there is {message}"):
            load_config(TrainConfig, [], name)


def test_conflict_with_nvidias_distribution_is_one_error(tmp_path: Path) -> None:
    info = tmp_path / "nemo_aligner-0.7.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(NVIDIAS)
    shutil.copytree(ROOT / "nemo_aligner", tmp_path / "nemo_aligner")
    message = "NVIDIA's nemo_aligner 0.7.0 is installed in the same environment as megatron-reward"
    done = run(tmp_path, "-m", "nemo_aligner", "plan", "--params=8B", "--gpus=8")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(message)
    report = " ".join(run(tmp_path, "-m", "nemo_aligner", "doctor").stdout.split())
    assert message in report
    assert run(tmp_path, "-m", "nemo_aligner", "--version").returncode == 0
    done = run(tmp_path, "-c", "import nemo_aligner; nemo_aligner.train")
    assert f"ImportError: {message}" in done.stderr


def test_install_lines_are_of_the_checkout_or_a_wheel_and_name_extras_that_there_are() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    optional = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", optional, re.MULTILINE))
    files = [*PAGES, *(ROOT / "nemo_aligner").rglob("*.py"), *(ROOT / "scripts").rglob("*.sh")]
    files += [ROOT / "Dockerfile", ROOT / "mkdocs.yml", *(ROOT / "benchmarks").glob("*.py")]
    wrong = []
    for path in files:
        text = path.read_text()
        for line in re.findall(r"pip(?:\s+|_)install[^`\n]*", text):
            named = re.findall(r"(?:\.|REPO\}|whl)\[([\w,]+)\]", line)
            unknown = {name for names in named for name in names.split(",")} - extras
            if re.search(r"[ \"']nemo[_-]aligner\b", line) or unknown:
                wrong.append(f"{name_of(path)}: {line}")
    assert wrong == []
    page = (ROOT / "docs" / "getting_started.md").read_text()
    assert {name for name in extras if not re.search(rf"\b{name}\b[`,\]]", page)} == set()


def test_extras_bring_all_that_is_imported_with_them_alone() -> None:
    """The client needs no extra, ``train`` no server packages, and a server no Triton.

    Nor does a command import what would double the time until it starts. One process imports them
    in this order, so each is charged with what those before it import.
    """
    front = {"fastapi", "uvicorn", "prometheus_client", "pydantic"}
    slow = {"torch._dynamo", "lightning", "transformers"}
    missing = {
        "serving.client": {"pytriton", *front},
        "integrations.trl": {"pytriton", *front},
        "integrations.nemo_rl": {"pytriton", *front},
        "evaluation.run": {"pytriton", *front, *slow},
        "training.run": {"pytriton", *front, *slow},
        "serving.run": {"pytriton", *slow},
    }
    done = run_code(LOADED, *missing, environment=tiny.environment())
    assert done.returncode == 0, done.stderr[-500:]
    loaded = {name: set(others) for name, *others in map(str.split, done.stdout.splitlines())}
    assert loaded.keys() == missing.keys()
    wrong = {name: loaded[name] & others for name, others in missing.items()}
    assert not any(wrong.values()), wrong
