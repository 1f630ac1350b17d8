"""Load reward models from ``.nemo`` archives to train or to score, and save them.

This module also reads the tokenizer and scoring contract without the weights. ``initial_head.py``
copies the head of one reward model into another.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from nemo_aligner.checkpoint.conversion_cache import find_tokenizer
from nemo_aligner.checkpoint.decoder_tensors import (
    HEAD,
    HEAD_BIAS,
    HEAD_PREFIX,
    LEARNED_BY_OBJECTIVE,
    PREFIX,
)
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.fingerprint import (
    body_fingerprint_of,
    build_fingerprints,
    fingerprint_of,
    is_of_body,
)
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME, NemoFolder
from nemo_aligner.checkpoint.nemo.load_weights import (
    head_names,
    load_adapters,
    load_backbone,
    missing_contract,
    model_shape,
    read_head,
)
from nemo_aligner.checkpoint.nemo.write import write_nemo
from nemo_aligner.checkpoint.weights.save import copy_tensors, fill_outlines, save_weights
from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.kernels import DEFAULT_KERNELS, KernelChoices
from nemo_aligner.config.model import (
    DataConfig,
    HeadConfig,
    ModelConfig,
    Recompute,
    RegressionConfig,
    ScoredPosition,
)
from nemo_aligner.contract.added_tokens import load_hf_tokenizer
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import build_contract, check_expected
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.cpu.kernels import decide_together
from nemo_aligner.distributed.collectives import (
    barrier,
    current_device,
    gather_objects,
    on_main,
    run_on_some,
)
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.lora import LoraDropout, draw_adapters, fold_adapters
from nemo_aligner.models.reward_model import GPTRewardModel, build_reward_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.head import (
    HeadShape,
    head_to_train,
    read_head_shape,
    with_head_shape,
)
from nemo_aligner.models.shapes.lora import LoraShape, check_lora, read_lora, with_lora
from nemo_aligner.models.shared_body import Bodies, BodyKey, SharedBody, share_body
from nemo_aligner.utils.errors import CheckpointError, DataError
from nemo_aligner.utils.processes import is_main
from nemo_aligner.utils.writing import explaining_full_disk

_OR_NEW_HEAD = ". To train a new head instead, set pretrained_checkpoint.new_head=true"


@dataclass(frozen=True)
class PretrainedModel:
    """A model that was loaded for training.

    Attributes:
        model: the backbone and, if the archive has a head, the head from the archive.
        config: settings of the model by the keys of ``model_config.yaml``.
        tokenizer: the archive's tokenizer.
        head_is_new: whether the head was drawn at random, instead of loaded from the archive.
    """

    model: GPTRewardModel
    config: dict[str, Any]
    tokenizer: Tokenizer
    head_is_new: bool


@dataclass(frozen=True)
class LoadedRewardModel:
    """A finished reward model with its scoring contract, tokenizer and settings.

    ``fingerprint`` identifies the weights; it is None for an archive without checksums. ``body``
    tells how many of them are shared.
    """

    model: GPTRewardModel
    contract: ScoringContract
    tokenizer: Tokenizer
    config: dict[str, Any]
    fingerprint: str | None = None
    body: SharedBody | None = None

    @property
    def shares_body(self) -> bool:
        """Tell if the body is that of another model."""
        return self.body is not None and self.body.source is not None


@dataclass(frozen=True)
class CheckpointDescription:
    """Settings, tokenizer and scoring contract of a checkpoint, read without its weights.

    A training run is prepared from this description, so settings or data that do not fit end the
    run before the weights are unpacked. ``load_pretrained`` opens the checkpoint again for the
    weights.

    Attributes:
        path: the archive or folder.
        config: settings of the model by the keys of ``model_config.yaml``.
        tokenizer: the checkpoint's tokenizer.
        removed_tokens: texts of its added tokens that have no embedding; ``tokenizer`` lacks them.
        contract: None for a base model.
    """

    path: Path
    config: dict[str, Any]
    tokenizer: Tokenizer
    removed_tokens: list[str]
    contract: ScoringContract | None

    @classmethod
    def read(cls, path: str | Path) -> CheckpointDescription:
        """Open the checkpoint at ``path``; collective.

        Raises:
            CheckpointError: the checkpoint, its tokenizer or its contract cannot be read.
        """
        with open_nemo(path, with_weights=False) as folder:
            tokenizer = folder.load_tokenizer()
            contract = contract_of(folder, tokenizer)
            return cls(Path(path), folder.config, tokenizer, folder.removed_tokens, contract)

    @cached_property
    def shape(self) -> ModelShape:
        """The model's shape; raises CheckpointError if the settings are not supported."""
        return ModelShape.from_config(self.config)


