"""Write the model card of an exported reward model from the template ``model_card.md.jinja``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from nemo_aligner.checkpoint.conversion_cache import is_hub_name
from nemo_aligner.checkpoint.hf.heads import LINEAR
from nemo_aligner.checkpoint.nemo.folder import NemoFolder
from nemo_aligner.checkpoint.nemo.training_data import training_data_of
from nemo_aligner.checkpoint.run_folder import MODEL_NAME, RUN_STATE_NAME
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.data.hub import is_data_set_name


def model_card(
    name: str,
    contract: ScoringContract,
    pad_token: str,
    folder: NemoFolder,
    base_license: str,
    trained_in: str,
    base: str | None = None,
    *,
    form: str = LINEAR.last,
    is_loaded_with_head: bool = True,
) -> str:
    """Render the model card, ``README.md``, of an exported folder.

    Args:
        name: name of the model on the hub, with an organization, or else of the folder.
        contract: scoring contract of the exported model.
        pad_token: text of the pad token.
        folder: the exported archive, which lists its training files. If it is the one that a run
            wrote in its folder, the checkpoints there tell how the model was trained.
        base_license: licence of the base model.
        trained_in: precision of the archive before the export, as in ``ScoringContract.dtype``.
        base: name of the base model if the folder is an adapter.
        form: form of the head (``ExportedHead.form``).
        is_loaded_with_head: whether transformers has a class that loads the decoder together with
            the head. If not, the program in the card computes the head itself.
    """
    assert base is None or not contract.has_steps, "adapters support no rewards per step"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    readout, states = contract.output_readout, _read_states(folder.source)
    files = training_data_of(folder.config) or []
    return environment.get_template("model_card.md.jinja").render(
        name=name,
        is_on_hub="/" in name,
        contract=contract,
        pad_token=pad_token,
        source=folder.source.name,
        license=base_license,
        trained_in=trained_in,
        base=base,
        form=form,
        layer=form.removesuffix(".bias").partition(".2")[0],
        is_loaded_with_head=is_loaded_with_head,
        means=list(contract.label_means),
        marker=contract.reply_marker and list(contract.reply_marker),
        values=[] if readout is None else [list(row) for row in readout.numbers],
        quoted=json.dumps,
        # A converted archive has neither checkpoints next to it nor statistics of a validation.
        is_trained_here=bool(states or files) or contract.reward_mean is not None,
        training="\n".join([*_describe_teachers(files), *_describe_training(states, files)]),
        dict=dict,
        zip=zip,
    )


def _read_states(archive: Path) -> list[dict[str, Any]]:
    """Read the states of the checkpoints of the run that wrote the archive in its own folder.

    An archive of another name is not the run's, although it may have been copied there.
    """
    archive = archive.resolve()
    if archive.name != MODEL_NAME:
        return []
    return [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(archive.parent.glob(f"step_*/{RUN_STATE_NAME}"))
    ]


def _describe_teachers(files: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a Markdown line for each model that gave the soft labels of the training files."""
    teachers = {
        (str(teacher["name"]), teacher.get("model_fingerprint"), teacher.get("contract_hash"))
        for file in files
        for group in file.get("teachers", ())
        for teacher in group
    }
    for name, fingerprint, contract in sorted(teachers, key=str):
        yield (
            f"- soft labels of `{Path(name).name}` (model fingerprint `{fingerprint}`, scoring "
            f"contract `{contract}`)"
        )


def _describe_training(
    states: Sequence[dict[str, Any]], files: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield Markdown lines on how the archive was trained: data, base model and metrics.

    ``states`` are those of the run's checkpoints, the earliest first. Without them, only ``files``,
    the training files that the archive lists, are known.
    """
    if not states and files:
        listed = ", ".join(f"`{file['name']}`" for file in files)
        yield f"- train data: {listed}"
        return
    if not states:
        yield (
            f"The archive is not `{MODEL_NAME}` in its run's folder, so its training data are "
            "unknown."
        )
        return
    settings, samples = states[-1]["config"], states[-1]["consumed_samples"]
    base = settings["pretrained_checkpoint"]["restore_from_path"]
    base = base if is_hub_name(base) else Path(base).name
    if "data" not in settings["model"]:
        yield f"- a critic of PPO: values trained from `{base}`, on {samples} sequences of rollouts"
        return
    for part in ("train", "validation"):
        paths = settings["model"]["data"]["data_prefix"][part]
        names = ", ".join(
            f"`{path if is_data_set_name(path) else Path(path).name}`" for path in paths
        )
        yield f"- {part} data: {names or 'none'}"
    yield f"- trained from `{base}`, {samples} records"
    # Keep the metrics of whole files ("validation-<file>/accuracy"), which have one "/". Drop the
    # metrics by source ("validation-<file>/by_source/...").
    metrics_by_step = [
        {key: value for key, value in state["metrics"].items() if key.count("/") == 1}
        for state in states
    ]
    rows = list(dict.fromkeys(name for metrics in metrics_by_step for name in metrics))
    if rows:
        steps = [f"after step {state['step']}" for state in states]
        yield from ("", f"| | {' | '.join(steps)} |", "|---" * (1 + len(steps)) + "|")
        for name in rows:
            values = (_format_metric(metrics.get(name)) for metrics in metrics_by_step)
            yield f"| {name} | {' | '.join(values)} |"


def _format_metric(value: float | None) -> str:
    """Format a metric's value with 4 digits for a table; None (no value) gives an empty cell."""
    return "" if value is None else f"{value:.4g}"
