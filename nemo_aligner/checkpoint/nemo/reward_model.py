"""Reward models in ``.nemo`` archives: loading to train or to score, saving, and initial heads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import (
    HEAD,
    HEAD_BIAS,
    HEAD_PREFIX,
    LEARNED_BY_OBJECTIVE,
    PREFIX,
)
from nemo_aligner.checkpoint.nemo.archive import open_nemo, write_nemo
from nemo_aligner.checkpoint.nemo.fingerprint import build_fingerprint, fingerprint_of
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME, NemoFolder
from nemo_aligner.checkpoint.nemo.load_weights import (
    head_names,
    load_backbone,
    model_shape,
    read_head,
)
from nemo_aligner.checkpoint.weights.save import copy_tensors, save_weights
from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.model import (
    DataConfig,
    HeadConfig,
    ModelConfig,
    PointwiseChoice,
    Recompute,
    RegressionConfig,
    ScoredPosition,
)
from nemo_aligner.contract.added_tokens import load_hf_tokenizer
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import build_contract, check_expected
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.cpu.kernels import decide_together
from nemo_aligner.distributed.collectives import barrier, current_device, gather_objects, on_main
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.lora import LoraDropout, draw_adapters, fold_adapters
from nemo_aligner.models.reward_model import GPTRewardModel, build_reward_model
from nemo_aligner.models.shape import (
    HeadShape,
    LoraShape,
    ModelShape,
    check_lora,
    head_to_train,
    read_head_shape,
    read_lora,
    with_head_shape,
    with_lora,
)
from nemo_aligner.utils.errors import CheckpointError, ConfigError, DataError
from nemo_aligner.utils.writing import explaining_full_disk

_OR_NEW_HEAD = "; pretrained_checkpoint.new_head=true begins with a new head on its body"


@dataclass(frozen=True)
class PretrainedModel:
    """A model to train: backbone from the archive, and its head, or a new one if it has none."""

    model: GPTRewardModel
    config: dict[str, Any]
    tokenizer: Tokenizer
    head_is_new: bool


@dataclass(frozen=True)
class LoadedRewardModel:
    """A finished reward model with all that gives its scores their meaning.

    ``fingerprint`` says which weights these are, see ``fingerprint.py``; None in an archive without
    checksums.
    """

    model: GPTRewardModel
    contract: ScoringContract
    tokenizer: Tokenizer
    config: dict[str, Any]
    fingerprint: str | None = None


@dataclass(frozen=True)
class BaseCheckpoint:
    """Everything of a checkpoint but its weights, read by opening it once.

    A run is prepared from it. The weights are read by a second opening (``load_pretrained``), so
    that a run whose settings or data are unfit ends before they are unpacked.

    Attributes:
        config: the model's settings by the keys of ``model_config.yaml``.
        contract: None for a base model.
    """

    path: Path
    config: dict[str, Any]
    tokenizer: Tokenizer
    contract: ScoringContract | None

    @classmethod
    def read(cls, path: str | Path) -> BaseCheckpoint:
        """Open the checkpoint at ``path``; collective.

        Raises:
            CheckpointError: see ``open_nemo``; or its tokenizer or its contract cannot be read.
        """
        with open_nemo(path, with_weights=False) as folder:
            tokenizer = folder.load_tokenizer()
            contract = contract_of(folder, tokenizer)
            return cls(Path(path), folder.config, tokenizer, contract)

    @cached_property
    def shape(self) -> ModelShape:
        """The model's shape; raises CheckpointError if it cannot be built."""
        return ModelShape.from_config(self.config)


def read_text_rules(path: str | Path) -> tuple[Tokenizer, ScoringContract | None]:
    """Read an archive's tokenizer and its contract (None for a base model); collective."""
    base = BaseCheckpoint.read(path)
    return base.tokenizer, base.contract


def check_expected_contract(
    path: str | Path, precision: Precision | None, expected: str | None, key: str
) -> None:
    """Refuse an archive whose contract is not ``expected``, before its weights are loaded.

    Collective where ranks are connected; before that each checks for itself. An archive without a
    contract passes here; loading it fails.

    Raises:
        ConfigError: see ``check_expected``. ``precision`` is the one to load it with.
    """
    contract = None if expected is None else read_text_rules(path)[1]
    if contract is not None:
        check_expected(contract.with_dtype(precision), expected, key)