def read_text_rules(path: str | Path) -> tuple[Tokenizer, ScoringContract | None]:
    """Read an archive's tokenizer and scoring contract (None for a base model); collective."""
    base = CheckpointDescription.read(path)
    return base.tokenizer, base.contract


def check_expected_contract(
    path: str | Path, precision: Precision | None, expected: str | None, key: str
) -> None:
    """Raise ConfigError if an archive's contract hash is not ``expected``; loads no weights.

    Collective if torch.distributed is initialised; otherwise each rank checks for itself. An
    archive without a contract passes here, and fails when it is loaded.

    Args:
        precision: the precision with which the model will be loaded.
        expected: the expected hash; every contract passes if it is None.
        key: the setting that holds the expected hash.

    Raises:
        ConfigError: the contract's hash is not the expected one.
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
    kernels: KernelChoices = DEFAULT_KERNELS,
) -> PretrainedModel:
    """Load a base model, or a reward model to continue from, for training; collective.

    ``build_reward_model`` explains the other arguments.

    Args:
        new_head: train a new head, and ignore the head in the archive.
        head: settings of the reward head; None or defaults keep the layers of the archive's head.
        lora: the LoRA adapters to train; None folds the archive's adapters into the weights.

    Raises:
        CheckpointError: the archive is unsafe, incomplete or of an unsupported family; or its
            reward head or its LoRA adapters do not fit the arguments.
    """
    with open_nemo(path) as folder:
        shape, tokenizer = model_shape(folder), folder.load_tokenizer()
        if head is not None:
            shape = replace(shape, head=head_to_train(shape.head, head, is_new=new_head))
        tokenizer.check_fits(shape.vocab_size)
        check_lora(shape.lora, lora, path)
        shape = replace(shape, lora=lora or (shape.lora and shape.lora.with_dense_base()))
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
            kernels=kernels,
        )
        decide_together(current_device(), gather_objects, model.has_states)
        # Check the head first, because loading the backbone takes long.
        has_head = not new_head and _check_head(folder, shape, num_outputs, _OR_NEW_HEAD)
        _load_into(model, folder, with_head=has_head)
        _set_adapters(model, folder, lora, seed)
        config = with_lora(with_head_shape(folder.config, shape.head), lora)
        return PretrainedModel(model, config, tokenizer, head_is_new=not has_head)


def _set_adapters(
    model: GPTRewardModel, folder: NemoFolder, lora: LoraShape | None, seed: int
) -> None:
    """Prepare the LoRA adapters of a loaded model.

    If ``lora`` is None, the archive's adapters are folded into the weights. Otherwise the model
    trains adapters, which are initialised here if the archive has none.
    """
    if lora is None:
        fold_adapters(model)
    elif read_lora(folder.config) is None:
        draw_adapters(model, seed)


def load_reward_model(
    path: str | Path,
    layout: ParallelLayout,
    precision: Precision | None = None,
    kernels: KernelChoices = DEFAULT_KERNELS,
    bodies: Bodies | None = None,
) -> LoadedRewardModel:
    """Load a finished reward model to score with; collective.

    Args:
        precision: precision of the backbone; None means that of the contract. The returned contract
            records it.
        kernels: which implementations compute the operations of the model.
        bodies: loaded models of the same layout and kernels. If one of them has the same body, the
            model shares it; otherwise the model is added.

    Raises:
        CheckpointError: the archive is unsafe or incomplete, or lacks a head or a contract.
    """
    with open_nemo(path) as folder:
        return reward_model_of(folder, layout, precision, kernels, bodies)


def reward_model_of(
    folder: NemoFolder,
    layout: ParallelLayout,
    precision: Precision | None,
    kernels: KernelChoices,
    bodies: Bodies | None = None,
) -> LoadedRewardModel:
    """Load like ``load_reward_model``, but from an archive that is already open; collective."""
    key = None if bodies is None else _find_body_key(folder, precision)
    source = None if bodies is None or key is None else bodies.get(key)
    loaded = reward_model_without_weights(
        folder,
        layout,
        precision,
        kernels=kernels,
        frees_body=source is not None,
    )
    if source is None:
        _load_into(loaded.model, folder, with_head=True)
    else:
        load_adapters(loaded.model, folder)
        set_head(loaded.model, read_head(folder))
        share_body(loaded.model, source)
    if bodies is not None and key is not None:
        bodies.setdefault(key, loaded.model)
    return replace(loaded, body=_count_parameters(folder, source))


def _find_body_key(folder: NemoFolder, precision: Precision | None) -> BodyKey | None:
    """Return the key of an archive's body in ``Bodies``; None if it has no fingerprint."""
    fingerprint, contract = body_fingerprint_of(folder), contract_of(folder)
    if fingerprint is None or contract is None:
        return None
    return fingerprint, precision or Precision(contract.dtype)


