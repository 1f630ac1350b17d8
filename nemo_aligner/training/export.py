"""The model that comes out of a run."""

from __future__ import annotations

from pathlib import Path

from nemo_aligner.checkpoint.nemo.reward_model import PretrainedModel, save_reward_model
from nemo_aligner.checkpoint.runs import RunCheckpoints, Saved
from nemo_aligner.errors import CheckpointError
from nemo_aligner.parallel.collectives import say
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.training.trainer import Outcome

EXPORT_NAME = "megatron_gpt.nemo"


def finish(
    outcome: Outcome,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
    pretrained: PretrainedModel,
) -> None:
    """Export the model of a run that came to its end; tell how to go on with one that did not."""
    if outcome.stopped_by is None:
        export(checkpoints.folder / EXPORT_NAME, checkpoints, learner, pretrained)
        return
    say(
        f"stopped by {outcome.stopped_by} after step {outcome.step}, which is saved: the same "
        f"command goes on from there; trainer.rm.max_steps={outcome.step} makes it write "
        f"{EXPORT_NAME} at once"
    )


def export(
    path: Path,
    checkpoints: RunCheckpoints,
    learner: RewardLearner,
    pretrained: PretrainedModel,
) -> None:
    """Write the reward model's ``.nemo``: the best checkpoint's weights, else the newest's.

    Raises:
        CheckpointError: nothing was saved.
    """
    best = checkpoints.best()
    chosen = best or checkpoints.latest()
    if chosen is None:
        raise CheckpointError(f"{checkpoints.folder}: there is no checkpoint to export")
    checkpoints.load_model(chosen, learner.model)
    contract = _with_statistics(learner.data.contract, chosen)
    config = {
        **pretrained.config,
        "reward_model_type": contract.reward_model_type,
        "regression": {"num_attributes": len(contract.attributes)},
    }
    save_reward_model(path, learner.model, config, pretrained.tokenizer, contract)
    why = "the newest"
    if best is not None:
        why = f"the best {checkpoints.monitor}, {best.state.metrics[str(checkpoints.monitor)]:.4g}"
    say(f"wrote {path} with the weights of step {chosen.state.step} ({why})")
    say(f"scoring contract: {contract.hash}")


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
