"""``nemo_aligner.train``: train a reward model in this process, on files or on Python objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from nemo_aligner.api.reward_model import RewardModel, release_models
from nemo_aligner.checkpoint.run_folder import CHECKPOINTS_NAME, MODEL_NAME, step_folders
from nemo_aligner.config.load import check_needed, load_settings
from nemo_aligner.config.model import LAYOUT_KEYS
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.data.records import table_library, write_records
from nemo_aligner.evaluation.report import check_report, write_run_report
from nemo_aligner.utils.errors import ConfigError, StoppedError, shown
from nemo_aligner.utils.processes import find_process, is_first_rank, leave_together

if TYPE_CHECKING:
    from nemo_aligner.training.loggers import Callback as OnProgress
    from nemo_aligner.training.trainer import Outcome

FilePath: TypeAlias = "str | PathLike[str]"
Records: TypeAlias = "FilePath | Iterable[FilePath] | Iterable[Mapping[str, Any]]"
"""A file, several files, or records: dicts, a ``datasets.Dataset``, or a pandas DataFrame."""
NEEDED = ("pretrained_checkpoint.restore_from_path", "model.data.data_prefix.train")
DATA_NAME = "data"

_Result = TypeVar("_Result")
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
    """Train a reward model as ``nemo-aligner train`` does, and return the trained model.

    If a run was stopped, the same call resumes it. Under torchrun, every rank makes the same call.
    Records that are Python objects are first written to files in ``data/`` in the run's folder,
    because a run reads, indexes and resumes from files.

    Args:
        base: the base or reward model to start from (``pretrained_checkpoint.restore_from_path``):
            a ``.nemo`` archive, a Hugging Face folder, a ``.gguf`` file or a hub name
        records: training data, with the fields of any supported file format. Errors name record N
            as line N of the file to which it is written
        validation: held-out data, or a mapping from names to several held-out sets. The name of a
            set that is a file must be that of the file, up to the first dot
        test: data, or a mapping as for ``validation``, on which the finished model is measured
        output: the run's folder (``exp_manager.explicit_log_dir``)
        config: a YAML file of settings, or the name of a file that comes with this package
        callback: called on rank 0 with all metrics that are logged; an exception in it ends the run
        settings: settings of the command by their keys, such as ``**{"model.optim.lr": 1e-5}``

    Raises:
        AlignerError: any error of the command, with the same message.
        StoppedError: the time limit ``trainer.max_time`` was reached; the run is saved.
        KeyboardInterrupt: the user pressed Ctrl-C; the current step is finished and saved. A second
            Ctrl-C, more than a second later, ends the run at once without saving.
        SystemExit: SIGTERM, SIGHUP or SIGUSR1 arrived; the run is saved. The exit code is the
            command's.
    """
    run_settings = _add_arguments(settings, {_BASE: base, _OUTPUT: output})
    folder = Path(load_settings(TrainConfig, run_settings, config).exp_manager.explicit_log_dir)
    parts = {
        part: data
        for part, data in (("train", records), ("validation", validation), ("test", test))
        if data is not None
    }
    _check_not_twice(settings, [f"{_PREFIX}.{part}" for part in parts])
    # Training needs the memory that loaded models take, and creates its own process group.
    release_models()
    for part, data in parts.items():
        run_settings[f"{_PREFIX}.{part}"] = _write_as_files(data, folder, part)
    run_config = load_settings(TrainConfig, run_settings, config)
    check_needed(run_config, TrainConfig, NEEDED)
    _check_finished(run_training(run_config, callback, in_program=True))
    return _open_trained_model(run_config)


def run_training(
    config: TrainConfig, callback: OnProgress | None = None, in_program: bool = False
) -> Outcome:
    """Run training and write its report, for ``nemo-aligner train`` and ``nemo_aligner.train``.

    Raises:
        AlignerError: ``nemo_aligner.training.run.train`` raises it, or the report cannot be drawn.
    """
    if config.exp_manager.report:
        check_report("exp_manager.report")
    from nemo_aligner.training.run import train as run

    outcome = run(config, callback, in_program)
    if config.exp_manager.report and is_first_rank():
        write_run_report(Path(config.exp_manager.explicit_log_dir))
    return outcome


def _add_arguments(settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with every entry of ``arguments`` that is not None added by its key."""
    extra_settings = {key: value for key, value in arguments.items() if value is not None}
    _check_not_twice(settings, extra_settings)
    return {**settings, **extra_settings}


