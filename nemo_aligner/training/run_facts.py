"""Facts about a run for its report: versions, data, scoring contract and memory.

``RunFacts`` writes them to ``run_facts.json``, which ``nemo-aligner report`` shows.
"""

from __future__ import annotations

import json
import platform
import resource
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import nemo_aligner
from nemo_aligner.checkpoint.run_folder import FACTS_NAME
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.data.report import FileReport
from nemo_aligner.data.training_data import TrainingData
from nemo_aligner.training.side_outputs import RUN_FOLDER, attempt_output
from nemo_aligner.utils.finite import finite_or_none
from nemo_aligner.utils.writing import write_lines

_PACKAGES = ("torch", "megatron-core", "transformers", "tokenizers", "numpy")


class RunFacts:
    """Collects facts about a run, and writes them to ``run_facts.json`` for the report.

    The file is written at the start of the run, with the peak memory so far after every validation,
    and with the exported model's metrics at the end. If it cannot be written, a message is printed,
    and it is not written any more.
    """

    def __init__(self, config: TrainConfig, data: TrainingData, ranks: int) -> None:
        self._path = Path(config.exp_manager.explicit_log_dir) / FACTS_NAME
        self._is_dropped = False
        names = data.names_given(config.model.data.data_prefix)
        self._facts: dict[str, Any] = {
            "ranks": ranks,
            "described": [],
            "data": [
                {**describe_file(report), "path": names[report.path]}
                for dataset in data.datasets
                for report in dataset.reports
            ],
            "validation_records": {dataset.name: len(dataset) for dataset in data.validation},
            **describe_contract(data.contract),
            "versions": find_versions(),
        }

    def begin(self, described: Sequence[str]) -> None:
        """Write the file at the start of the run; ``described`` are the lines that it prints."""
        self._facts["described"] = list(described)
        self.write()

    def end(self, weights: str, metrics: Mapping[str, float]) -> None:
        """Write the file at the end of the run, with the held-out metrics of the exported model.

        Args:
            weights: the steps whose weights the model has, such as ``step 400``.
            metrics: its metrics on the validation sets, named ``set/metric``.
        """
        self._facts["exported"] = {"weights": weights, "metrics": finite_or_none(metrics)}
        self.write()

    def write(self) -> None:
        """Write the file again, with the peak memory so far."""
        if not self._is_dropped:
            consequence = "the report will lack facts of this run"
            self._is_dropped = not attempt_output(
                self._write_file, self._path.name, "writing", consequence
            )

    def _write_file(self) -> None:
        content = json.dumps({**self._facts, "peak_memory": peak_memory()}, indent=2)
        write_lines(self._path, [content], RUN_FOLDER)


def describe_file(report: FileReport) -> dict[str, Any]:
    """Convert the summary of a data file to plain JSON values, for the run's report.

    The run prints the same summary as a table.
    """
    return {
        "name": report.name,
        "path": report.path,
        "format": report.summary.format,
        "rows": [[name, str(value)] for name, value in report.rows()],
        "malformed": [str(line) for line in report.malformed],
    }


def describe_contract(contract: ScoringContract) -> dict[str, Any]:
    """Return the scoring contract's hash and fields as plain JSON values, for the run's report."""
    return {"contract_hash": contract.hash, "contract": contract.to_dict()}


def find_versions() -> dict[str, str]:
    """Return the versions of this package, its main dependencies, Python and the machine."""
    versions = {"nemo_aligner": nemo_aligner.__version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    versions["system"] = f"{platform.system()} {platform.machine()}"
    if torch.cuda.is_available():
        versions["GPU"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return versions


def peak_memory() -> dict[str, int]:
    """Return the peak memory of this process in bytes: on the host (RSS), and on its GPU."""
    peaks = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peaks["GPU"] = torch.cuda.max_memory_allocated()
    return peaks