def load_pretrained(
    path: str | Path,
    layout: ParallelLayout,
    *,
    num_attributes: int,
    outputs_per_attribute: int = 1,
    precision: Precision,
    recompute: Recompute = Recompute.none,
    recompute_layers: int | None = None,
    seed: int = 1234,
    new_head: bool = False,
    head: HeadConfig | None = None,
    lora: LoraShape | None = None,
    reads_every_token: bool = False,
    reply_marker: tuple[int, ...] | None = None,
    lora_dropout: LoraDropout | None = None,
    pointwise_kernels: PointwiseChoice | None = None,
) -> PretrainedModel:
    """Load a base model, or a reward model to continue from, for training; collective.

    ``new_head`` ignores the archive's head; ``head`` None, or at its defaults, keeps its layers.
    With ``lora`` the model has the archive's adapters, or new ones; without, an archive's are
    folded into the weights. The other arguments are those of ``build_reward_model``.

    Raises:
        CheckpointError: the archive is unsafe, incomplete or of another family; or its reward head
            or its LoRA differ from what is asked for.
    """
    with open_nemo(path) as folder:
        shape, tokenizer = model_shape(folder), folder.load_tokenizer()
        if head is not None:
            shape = replace(shape, head=head_to_train(shape.head, head, is_new=new_head))
        tokenizer.check_fits(shape.vocab_size)
        check_lora(shape.lora, lora, path)
        shape = replace(shape, lora=lora or shape.lora)
        num_outputs = num_attributes * outputs_per_attribute
        model = build_reward_model(
            shape,
            layout,
            num_attributes=num_outputs,
            precision=precision,
            recompute=recompute,
            recompute_layers=recompute_layers,
            seed=seed,
            reads_every_token=reads_every_token,
            reply_marker=reply_marker,
            lora_dropout=lora_dropout,
            pointwise_kernels=pointwise_kernels,
        )
        decide_together(current_device(), gather_objects)
        # Checked before a byte is read: a wrong head is found in a second, not after the body.
        has_head = not new_head and _check_head(folder, shape, num_outputs, _OR_NEW_HEAD)
        _load_into(model, folder, with_head=has_head)
        _set_adapters(model, folder, lora, seed)
        config = with_lora(with_head_shape(folder.config, shape.head), lora)
        return PretrainedModel(model, config, tokenizer, head_is_new=not has_head)


def _set_adapters(
    model: GPTRewardModel, folder: NemoFolder, lora: LoraShape | None, seed: int
) -> None:
    """Fold an archive's adapters, or draw those that it lacks; the weights have to be in place."""
    if lora is None:
        fold_adapters(model)
    elif read_lora(folder.config) is None:
        draw_adapters(model, seed)


def load_reward_model(
    path: str | Path,
    layout: ParallelLayout,
    precision: Precision | None = None,
    pointwise_kernels: PointwiseChoice | None = None,
) -> LoadedRewardModel:
    """Load a finished reward model to score with; collective.

    Args:
        precision: of the backbone; None is the contract's. The returned contract names it.
        pointwise_kernels: see ``choose_kernels``.

    Raises:
        CheckpointError: the archive is unsafe or incomplete, or lacks a head or a contract.
    """
    with open_nemo(path) as folder:
        return reward_model_of(folder, layout, precision, pointwise_kernels)


def reward_model_of(
    folder: NemoFolder,
    layout: ParallelLayout,
    precision: Precision | None = None,
    pointwise_kernels: PointwiseChoice | None = PointwiseChoice.eager,
) -> LoadedRewardModel:
    """Load a finished reward model from an archive that is open; see ``load_reward_model``."""
    outline = reward_model_without_weights(
        folder, layout, precision, pointwise_kernels=pointwise_kernels
    )
    _load_into(outline.model, folder, with_head=True)
    return outline