def _count_parameters(folder: NemoFolder, source: GPTRewardModel | None) -> SharedBody:
    sizes = {folder.prefix + name: math.prod(entry[0]) for name, entry in folder.tensors.items()}
    in_body = sum(size for name, size in sizes.items() if is_of_body(name))
    return SharedBody(source, sum(sizes.values()), 0 if source is None else in_body)


def reward_model_without_weights(
    folder: NemoFolder,
    layout: ParallelLayout,
    precision: Precision | None,
    *,
    kernels: KernelChoices,
    with_adapters: bool = True,
    frees_body: bool = False,
) -> LoadedRewardModel:
    """Build the model of ``reward_model_of`` and check the stored weights, but do not load them.

    On a CPU the weights take no memory until they are loaded. If ``with_adapters`` is false, the
    model has no LoRA adapters, and the caller folds the archive's adapters into the weights.
    ``frees_body`` is explained by ``build_reward_model``.
    """
    tokenizer = folder.load_tokenizer()
    contract = contract_of(folder, tokenizer)
    if contract is None:
        raise missing_contract(folder)
    if tokenizer.fingerprint != contract.tokenizer_fingerprint:
        raise CheckpointError(
            f"{folder.source}: tokenizer: got fingerprint {tokenizer.fingerprint}, "
            f"but the scoring contract has {contract.tokenizer_fingerprint}. Use an unchanged copy "
            "of the archive"
        )
    num_outputs = contract.num_outputs
    shape = model_shape(folder)
    # Call this only for its error: it raises if the model's RoPE does not support this length.
    shape.length_dependent_rope(contract.seq_length)
    if not _check_head(folder, shape, num_outputs):
        raise CheckpointError(f"{folder.source}: it has no reward head ({HEAD}), wanted one")
    tokenizer.check_fits(shape.vocab_size)
    model = build_reward_model(
        shape if with_adapters else replace(shape, lora=None),
        layout,
        num_attributes=num_outputs,
        precision=precision or Precision(contract.dtype),
        reply_marker=contract.reply_marker,
        kernels=kernels,
        frees_body=frees_body,
        learns=False,
    )
    decide_together(current_device(), gather_objects, model.has_states)
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
    """Write the archive of a reward model, completely or not at all; collective.

    Args:
        config: settings of the model by the keys of ``model_config.yaml``.
        contract: None writes the archive of a base model, without the head.
        copied: write copies of the weights. On a CPU, memory that was written to disk is never
            released, so use this if the model is to be freed afterwards.
    """
    path = Path(path)
    staging = path.with_name(f".{path.name}.staging")
    try:
        with explaining_full_disk(path):
            on_main(lambda: _make_staging(staging, tokenizer))
        # By default Megatron stacks all layers under one key, as archives do.
        weights = model.sharded_state_dict(prefix=PREFIX)
        weights.pop(PREFIX + LEARNED_BY_OBJECTIVE, None)
        fill_outlines(weights, staging)
        if contract is None:
            head_prefix = PREFIX + HEAD_PREFIX
            weights = {key: weights[key] for key in weights if not key.startswith(head_prefix)}
        arrived = copy_tensors(weights, []) if copied else None
        sums = save_weights(weights, staging / "weights", arrived)

        def write() -> None:
            rules = None if contract is None else contract.to_dict()
            parts = staging / "weights", staging / "tokenizer"
            write_nemo(path, dict(config), *parts, rules, build_fingerprints(sums, config))

        with explaining_full_disk(path):
            # Not ``on_main``: hashing and archiving all weights may take longer than its limit.
            run_on_some(write if is_main() else None)
    finally:  # after an error, too: no collective here, as the other ranks may have left
        if is_main():
            shutil.rmtree(staging, ignore_errors=True)
    barrier()


