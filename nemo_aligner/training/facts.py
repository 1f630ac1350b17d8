"""What a report says of a run beside its numbers: versions, data, contract, memory."""

from __future__ import annotations

import json
import platform
import resource
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import nemo_aligner
from nemo_aligner.checkpoint.run_folder import FACTS_NAME
from nemo_aligner.data.report import FileReport
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.data.write import replace_lines
from nemo_aligner.text.contract import ScoringContract

_PACKAGES = ("torch", "megatron-core", "transformers", "tokenizers", "numpy")


class RunFacts:
    """``run_facts.json`` in the folder of a run, written at its start and after every validation.

    ``described`` are lines that the start of the run says.
    """

    def __init__(self, run: Path, data: TrainingData, described: Sequence[str], ranks: int) -> None:
        self._path = run / FACTS_NAME
        self._facts = {
            "ranks": ranks,
            "described": list(described),
            "data": [
                describe_file(report) for dataset in data.datasets for report in dataset.reports
            ],
            "validation_records": {each.name: len(each) for each in data.validation},
            **describe_contract(data.contract),
            "versions": find_versions(),
        }
        self.write()

    def write(self) -> None:
        """Write the file, with the memory that has been needed so far."""
        content = json.dumps({**self._facts, "peak_memory": peak_memory()}, indent=2)
        replace_lines(self._path, [content])


def describe_file(report: FileReport) -> dict[str, Any]:
    """The start-up table of a file, as plain JSON values."""
    return {
        "name": report.name,
        "path": report.path,
        "format": report.summary.format,
        "rows": [[name, str(value)] for name, value in report.rows()],
        "malformed": [str(each) for each in report.malformed],
    }


def describe_contract(contract: ScoringContract) -> dict[str, Any]:
    """Its hash and its fields."""
    return {"contract_hash": contract.hash, "contract": contract.to_dict()}


def find_versions() -> dict[str, str]:
    """Of this package, of what it computes with, of Python and of the machine."""
    found = {"nemo_aligner": nemo_aligner.__version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["system"] = f"{platform.system()} {platform.machine()}"
    if torch.cuda.is_available():
        found["GPU"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return found


def peak_memory() -> dict[str, int]:
    """Bytes that this process has needed at most: resident on the host, allocated on its GPU."""
    found = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.max_memory_allocated()
    return found