def reward_model_without_weights(
    folder: NemoFolder,
    layout: ParallelLayout,
    precision: Precision | None = None,
    *,
    with_adapters: bool = True,
    pointwise_kernels: PointwiseChoice | None = PointwiseChoice.eager,
) -> LoadedRewardModel:
    """Build the model of ``reward_model_of`` after checking the weights, but do not load them.

    Until then they take no memory on a CPU. Without adapters the caller folds LoRA into the
    weights.
    """
    tokenizer = folder.load_tokenizer()
    contract = contract_of(folder, tokenizer)
    if contract is None:
        raise CheckpointError(
            f"{folder.source}: it has no scoring contract, so nothing says how a text becomes a "
            "score; wanted a reward model written by training"
        )
    if tokenizer.fingerprint != contract.tokenizer_fingerprint:
        raise CheckpointError(
            f"{folder.source}: tokenizer: got fingerprint {tokenizer.fingerprint}, "
            f"the scoring contract wants {contract.tokenizer_fingerprint}"
        )
    num_outputs = contract.num_outputs
    shape = model_shape(folder)
    shape.length_dependent_rope(contract.seq_length)  # raises if it has none
    if not _check_head(folder, shape, num_outputs):
        raise CheckpointError(f"{folder.source}: it has no reward head ({HEAD})")
    tokenizer.check_fits(shape.vocab_size)
    model = build_reward_model(
        shape if with_adapters else replace(shape, lora=None),
        layout,
        num_attributes=num_outputs,
        precision=precision or Precision(contract.dtype),
        reply_marker=contract.reply_marker,
        pointwise_kernels=pointwise_kernels,
    )
    decide_together(current_device(), gather_objects)
    return LoadedRewardModel(
        model.eval(),
        contract.with_dtype(precision),
        tokenizer,
        folder.config,
        fingerprint_of(folder),
    )


def save_reward_model(
    path: str | Path,
    model: GPTRewardModel,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    contract: ScoringContract | None,
    *,
    copied: bool = False,
) -> None:
    """Write a reward model's archive, whole or not at all; collective.

    Args:
        contract: None leaves out the head, which makes it a base model's archive.
        copied: write copies of the weights. On a CPU memory that was written is never released, so
            use it if the model itself is to be freed.
    """
    path = Path(path)
    staging = path.with_name(f".{path.name}.staging")
    with explaining_full_disk(path):
        on_main(lambda: _make_staging(staging, tokenizer))
    # Stacked by layer, as an archive has them; a run's checkpoint has a key for each layer.
    weights = model.sharded_state_dict(prefix=PREFIX)
    weights.pop(PREFIX + LEARNED_BY_OBJECTIVE, None)
    if contract is None:
        of_head = PREFIX + HEAD_PREFIX
        weights = {key: each for key, each in weights.items() if not key.startswith(of_head)}
    arrived = copy_tensors(weights, []) if copied else None
    sums = save_weights(weights, staging / "weights", arrived)

    def write() -> None:
        rules = None if contract is None else contract.to_dict()
        parts = staging / "weights", staging / "tokenizer"
        write_nemo(path, dict(config), *parts, rules, build_fingerprint(sums, config))
        shutil.rmtree(staging)

    with explaining_full_disk(path):
        on_main(write)
    barrier()


def _make_staging(staging: Path, tokenizer: Tokenizer) -> None:
    shutil.rmtree(staging, ignore_errors=True)  # left by a killed save
    (staging / "tokenizer").mkdir(parents=True)
    tokenizer.save(staging / "tokenizer")


def contract_of(folder: NemoFolder, tokenizer: Tokenizer | None = None) -> ScoringContract | None:
    """Read an open archive's contract; None for a base model. ``tokenizer`` tries its template."""
    if folder.contract is None:
        return None
    try:
        contract = ScoringContract.from_dict(folder.contract)
        if tokenizer is not None:
            contract.check_template_ends(tokenizer)
    except (CheckpointError, DataError) as error:
        raise CheckpointError(f"{folder.source}: {error}") from error
    return contract


def _check_head(folder: NemoFolder, shape: ModelShape, num_outputs: int, advice: str = "") -> bool:
    """Check the archive's reward head; False if it has none. Errors end with ``advice``."""
    stored = folder.tensors
    if HEAD not in stored:
        return False
    head = shape.head or HeadShape()
    wanted = head.tensors(num_outputs, shape.hidden_size)
    if HEAD_BIAS in stored and read_head_shape(folder.config) is None:
        raise CheckpointError(
            f"{folder.source}: its reward head has a bias ({HEAD_BIAS}), wanted a head without "
            "one; `nemo-aligner import` makes an archive that has it in the scoring contract"
            + advice
        )
    got = {name: stored[HEAD_PREFIX + name][0] for name in head_names(folder)}
    if set(got) != set(wanted):
        raise CheckpointError(
            f"{folder.source}: {HEAD_PREFIX}: got {', '.join(sorted(got))}, wanted "
            f"{', '.join(sorted(wanted))}, as of a head that is {head}{advice}"
        )
    rows = got["weight"][0]
    if rows != num_outputs:
        raise CheckpointError(
            f"{folder.source}: {HEAD}: got {rows} outputs, wanted {num_outputs}{advice}"
        )
    for name, size in wanted.items():
        if got[name] != size:
            raise CheckpointError(
                f"{folder.source}: {HEAD_PREFIX}{name}: got shape {list(got[name])}, "
                f"wanted {list(size)}{advice}"
            )
    return True


