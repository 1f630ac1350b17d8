"""A head to begin with: of each attribute the outputs that another reward model has by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemo_aligner.checkpoint.nemo.folders import NemoFolder
from nemo_aligner.checkpoint.nemo.into_model import model_shape, read_head
from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import contract_of, set_head
from nemo_aligner.errors import ConfigError
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.text.contract import ScoringContract

_KEY = "pretrained_checkpoint.load_rm_head_weights"
# Its outputs go by attributes; what stands before them is one for all.
_OF_ALL = "hidden."


def check_first_head(path: str | Path, contract: ScoringContract, names: Mapping[str, str]) -> None:
    """Refuse a reward model that lacks an attribute of ``contract``, or says it in another way.

    ``names`` are what attributes are called there, where that is something else. No weight is read.

    Raises:
        ConfigError: it names the attributes, or what is different.
        CheckpointError: it cannot be read, or is no reward model.
    """
    with open_nemo(path, with_weights=False) as folder:
        _choose(folder, contract, names)


def load_first_head(
    model: GPTRewardModel,
    path: str | Path,
    contract: ScoringContract,
    shape: ModelShape,
    names: Mapping[str, str],
) -> None:
    """Give ``model``, of a ``shape`` and a ``contract``, the outputs of the model at ``path``.

    Every rank calls it.

    Raises:
        ConfigError, CheckpointError: as ``check_first_head``; or its head is made in another way.
    """
    with open_nemo(path) as folder:
        rows = _choose(folder, contract, names)
        theirs = model_shape(folder)
        if (theirs.head, theirs.hidden_size) != (shape.head, shape.hidden_size):
            raise ConfigError(
                f"{_KEY}: {path}: got a head that is {theirs.head or 'linear'}, of "
                f"{theirs.hidden_size} hidden states, wanted one that is {shape.head or 'linear'}, "
                f"of {shape.hidden_size}"
            )
        tensors = read_head(folder)
    chosen = {
        name: tensor if name.startswith(_OF_ALL) else tensor[rows]
        for name, tensor in tensors.items()
    }
    set_head(model, chosen)


def _choose(folder: NemoFolder, contract: ScoringContract, names: Mapping[str, str]) -> list[int]:
    """Of every output of ``contract`` its row in the head of ``folder``."""
    theirs, where = contract_of(folder), f"{_KEY}: {folder.source}"
    if theirs is None:
        raise ConfigError(f"{where}: it has no scoring contract, wanted a reward model")
    _check_names(contract, names)
    wanted = [names.get(name, name) for name in contract.attributes]
    lacking = [name for name in wanted if name not in theirs.attributes]
    if lacking:
        raise ConfigError(
            f"{where}: got the attributes {', '.join(theirs.attributes)}, wanted "
            f"{', '.join(lacking)}, too; pretrained_checkpoint.rm_head_names says by attribute "
            "what it is called there"
        )
    indices = [theirs.attributes.index(name) for name in wanted]
    _check_read_alike(contract, theirs, indices, where)
    width = theirs.outputs_per_attribute
    return [index * width + number for index in indices for number in range(width)]


def _check_names(contract: ScoringContract, names: Mapping[str, str]) -> None:
    unknown = sorted(set(names) - set(contract.attributes))
    if unknown:
        raise ConfigError(
            f"pretrained_checkpoint.rm_head_names: got {', '.join(unknown)}, wanted attributes of "
            f"this run: {', '.join(contract.attributes)}"
        )


def _check_read_alike(
    contract: ScoringContract, theirs: ScoringContract, indices: list[int], where: str
) -> None:
    """What a head gives must mean the same: the tokens that it reads, and how it is read."""
    if theirs.scored_position != contract.scored_position:
        raise ConfigError(
            f"{where}: got a head that reads {theirs.scored_position}, wanted "
            f"{contract.scored_position} (model.head.reads)"
        )
    ours, other = contract.output_readout, theirs.output_readout
    mine = None if ours is None else (ours.kind, list(ours.numbers))
    its = None if other is None else (other.kind, [other.numbers[index] for index in indices])
    if mine != its:
        raise ConfigError(
            f"{where}: got a head with {its or 'one output'} for the attributes, wanted "
            f"{mine or 'one output'} (model.objective)"
        )
