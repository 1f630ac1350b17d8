"""``nemo_aligner.train``: ``nemo-aligner train`` in this process, from records of Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from nemo_aligner.api.reward_model import RewardModel, release_models
from nemo_aligner.checkpoint.run_folder import CHECKPOINTS_NAME, MODEL_NAME, step_folders
from nemo_aligner.config.load import check_needed, load_given
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.records import write_records
from nemo_aligner.evaluation.report import check_report, write_run_report
from nemo_aligner.utils.errors import ConfigError, StoppedError
from nemo_aligner.utils.processes import find_process, is_first_rank, leave_together

if TYPE_CHECKING:
    from nemo_aligner.training.loggers import Callback as OnProgress
    from nemo_aligner.training.trainer import Outcome

FilePath: TypeAlias = "str | PathLike[str]"
Records: TypeAlias = "FilePath | Iterable[FilePath] | Iterable[Mapping[str, Any]]"
"""A file or several, or records: dicts, a ``datasets.Dataset``, a DataFrame of pandas."""
NEEDED = ("pretrained_checkpoint.restore_from_path", "model.data.data_prefix.train")
DATA_NAME = "data"

_BASE = NEEDED[0]
_OUTPUT = "exp_manager.explicit_log_dir"
_PREFIX = "model.data.data_prefix"
_RECORDS = "records"


def train(
    base: FilePath | None = None,
    records: Records | None = None,
    *,
    validation: Records | Mapping[str, Records] | None = None,
    test: Records | Mapping[str, Records] | None = None,
    output: FilePath | None = None,
    config: FilePath | None = None,
    callback: OnProgress | None = None,
    **settings: Any,
) -> RewardModel:
    """Train a reward model as ``nemo-aligner train`` does, and return it when the run is over.

    The same call again goes on where a run stopped. Under torchrun every rank makes the same call.
    Records are written to ``data/`` in the run's folder, where rank 0 keeps them: files are what a
    run reads, indexes and resumes from, and what its report names.

    Args:
        base: ``pretrained_checkpoint.restore_from_path``
        records: what to train on, in any format that files have; record N is line N of its file
        validation: held-out records, or several sets of them by name
        test: what the finished model is measured on, likewise
        output: the run's folder, ``exp_manager.explicit_log_dir``
        config: a YAML file of settings, or the name of one that the package has
        callback: called on rank 0 with every metric that is logged; what it raises ends the run
        settings: those of the verb by the same keys, as ``**{"model.optim.lr": 1e-5}``

    Raises:
        AlignerError: what ends the verb, with the same message.
        StoppedError: ``trainer.max_time`` was up; all is saved.
        KeyboardInterrupt: after Ctrl-C, when the step under way is finished and saved; a second one
            later than a second after it leaves at once, and what was not saved is lost.
        SystemExit: SIGTERM or SIGUSR1 came, and all is saved, with the exit code of the verb.
    """
    given = _merged(settings, {_BASE: base, _OUTPUT: output})
    folder = Path(load_given(TrainConfig, given, config).exp_manager.explicit_log_dir)
    parts = {"train": records, "validation": validation, "test": test}
    _check_once(settings, [f"{_PREFIX}.{part}" for part, of in parts.items() if of is not None])
    # Their weights would lie beside the run's, which also starts a process group of its own.
    release_models()
    for part, of_part in parts.items():
        if of_part is not None:
            given[f"{_PREFIX}.{part}"] = _as_files(of_part, folder, part)
    whole = load_given(TrainConfig, given, config)
    check_needed(whole, TrainConfig, NEEDED)
    _check_came_to_its_end(run_training(whole, callback, in_program=True))
    return _trained(whole)


def run_training(
    config: TrainConfig, callback: OnProgress | None = None, in_program: bool = False
) -> Outcome:
    """The whole of a run, with its report; for the verb and for ``train``, see training/run.py.

    Raises:
        AlignerError: see ``nemo_aligner.training.run.train``; the report cannot be drawn.
    """
    if config.exp_manager.report:
        check_report("exp_manager.report")
    from nemo_aligner.training.run import train as run

    outcome = run(config, callback, in_program)
    if config.exp_manager.report and is_first_rank():
        write_run_report(Path(config.exp_manager.explicit_log_dir))
    return outcome


def _merged(settings: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in named.items() if value is not None}
    _check_once(settings, found)
    return {**settings, **found}


def _check_once(settings: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse a key that is given as an argument of its own, too."""
    for key in keys:
        if key in settings:
            raise ConfigError(f"{key}: got it twice, as a setting and as an argument; wanted one")