def _load_into(model: GPTRewardModel, folder: NemoFolder, *, with_head: bool) -> None:
    load_backbone(model, folder)
    if with_head:
        set_head(model, read_head(folder))


def set_head(model: GPTRewardModel, tensors: Mapping[str, Tensor]) -> None:
    """Load the head's ``tensors``, whose shapes fit, on the ranks that have a head."""
    # The last pipeline stage; the others have no head.
    if model.post_process:
        model.rm_head.load_state_dict(tensors)


# Initial heads: outputs of another reward model, matched by the attributes' names.

_KEY = "pretrained_checkpoint.load_rm_head_weights"
# Tensors with this prefix are shared by all outputs; the others have a row for each.
_OF_ALL = "hidden."


def check_initial_head(
    path: str | Path, contract: ScoringContract, names: Mapping[str, str]
) -> None:
    """Check that another reward model can provide the outputs of ``contract``; reads no weights.

    ``names`` maps attributes to their names in that model, where they differ.

    Raises:
        ConfigError: it names the missing attributes, or the difference.
        CheckpointError: the model cannot be read, or is no reward model.
    """
    with open_nemo(path, with_weights=False) as folder:
        _choose(folder, contract, names)


def init_head_from(
    model: GPTRewardModel,
    path: str | Path,
    contract: ScoringContract,
    shape: ModelShape,
    names: Mapping[str, str],
) -> None:
    """Copy the outputs of the reward model at ``path`` into ``model``'s head; collective.

    Args:
        contract: of ``model``.
        shape: of ``model``.
        names: see ``check_initial_head``.

    Raises:
        ConfigError, CheckpointError: as ``check_initial_head``; or the heads' layers differ.
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
    """Row in the head of ``folder`` for every output of ``contract``."""
    theirs, where = contract_of(folder), f"{_KEY}: {folder.source}"
    if theirs is None:
        raise ConfigError(f"{where}: it has no scoring contract, wanted a reward model")
    _check_names(contract, names)
    wanted = [names.get(name, name) for name in contract.attributes]
    lacking = [name for name in wanted if name not in theirs.attributes]
    if lacking:
        raise ConfigError(
            f"{where}: got the attributes {', '.join(theirs.attributes)}, wanted "
            f"{', '.join(lacking)}, too; pretrained_checkpoint.rm_head_names maps attributes "
            "to their names there"
        )
    indices = [theirs.attributes.index(name) for name in wanted]
    _check_read_alike(contract, theirs, indices, where)
    # Bins and quantiles have several rows for an attribute, side by side.
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
    """Check that both heads read the same tokens, and that their outputs mean the same."""
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


# Text to token ids, by a model's contract or by settings.


def read_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer at ``path``: a .nemo file, its folder, or one with tokenizer.json.

    Raises:
        AlignerError: there is no tokenizer.
    """
    return _read_tokenizer_or_rules(path)[0]


def _read_tokenizer_or_rules(path: Path) -> tuple[Tokenizer, ScoringContract | None]:
    if (path / "tokenizer.json").is_file():
        # An export of this package is read as its contract has it.
        is_exported = (path / CONTRACT_NAME).is_file()
        return (load_tokenizer if is_exported else load_hf_tokenizer)(path), None
    return read_text_rules(path)


def read_or_build_text_rules(
    path: Path,
    data: DataConfig,
    attributes: Sequence[str],
    reads: ScoredPosition = ScoredPosition.last_token,
) -> tuple[Tokenizer, ScoringContract, bool]:
    """Load the tokenizer at ``path`` and its contract, or build a contract from the settings.

    The last value is true where the contract was built from the settings.
    ``path`` is a .nemo file, the folder it unpacks to, or a folder with tokenizer.json.

    Raises:
        AlignerError: there is no tokenizer, or the settings do not fit it.
    """
    tokenizer, contract = _read_tokenizer_or_rules(path)
    if contract is not None:
        return tokenizer, contract, False
    kind = RewardModelType.regression if attributes else RewardModelType.binary_ranking
    config = ModelConfig(
        reward_model_type=kind,
        regression=RegressionConfig(list(attributes)),
        head=HeadConfig(reads=reads),
        data=data,
    )
    return tokenizer, build_contract(config, tokenizer, Precision.fp32), True
