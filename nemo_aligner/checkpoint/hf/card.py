"""Model card of an exported reward model; its text is ``model_card.md.jinja``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from nemo_aligner.checkpoint.hf.heads import LINEAR
from nemo_aligner.contract.contract import ScoringContract


def model_card(
    name: str,
    contract: ScoringContract,
    pad_token: str,
    archive: Path,
    base_license: str,
    trained_in: str,
    base: str | None = None,
    *,
    form: str = LINEAR.last,
    is_loaded_whole: bool = True,
) -> str:
    """Render ``README.md`` of the folder ``name``; the run is looked up beside ``archive``.

    ``trained_in`` is the dtype before the export, by the contract's names. With a ``base`` the
    folder is an adapter of that model. ``form`` is the head's (``HeadOut``). Unless
    ``is_loaded_whole`` transformers has a class for the decoder only.
    """
    assert base is None or not contract.has_steps, "an adapter has no steps"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    readout = contract.output_readout
    return environment.get_template("model_card.md.jinja").render(
        name=name,
        contract=contract,
        pad_token=pad_token,
        source=archive.name,
        license=base_license,
        trained_in=trained_in,
        base=base,
        form=form,
        layer=form.removesuffix(".bias").partition(".2")[0],
        is_loaded_whole=is_loaded_whole,
        means=list(contract.label_means),
        marker=contract.reply_marker and list(contract.reply_marker),
        values=[] if readout is None else [list(row) for row in readout.numbers],
        quoted=json.dumps,
        training="\n".join(_training(archive))
        or "The archive does not say what it was trained on.",
        dict=dict,
        zip=zip,
    )


def _training(archive: Path) -> Iterator[str]:
    """Describe the training, from the checkpoints that a run keeps beside its archive."""
    states = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(archive.resolve().parent.glob("step_*/run_state.json"))
    ]
    if not states:
        yield "The archive is not in its run's folder, so its data are unknown."
        return
    settings, samples = states[-1]["config"], states[-1]["consumed_samples"]
    base = Path(settings["pretrained_checkpoint"]["restore_from_path"]).name
    if "data" not in settings["model"]:
        yield f"- a critic of PPO: values trained from `{base}`, on {samples} sequences of rollouts"
        return
    for part in ("train", "validation"):
        files = settings["model"]["data"]["data_prefix"][part]
        names = ", ".join(f"`{Path(file).name}`" for file in files)
        yield f"- {part} data: {names or 'none'}"
    yield f"- trained from `{base}`, {samples} records"
    # "validation-<file>/accuracy", and not "validation-<file>/by_source/<source>/accuracy"
    found = [{k: v for k, v in each["metrics"].items() if k.count("/") == 1} for each in states]
    rows = list(dict.fromkeys(name for metrics in found for name in metrics))
    if rows:
        steps = [f"after step {state['step']}" for state in states]
        yield from ("", f"| | {' | '.join(steps)} |", "|---" * (1 + len(steps)) + "|")
        for name in rows:
            yield f"| {name} | {' | '.join(_number(metrics.get(name)) for metrics in found)} |"


def _number(value: float | None) -> str:
    """Format the value of a metric; "" if it had none on its data."""
    return "" if value is None else f"{value:.4g}"
