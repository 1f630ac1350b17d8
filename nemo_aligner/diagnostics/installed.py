"""Which packages are there, and whether they are those that this one asks for."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from nemo_aligner import __version__
from nemo_aligner.config.packaged import DISTRIBUTION, find_conflict, install_command
from nemo_aligner.diagnostics.finding import Finding, Verdict
from nemo_aligner.errors import short

_IMPORTED = "nemo_aligner"
_ALWAYS_SHOWN = ("torch", "megatron-core", "transformers", "omegaconf", "numpy")
# The extras for people who use the package, and what each is good for.
_EXTRAS = {
    "serving": "the reward server and its client",
    "gguf": "converting .gguf files",
    "zarr": "reading NeMo's older checkpoints, whose weights are zarr",
    "wandb": "logging to Weights & Biases",
    "mlflow": "logging to MLflow",
}
_TORCH_OF_VARLEN = "2.10"


def packages() -> Iterator[Finding]:
    """Python, this package, what it requires and what it can use."""
    ours = _requirements()
    yield _python()
    yield _this_package()
    for requirement in ours.get("", []):
        found = _required(requirement)
        if requirement.name in _ALWAYS_SHOWN or found.verdict is not Verdict.ok:
            yield found
    if not ours:
        yield from _by_name_alone()
    yield from _imports()
    for extra, purpose in _EXTRAS.items():
        yield _optional(extra, purpose, ours.get(extra, []))
    if importlib.util.find_spec("pytriton") is not None:
        yield _triton_binary()


def gpu_packages() -> Iterator[Finding]:
    """What makes a GPU fast beside torch; nothing of it is used on a CPU."""
    for name, distribution in (("TransformerEngine", "transformer_engine"), ("Apex", "apex")):
        if importlib.util.find_spec(distribution) is None:
            advice = f"optional, on GPUs: without {name} megatron-core uses torch's own kernels"
            yield Finding(name, "not installed", Verdict.note, advice)
        else:
            yield Finding(name, version_of(distribution) or "installed")


def flash_attention() -> Finding:
    """Whether torch, which is there, has the attention that GPUs use."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return Finding(
            "flash attention",
            "torch has none for packed sequences",
            Verdict.note,
            f"attention is slower than with torch {_TORCH_OF_VARLEN} or newer",
        )
    return Finding("flash attention", "torch's, for packed sequences")


def version_of(distribution: str) -> str | None:
    """The version of an installed package; None if it is not."""
    try:
        return importlib.metadata.version(distribution)
    except PackageNotFoundError:
        return None


def import_torch() -> Any:
    """torch; None where it is missing or broken."""
    try:
        return importlib.import_module("torch")
    except Exception:  # a library that does not fit raises anything
        return None


def _requirements() -> dict[str, list[Any]]:
    """By extra, "" for none of them: what this package asks for on this machine."""
    try:
        from packaging.requirements import Requirement

        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except (ImportError, PackageNotFoundError):
        return {}
    found: dict[str, list[Any]] = {}
    for requirement in map(Requirement, lines):
        for extra in ("", *_EXTRAS):
            marker = requirement.marker
            fits = marker is None or marker.evaluate({"extra": extra})
            if fits and (not extra or marker is not None):
                found.setdefault(extra, []).append(requirement)
    return found


def _python() -> Finding:
    version = platform.python_version()
    try:
        from packaging.specifiers import SpecifierSet

        wanted = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"]
    except (ImportError, PackageNotFoundError):
        return Finding("python", version)
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("python", version)
    return Finding("python", version, Verdict.missing, f"wanted {wanted}")


def _this_package() -> Finding:
    conflict = find_conflict()
    if conflict is not None:
        return Finding(_IMPORTED, __version__, Verdict.missing, conflict)
    if version_of(DISTRIBUTION) is None:
        advice = f"it is not installed, so what it requires is not checked: {install_command()}"
        return Finding(_IMPORTED, __version__, Verdict.note, advice)
    return Finding(_IMPORTED, f"{__version__}, of {DISTRIBUTION}")


def _by_name_alone() -> Iterator[Finding]:
    """What must be there, where this package's requirements or ``packaging`` are not."""
    for name in _ALWAYS_SHOWN:
        version = version_of(name)
        if version is None:
            advice = f"{install_command()} brings it; or activate the environment that has it"
            yield Finding(name, "not installed", Verdict.missing, advice)
        else:
            yield Finding(
                name, version, Verdict.note, "whether it is the version wanted is unknown"
            )


def _required(requirement: Any) -> Finding:
    version = version_of(requirement.name)
    wanted = f"pip install '{requirement.name}{requirement.specifier}'"
    if version is None:
        return Finding(requirement.name, "not installed", Verdict.missing, wanted)
    if not requirement.specifier.contains(version, prereleases=True):
        advice = f"wanted {requirement.specifier}: {wanted}"
        return Finding(requirement.name, version, Verdict.missing, advice)
    return Finding(requirement.name, version)


def _optional(extra: str, purpose: str, requirements: list[Any]) -> Finding:
    """One extra: installed as asked for, not there, or there and unfit."""
    findings = [_required(requirement) for requirement in requirements]
    value = ", ".join(f"{each.name} {each.value}" for each in findings) or "unknown"
    if all(each.verdict is Verdict.ok for each in findings) and findings:
        return Finding(f"[{extra}]", value)
    unfit = any(each.verdict is Verdict.missing and version_of(each.name) for each in findings)
    advice = f"for {purpose}: {install_command(extra)}"
    return Finding(f"[{extra}]", value, Verdict.missing if unfit else Verdict.note, advice)


def _imports() -> Iterator[Finding]:
    """What is installed and cannot be imported is as good as missing, and says why."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            value = f"cannot be imported: {type(error).__name__}: {short(error)}"
            yield Finding(name, value, Verdict.missing, f"pip install --force-reinstall {name}")


def _triton_binary() -> Finding:
    spec = importlib.util.find_spec("pytriton")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        binary = Path(folder) / "tritonserver" / "bin" / "tritonserver"
        if os.access(binary, os.X_OK):
            return Finding("Triton", "there, and executable")
    return Finding(
        "Triton",
        "no executable server in pytriton's folder",
        Verdict.missing,
        "pytriton's wheel for Linux has one: pip install --force-reinstall nvidia-pytriton",
    )