def _check_not_twice(settings: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raise ConfigError if a key is set both as a setting and as an argument of ``train``."""
    for key in keys:
        if key in settings:
            raise ConfigError(
                f"{key}: got it twice, as a setting and as an argument. Omit one of them"
            )


def _write_as_files(data: Any, folder: Path, part: str) -> list[str]:
    """Return the paths of the data files of ``part``: ``train``, ``validation`` or ``test``.

    If ``data`` is records instead of paths, the records are first written to a file in ``folder``.
    """
    argument = "records" if part == "train" else part
    if not isinstance(data, Mapping):
        return _list_files(*_separate_paths(data, argument), folder, part, _RECORDS)
    if part == "train":
        names = ", ".join(map(str, data)) or "nothing"
        raise ConfigError(
            f"{argument}: got a mapping from {names} to data sets, wanted a single data set"
        )
    # Separate each set once, because it may be an iterator.
    sets = {name: _separate_paths(named, f"{argument}: {name}") for name, named in data.items()}
    _check_set_names({name: paths for name, (paths, _) in sets.items()}, part)
    return [
        path
        for name, (paths, records) in sets.items()
        for path in _list_files(paths, records, folder, part, name)
    ]


def _check_set_names(sets: Mapping[str, list[str] | None], part: str) -> None:
    """Raise ConfigError if a set's metrics would have the name of its file instead of its own.

    ``sets`` has the paths of each set; None for records.
    """
    from nemo_aligner.data.hub import local_files
    from nemo_aligner.data.training_data import name_sets

    named_paths = [
        (name, path)
        for name, paths in sets.items()
        for path in ([f"{name}.jsonl"] if paths is None else paths)
    ]
    files = _run_on_first_rank(partial(local_files, [path for _, path in named_paths]))
    for (name, path), used_name in zip(named_paths, name_sets(part, files), strict=True):
        if used_name != f"{part}-{name}":
            raise ConfigError(
                f"{part}: got the name {name!r}, but the metrics of {path} would be named "
                f"{used_name}/..., because a set is named after its file, up to the first dot. "
                "Use the name of the file, or pass files without names, as a list"
            )


def _separate_paths(data: Any, argument: str) -> tuple[list[str] | None, Any]:
    """Return the paths of data files and None; or, for records, None and the records, unread.

    Raises:
        ConfigError: ``data`` is a set or an open file, or not all of its items are paths if the
            first one is; the message begins with ``argument``.
    """
    if isinstance(data, str | PathLike):
        return [os.fspath(data)], None
    if isinstance(data, set | frozenset):
        raise ConfigError(
            f"{argument}: got a set, whose order changes from run to run. Pass a list"
        )
    if hasattr(data, "readline"):
        raise ConfigError(f"{argument}: got an open file. Pass its path")
    # Items of a mapping or of a DataFrame are names of fields, and would be taken for paths.
    if isinstance(data, Mapping) or table_library(data) or not isinstance(data, Iterable):
        return None, data
    items = iter(data)
    first = list(islice(items, 1))
    if not first or not isinstance(first[0], str | PathLike):
        return None, chain(first, items)
    paths = [*first, *items]
    for number, path in enumerate(paths, start=1):
        if not isinstance(path, str | PathLike):
            raise ConfigError(
                f"{argument}: got {shown(path)} as item {number}, wanted a path like the first "
                "item. Pass either paths or records"
            )
    return [os.fspath(path) for path in paths], None


def _list_files(
    paths: list[str] | None, records: Any, folder: Path, part: str, name: str
) -> list[str]:
    """Return ``paths``; if they are None, write ``records`` to a file and return its path."""
    if paths is not None:
        return paths
    path = folder / DATA_NAME / part / f"{name}.jsonl"
    # A run with checkpoints can only be resumed with the same training records, so do not replace
    # their file.
    may_replace = part != "train" or not step_folders(folder / CHECKPOINTS_NAME)
    count = _run_on_first_rank(partial(write_records, path, records, may_replace))
    if is_first_rank():
        print(f"{part}: {count} records, stored in {path}", flush=True)
    return [str(path)]


def _run_on_first_rank(function: Callable[[], _Result]) -> _Result:
    """Run ``function`` on rank 0, and return its result on all ranks.

    The process group of the run does not exist yet, so a temporary one is created.
    """
    if find_process(os.environ).world_size == 1:
        return function()
    from nemo_aligner.distributed.collectives import on_main
    from nemo_aligner.distributed.launch import launch

    with launch():
        return on_main(function)


def _check_finished(outcome: Outcome) -> None:
    """If the run was stopped early, raise KeyboardInterrupt, SystemExit or StoppedError."""
    reason = outcome.stopped_by
    if reason is None:
        return
    progress = "before the first step"
    if outcome.step:
        progress = f"after step {outcome.step}, which is saved: the same call resumes from there"
    message = f"the run was stopped by {reason} {progress}"
    if reason.is_ctrl_c:
        raise KeyboardInterrupt(message)
    if reason.is_signal:
        raise SystemExit(leave_together(reason.exit_code))
    raise StoppedError(message)


def _open_trained_model(config: TrainConfig) -> RewardModel:
    """Return the model of a finished run, with the run's parallel layout and numerics.

    With these settings the model computes rewards exactly as the run's validations did.
    """
    from nemo_aligner.checkpoint.nemo.reward_model import CheckpointDescription

    model = config.model
    path = Path(config.exp_manager.explicit_log_dir) / CHECKPOINTS_NAME / MODEL_NAME
    contract = CheckpointDescription.read(path).contract
    longest = 0 if contract is None else contract.seq_length
    settings = {key: attrgetter(key)(config) for key in LAYOUT_KEYS}
    settings["model.micro_batch_tokens"] = max(model.micro_batch_tokens, longest)
    return RewardModel({"rm_model_file": path, **settings})
