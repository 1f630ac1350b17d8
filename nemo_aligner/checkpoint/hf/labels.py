"""Names of the rewards of a Hugging Face reward model, which become a contract's attributes.

They come from ``id2label`` in ``config.json``, from the user (``--attributes``), or from the
scoring contract that an export of this package has.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.checkpoint.decoder_tensors import attribute_names
from nemo_aligner.checkpoint.hf.heads import (
    FoundHead,
    architecture_in,
    check_are_rewards,
    reads_steps,
)
from nemo_aligner.checkpoint.hf.source import REWARD_SUFFIX, Source
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.utils.errors import CheckpointError, shown


def read_labels(
    source: Source, head: FoundHead | None, attributes: Sequence[str] | None
) -> list[str] | None:
    """Return the names of a reward model's rewards, in their order; None without a head.

    Args:
        attributes: names to use instead of the names in ``id2label``.
    """
    if head is None:
        return None
    if reads_steps(source):
        return _read_step_labels(source, head, attributes)
    problem = source.config.get("problem_type")
    if attributes is not None:
        check_are_rewards(problem)
        return list(attribute_names(attributes, head.outputs))
    labels, contract = _read_id2label(source, head), _read_bins_contract(source)
    may_be_classes = head.outputs > 1 and architecture_in(source.config).endswith(REWARD_SUFFIX)
    remedy = "name them with --attributes, or set problem_type to regression in config.json"
    check_are_rewards(problem, labels if may_be_classes else (), remedy)
    if contract is None:
        return labels
    if labels != contract.output_names:
        raise CheckpointError(
            f"config.json: id2label: got {shown(labels)}, but {CONTRACT_NAME} has "
            f"{shown(contract.output_names)}"
        )
    return list(contract.attributes)


def count_outputs(source: Source, head: FoundHead, labels: Sequence[str]) -> int:
    """Return how many outputs a checkpoint's ``head`` must have, given the names of its rewards.

    If the head reads steps, and this package did not export the model, any number is accepted, and
    the result is the actual number.
    """
    if reads_steps(source):
        if source.contract is None:
            return head.outputs
        num_outputs = ScoringContract.from_dict(source.contract).num_outputs
        return max(num_outputs, 2)  # one reward per step is exported as two outputs
    contract = _read_bins_contract(source)
    return len(labels if contract is None else contract.output_names)


def _read_bins_contract(source: Source) -> ScoringContract | None:
    """Read the scoring contract of an exported head of bins; None for any other head.

    A head of bins has several outputs for each attribute. Only the contract tells how a reward is
    computed from them.
    """
    if source.contract is None or source.contract.get("readout") is None:
        return None
    return ScoringContract.from_dict(source.contract)


def _read_step_labels(
    source: Source, head: FoundHead, attributes: Sequence[str] | None
) -> list[str]:
    """Return the names of the rewards of a model that reads steps.

    An export of this package has the names in its contract. Any other model has one reward, because
    its two outputs are the logits of a wrong and of a right step.
    """
    if source.contract is not None:
        contract = ScoringContract.from_dict(source.contract)
        if not contract.has_steps:
            raise CheckpointError(
                f"architectures: got {shown(source.config.get('architectures'))}, which reads "
                f"steps, but {CONTRACT_NAME} does not (scored_position: "
                f"{contract.scored_position})"
            )
        return list(contract.attributes)
    if head.outputs > 2:
        name = head.names["weight"]
        raise CheckpointError(
            f"{name}: got {head.outputs} rows, wanted 2 (a step is wrong or right) or 1 for "
            f"architectures {shown(source.config.get('architectures'))}. To convert it as a base "
            "model, use --head none"
        )
    return ["reward"] if attributes is None else list(attribute_names(attributes, 1))


def _read_id2label(source: Source, head: FoundHead) -> list[str]:
    """Read the names of the head's outputs from ``id2label`` in ``config.json``, in order."""
    if head.rows:  # rows of the output layer, without names in id2label
        return ["reward"]
    names = source.config.get("id2label")
    try:
        if names is None:
            names = {number: f"LABEL_{number}" for number in range(_read_num_labels(source, head))}
        by_number = {int(key): str(names[key]) for key in names}
        labels = [by_number[number] for number in range(len(names))]
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise CheckpointError(
            f"id2label: got {shown(names)}, wanted names for the numbers from 0 on, one for each "
            "output (or only num_labels)"
        ) from error
    return ["reward"] if labels == ["LABEL_0"] else labels


def _read_num_labels(source: Source, head: FoundHead) -> int:
    count = source.config.get("num_labels", head.outputs)
    if count != head.outputs:
        raise CheckpointError(
            f"num_labels: got {shown(count)}, but {head.names['weight']} has {head.outputs} rows; "
            "both must agree"
        )
    return head.outputs