def _as_files(given: Any, folder: Path, part: str) -> list[str]:
    """The files of a part; records are written to some, named sets to one each."""
    if isinstance(given, Mapping):
        if part == "train":
            raise ConfigError(f"records: got a mapping of {_names(given)}, wanted one of these")
        return [path for name, each in given.items() for path in _files(each, folder, part, name)]
    return _files(given, folder, part, _RECORDS)


def _names(given: Mapping[str, Any]) -> str:
    return ", ".join(map(str, given)) or "nothing"


def _files(given: Any, folder: Path, part: str, name: str) -> list[str]:
    if isinstance(given, str | PathLike):
        return [os.fspath(given)]
    is_frame = hasattr(given, "columns") and hasattr(given, "to_dict")
    rows = given.to_dict(orient="records") if is_frame else given
    if isinstance(rows, list | tuple) and rows and isinstance(rows[0], str | PathLike):
        return [os.fspath(path) for path in rows]
    path = folder / DATA_NAME / part / f"{name}.jsonl"
    # Of a run that has begun training records cannot change, and what it learned from is kept.
    may_replace = part != "train" or not step_folders(folder / CHECKPOINTS_NAME)
    count = _on_first_rank(partial(write_records, path, rows, may_replace))
    if is_first_rank():
        print(f"{part}: {count} records, as {path}", flush=True)
    return [str(path)]


def _on_first_rank(write: Callable[[], int]) -> int:
    """Run it there, and wait for it on the others, before the run has its own process group."""
    if find_process(os.environ).world_size == 1:
        return write()
    from nemo_aligner.distributed.collectives import on_main
    from nemo_aligner.distributed.launch import launch

    with launch():
        return on_main(write)


def _check_came_to_its_end(outcome: Outcome) -> None:
    """Raise what a caller of ``train`` meets where the run was stopped and there is no model."""
    reason = outcome.stopped_by
    if reason is None:
        return
    where = "before the first step"
    if outcome.step:
        where = f"after step {outcome.step}, which is saved: the same call goes on from there"
    said = f"the run was stopped by {reason} {where}"
    if reason.is_ctrl_c:
        raise KeyboardInterrupt(said)
    if reason.is_signal:
        raise SystemExit(leave_together(reason.exit_code))
    raise StoppedError(said)


def _trained(config: TrainConfig) -> RewardModel:
    """The model of a run that came to its end, to be scored as it was validated."""
    model, folder = config.model, Path(config.exp_manager.explicit_log_dir)
    settings = {
        "model.tensor_model_parallel_size": model.tensor_model_parallel_size,
        "model.pipeline_model_parallel_size": model.pipeline_model_parallel_size,
        "model.context_parallel_size": model.context_parallel_size,
        "model.cp_comm_type": model.cp_comm_type.value,
        "model.expert_model_parallel_size": model.expert_model_parallel_size,
        "model.sequence_parallel": model.sequence_parallel,
        "model.batch_invariant": model.batch_invariant,
        "model.batch_invariant_rows": model.batch_invariant_rows,
        "model.cuda_graphs": model.cuda_graphs,
        "model.pointwise_kernels": model.pointwise_kernels and model.pointwise_kernels.value,
        "model.micro_batch_tokens": max(model.micro_batch_tokens, model.data.seq_length),
    }
    return RewardModel({"rm_model_file": folder / CHECKPOINTS_NAME / MODEL_NAME, **settings})
