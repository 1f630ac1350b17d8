"""The model that comes out of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nemo_aligner.checkpoint.nemo.reward_model import PretrainedModel, save_reward_model
from nemo_aligner.checkpoint.run_folder import MODEL_NAME
from nemo_aligner.checkpoint.runs import RunCheckpoints, Saved
from nemo_aligner.console import Counter, say, waiting_for
from nemo_aligner.errors import CheckpointError
from nemo_aligner.models.head_shape import check_is_linear
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.one_reward import check_plain_reading
from nemo_aligner.training.describe import describe_heldout, next_commands
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.training.trainer import Outcome

_MOST_LISTED = 8


def finish(
    outcome: Outcome,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
    pretrained: PretrainedModel,
    average_best: int = 1,
) -> dict[str, float]:
    """Export the model of a run that came to its end; tell how to go on with one that did not.

    Returns:
        The model's metrics on the test sets, named ``set/metric``.
    """
    if outcome.step == 0:
        say(f"stopped by {outcome.stopped_by} before the first step: there is nothing to save")
        return {}
    if outcome.stopped_by is None:
        path = checkpoints.folder / MODEL_NAME
        return export(path, checkpoints, learner, pretrained, average_best)
    say(
        f"stopped by {outcome.stopped_by} after step {outcome.step}, which is saved: the same "
        f"command goes on from there; trainer.rm.max_steps={outcome.step} makes that step the "
        f"last: it is validated, and {MODEL_NAME} is written"
    )
    return {}


def export(
    path: Path,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
    pretrained: PretrainedModel,
    average_best: int = 1,
) -> dict[str, float]:
    """Write the reward model's ``.nemo``: the best checkpoint's weights, else the newest's.

    With ``average_best`` above 1 it is the mean of so many of the best, which is validated anew.

    Returns:
        Its metrics on the test sets, named ``set/metric``.

    Raises:
        CheckpointError: nothing was saved.
    """
    best, latest = checkpoints.best(), checkpoints.latest()
    chosen = best or latest
    if chosen is None:
        raise CheckpointError(f"{checkpoints.folder}: there is no checkpoint to export")
    averaged = checkpoints.ranked()[:average_best]
    say(render_candidates(checkpoints, checkpoints.candidates(), latest, len(averaged) or 1))
    say(f"writing {path} ...")
    if len(averaged) > 1:
        chosen, what = _average(averaged, checkpoints, learner)
    else:
        checkpoints.load_model(chosen, learner.model)
        why = "the newest"
        if best is not None:
            why = f"the best {checkpoints.monitor}, {_value(chosen, checkpoints.monitor)}"
        what = f"the weights of step {chosen.state.step} ({why})"
    contract = _with_statistics(learner.data.contract, chosen)
    config = {
        **pretrained.config,
        "reward_model_type": contract.reward_model_type,
        # What NeMo makes the head's width.
        "regression": {"num_attributes": len(contract.attributes) * contract.outputs_per_attribute},
    }
    with waiting_for(f"writing {path}"):
        save_reward_model(path, learner.model, config, pretrained.tokenizer, contract)
    say(f"wrote {path}\n  with {what}")
    say(f"scoring contract: {contract.hash}")
    tested: dict[str, float] = {}
    if learner.data.test:
        tested = learner.measure(learner.data.test, Counter("test", "records").show)
    say(describe_heldout({**chosen.state.metrics, **tested}))
    heldout = [*learner.data.test, *learner.data.validation]
    say(next_commands(path, heldout, _can_export(contract, config)))
    return tested


def _can_export(contract: ScoringContract, config: Mapping[str, Any]) -> bool:
    """Whether a reward model of Hugging Face has a place for this head."""
    try:
        check_plain_reading(contract, "", "")
        check_is_linear(ModelShape.from_config(config).head, "", "")
    except CheckpointError:
        return False
    return True


def _average(
    saved: Sequence[Saved], checkpoints: RunCheckpoints, learner: RewardLearner
) -> tuple[Saved, str]:
    """Load the mean of their weights: what it is as a checkpoint, and what people are told."""
    _load_mean(saved, checkpoints, learner.model)
    best = saved[0]
    watch = Counter("validation of the mean", "records").show
    mean = replace(best, state=replace(best.state, metrics=learner.validate(watch)))
    steps = ", ".join(str(each.state.step) for each in saved)
    name = checkpoints.monitor
    return mean, (
        f"the mean of the weights of steps {steps}: {name} {_value(mean, name)}, "
        f"{_value(best, name)} of the best alone"
    )


def _load_mean(saved: Sequence[Saved], checkpoints: RunCheckpoints, model: Any) -> None:
    """Put the mean of their weights in, summed in float64 in host memory and rounded once.

    With LoRA it is that of its matrices, which is not the mean of what they add.
    """
    sums: dict[str, Tensor] = {}
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    for each in saved:
        checkpoints.load_model(each, model)
        for name, parameter in trained.items():
            value = parameter.detach().cpu().double()
            sums[name] = sums[name] + value if name in sums else value
    for name, parameter in trained.items():
        parameter.data.copy_(sums[name] / len(saved))


def render_candidates(
    checkpoints: RunCheckpoints, ranked: Sequence[Saved], latest: Saved | None, chosen: int = 1
) -> str:
    """The checkpoints of a run, the best first, so many of them chosen, and how they are ranked."""
    monitor, tie_break = checkpoints.monitor, checkpoints.tie_break
    names = [name for name in dict.fromkeys((monitor, tie_break)) if name is not None]
    heading = "checkpoints"
    if ranked:
        heading += f", the best first by {names[0]}"
        heading += "".join(f",\n  ties by {name}" for name in names[1:])
    others = [latest] if latest is not None and latest not in ranked else []
    lines = [heading + ":"]
    for saved in (*ranked[:_MOST_LISTED], *others):
        values = [f"{name.partition('/')[2]} {_value(saved, name)}" for name in names]
        is_known = any(name in saved.state.metrics for name in names)
        found = "  ".join(values) if is_known else "not validated"
        lines.append(f"  step {saved.state.step:<8}{found}")
    if len(ranked) > _MOST_LISTED:
        lines.append(f"  and {len(ranked) - _MOST_LISTED} that are not as good")
    lines[1 : 1 + chosen] = [f"{line}  (chosen)" for line in lines[1 : 1 + chosen]]
    return "\n".join(lines)


def _value(saved: Saved, name: str | None) -> str:
    return f"{saved.state.metrics.get(str(name), math.nan):.4g}"


def _with_statistics(contract: ScoringContract, chosen: Saved) -> ScoringContract:
    """The contract with the rewards' mean and deviation on the first validation set."""
    metrics = chosen.state.metrics
    first = next((name for name in metrics if "/reward_mean/" in name), None)
    if first is None:
        return contract
    prefix = first.partition("/")[0]
    columns = [
        [metrics[f"{prefix}/reward_{which}/{name}"] for name in contract.attributes]
        for which in ("mean", "std")
    ]
    return contract.with_statistics(columns[0], columns[1], measured_on=prefix)
