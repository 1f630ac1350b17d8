"""Initial heads: copy the outputs of another reward model for attributes of the same names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.folder import NemoFolder
from nemo_aligner.checkpoint.nemo.load_weights import model_shape, read_head
from nemo_aligner.checkpoint.nemo.reward_model import contract_of, set_head
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.utils.errors import ConfigError

_KEY = "pretrained_checkpoint.load_rm_head_weights"
# Tensors with this prefix are shared by all outputs; the other tensors have one row per output.
_SHARED_PREFIX = "hidden."


def check_initial_head(
    path: str | Path, contract: ScoringContract, names: Mapping[str, str]
) -> None:
    """Check that the head of another reward model has the outputs of ``contract``.

    No weights are read.

    Args:
        path: archive of the other reward model.
        names: maps attributes of ``contract`` to their names in the other model, if they differ.

    Raises:
        ConfigError: an attribute is missing, or the heads read different tokens or have different
            kinds of outputs.
        CheckpointError: the other model cannot be read.
    """
    with open_nemo(path, with_weights=False) as folder:
        _choose_head_rows(folder, contract, names)


def init_head_from(
    model: GPTRewardModel,
    path: str | Path,
    contract: ScoringContract,
    shape: ModelShape,
    names: Mapping[str, str],
) -> None:
    """Copy the outputs of the reward model at ``path`` into ``model``'s head; collective.

    Args:
        contract: scoring contract of ``model``.
        shape: shape of ``model``.
        names: maps attributes of ``contract`` to their names in the other model, if they differ.

    Raises:
        ConfigError: an attribute is missing, or the heads' layers differ.
        CheckpointError: the other model cannot be read.
    """
    with open_nemo(path) as folder:
        rows = _choose_head_rows(folder, contract, names)
        source_shape = model_shape(folder)
        if (source_shape.head, source_shape.hidden_size) != (shape.head, shape.hidden_size):
            raise ConfigError(
                f"{_KEY}: {path}: got a head that is {_describe_head(source_shape)}, "
                f"wanted a head that is {_describe_head(shape)}"
            )
        tensors = read_head(folder)
    chosen = {
        name: tensor if name.startswith(_SHARED_PREFIX) else tensor[rows]
        for name, tensor in tensors.items()
    }
    set_head(model, chosen)


def _describe_head(shape: ModelShape) -> str:
    return f"{shape.head or 'linear'} with a hidden size of {shape.hidden_size}"


def _choose_head_rows(
    folder: NemoFolder, contract: ScoringContract, names: Mapping[str, str]
) -> list[int]:
    """Return the row in the head of ``folder`` for each output of ``contract``'s head."""
    source, location = contract_of(folder), f"{_KEY}: {folder.source}"
    if source is None:
        raise ConfigError(
            f"{location}: it has no scoring contract, so it is not a reward model of this package"
        )
    _check_names(contract, names)
    names_there = [names.get(name, name) for name in contract.attributes]
    missing = [name for name in names_there if name not in source.attributes]
    if missing:
        raise ConfigError(
            f"{location}: it has the attributes {', '.join(source.attributes)}, and lacks "
            f"{', '.join(missing)}. If they have other names there, set "
            "pretrained_checkpoint.rm_head_names, which maps this run's names to them"
        )
    indices = [source.attributes.index(name) for name in names_there]
    _check_same_outputs(contract, source, indices, location)
    # An attribute has several consecutive rows if its outputs are bins or quantiles.
    width = source.outputs_per_attribute
    return [index * width + number for index in indices for number in range(width)]


def _check_names(contract: ScoringContract, names: Mapping[str, str]) -> None:
    unknown = sorted(set(names) - set(contract.attributes))
    if unknown:
        raise ConfigError(
            f"pretrained_checkpoint.rm_head_names: got {', '.join(unknown)}, wanted attributes of "
            f"this run: {', '.join(contract.attributes)}"
        )


def _check_same_outputs(
    contract: ScoringContract, source: ScoringContract, indices: list[int], location: str
) -> None:
    """Raise ConfigError if the heads read different tokens or have different kinds of outputs."""
    if source.scored_position != contract.scored_position:
        raise ConfigError(
            f"{location}: got a head that reads {source.scored_position}, wanted "
            f"{contract.scored_position} (model.head.reads)"
        )
    readout, source_readout = contract.output_readout, source.output_readout
    outputs = None if readout is None else (readout.kind, list(readout.numbers))
    source_outputs = None
    if source_readout is not None:
        source_outputs = source_readout.kind, [source_readout.numbers[index] for index in indices]
    if outputs != source_outputs:
        raise ConfigError(
            f"{location}: got a head with {source_outputs or 'one output'} for the attributes, "
            f"wanted {outputs or 'one output'} (model.objective)"
        )