def _make_staging(staging: Path, tokenizer: Tokenizer) -> None:
    # A killed process may have left the folder, and one of an earlier version the file.
    shutil.rmtree(staging, ignore_errors=True)
    staging.with_suffix(".partial").unlink(missing_ok=True)
    (staging / "tokenizer").mkdir(parents=True)
    tokenizer.save(staging / "tokenizer")


def contract_of(folder: NemoFolder, tokenizer: Tokenizer | None = None) -> ScoringContract | None:
    """Read the scoring contract of an open archive; None for a base model.

    With ``tokenizer``, also check that the contract's chat template does not loop forever.
    """
    contract = folder.read_contract()
    if contract is not None and tokenizer is not None:
        try:
            contract.check_template_ends(tokenizer)
        except DataError as error:
            raise CheckpointError(f"{folder.source}: {error}") from error
    return contract


def _check_head(folder: NemoFolder, shape: ModelShape, num_outputs: int, advice: str = "") -> bool:
    """Check the archive's reward head; False if there is none. Errors end with ``advice``."""
    stored = folder.tensors
    if HEAD not in stored:
        return False
    head = shape.head or HeadShape()
    expected = head.tensors(num_outputs, shape.hidden_size)
    if HEAD_BIAS in stored and read_head_shape(folder.config) is None:
        raise CheckpointError(
            f"{folder.source}: its reward head has a bias ({HEAD_BIAS}), which is not supported "
            "here; `nemo-aligner import` moves the bias into the scoring contract" + advice
        )
    sizes = {name: stored[HEAD_PREFIX + name][0] for name in head_names(folder)}
    if set(sizes) != set(expected):
        raise CheckpointError(
            f"{folder.source}: {HEAD_PREFIX}: got {', '.join(sorted(sizes))}, wanted "
            f"{', '.join(sorted(expected))} for a head that is {head}{advice}"
        )
    outputs = sizes["weight"][0]
    if outputs != num_outputs:
        raise CheckpointError(
            f"{folder.source}: {HEAD}: got {outputs} outputs, wanted {num_outputs}{advice}"
        )
    for name, size in expected.items():
        if sizes[name] != size:
            raise CheckpointError(
                f"{folder.source}: {HEAD_PREFIX}{name}: got shape {list(sizes[name])}, "
                f"wanted {list(size)}{advice}"
            )
    return True


def _load_into(model: GPTRewardModel, folder: NemoFolder, *, with_head: bool) -> None:
    load_backbone(model, folder)
    if with_head:
        set_head(model, read_head(folder))


def set_head(model: GPTRewardModel, tensors: Mapping[str, Tensor]) -> None:
    """Load ``tensors`` into the model's head, on ranks that have a head. The shapes must fit."""
    # post_process is true on the last pipeline stage, the only one that has a head.
    if model.post_process:
        model.rm_head.load_state_dict(tensors)


# Tokenizer and scoring contract: read from a checkpoint, or the contract built from settings.


def read_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of what ``open_nemo`` opens, or of any folder with tokenizer.json.

    Raises:
        AlignerError: ``path`` has no tokenizer.
    """
    return _read_tokenizer_or_rules(path)[0]


def _read_tokenizer_or_rules(path: Path) -> tuple[Tokenizer, ScoringContract | None]:
    path = find_tokenizer(path)
    if (path / "tokenizer.json").is_file():
        # An exported contract has the fingerprint of these files, so they are loaded unchanged.
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

    Args:
        path: a checkpoint, or a folder with tokenizer.json; see ``read_tokenizer``.
        data: settings from which a missing contract is built.
        attributes: names of the rewards; empty for a ranking model.
        reads: the tokens at which the head reads the reward.

    Returns:
        Tokenizer and contract, and whether the contract was built from the settings.

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
