"""A reward model on this rank, from and to a ``.nemo`` archive: to train, to score, to keep."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.nemo import (
    NemoFolder,
    load_weights,
    open_nemo,
    save_weights,
    stored_tensors,
    write_nemo,
)
from nemo_aligner.config.schema import Precision, Recompute
from nemo_aligner.data.contract import ScoringContract
from nemo_aligner.data.tokenizer import Tokenizer, load_tokenizer
from nemo_aligner.errors import CheckpointError
from nemo_aligner.models.reward_model import GPTRewardModel, build_reward_model
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.parallel.collectives import barrier, on_main
from nemo_aligner.parallel.layout import ParallelLayout

_PREFIX = "model."
_HEAD = "model.rm_head.weight"
_HEAD_BIAS = "model.rm_head.bias"
_EMBEDDING = "model.embedding.word_embeddings.weight"


@dataclass(frozen=True)
class PretrainedModel:
    """A reward model to train: backbone from the archive, head new unless the archive has one."""

    model: GPTRewardModel
    config: dict[str, Any]
    tokenizer: Tokenizer
    head_is_new: bool


@dataclass(frozen=True)
class LoadedRewardModel:
    """A finished reward model with everything that gives its scores their meaning."""

    model: GPTRewardModel
    contract: ScoringContract
    tokenizer: Tokenizer
    config: dict[str, Any]


def read_text_rules(path: str | Path) -> tuple[Tokenizer, ScoringContract | None]:
    """The archive's tokenizer and, of a reward model, its contract; every rank calls it."""
    with open_nemo(path, with_weights=False) as folder:
        return load_tokenizer(folder.tokenizer), _contract(folder)


def load_pretrained(
    path: str | Path,
    layout: ParallelLayout,
    *,
    num_attributes: int,
    precision: Precision,
    recompute: Recompute = Recompute.none,
    recompute_layers: int | None = None,
    seed: int = 1234,
) -> PretrainedModel:
    """Load a base model, or a reward model to go on from, for training; every rank calls it.

    Raises:
        CheckpointError: the archive is unsafe, incomplete, of another family, or its reward head
            has another number of attributes or a bias.
    """
    with open_nemo(path) as folder:
        model = build_reward_model(
            ModelShape.from_config(folder.config),
            layout,
            num_attributes=num_attributes,
            precision=precision,
            recompute=recompute,
            recompute_layers=recompute_layers,
            seed=seed,
        )
        has_head = _check_head(folder, num_attributes)
        _load_into(model, folder, with_head=has_head)
        return PretrainedModel(
            model=model,
            config=folder.config,
            tokenizer=load_tokenizer(folder.tokenizer),
            head_is_new=not has_head,
        )


def load_reward_model(
    path: str | Path, layout: ParallelLayout, precision: Precision | None = None
) -> LoadedRewardModel:
    """Load a finished reward model to score with; every rank calls it.

    ``precision`` None is the contract's; with another the contract that comes along names that one.

    Raises:
        CheckpointError: the archive is unsafe or incomplete, or lacks a head or a contract.
    """
    with open_nemo(path) as folder:
        return reward_model_of(folder, layout, precision)


def reward_model_of(
    folder: NemoFolder, layout: ParallelLayout, precision: Precision | None = None
) -> LoadedRewardModel:
    """``load_reward_model`` of an archive that is open."""
    contract = _contract(folder)
    if contract is None:
        raise CheckpointError(
            f"{folder.source}: it has no scoring contract, so nothing says how a text becomes a "
            "score; wanted a reward model written by train_reward_model.py"
        )
    tokenizer = load_tokenizer(folder.tokenizer)
    _check_tokenizer(tokenizer, contract, folder.source)
    num_attributes = len(contract.attributes)
    if not _check_head(folder, num_attributes):
        raise CheckpointError(f"{folder.source}: it has no reward head ({_HEAD})")
    model = build_reward_model(
        ModelShape.from_config(folder.config),
        layout,
        num_attributes=num_attributes,
        precision=precision or Precision(contract.dtype),
    )
    _load_into(model, folder, with_head=True)
    return LoadedRewardModel(model.eval(), contract.with_dtype(precision), tokenizer, folder.config)


def save_reward_model(
    path: str | Path,
    model: GPTRewardModel,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    contract: ScoringContract,
) -> None:
    """Write a reward model's archive, whole or not at all; every rank calls it."""
    path = Path(path)
    staging = path.with_name(f".{path.name}.staging")
    on_main(lambda: _make_staging(staging, tokenizer))
    save_weights(model.sharded_state_dict(prefix=_PREFIX), staging / "weights")

    def write() -> None:
        write_nemo(
            path, dict(config), staging / "weights", staging / "tokenizer", contract.to_dict()
        )
        shutil.rmtree(staging)

    on_main(write)
    barrier()


def _make_staging(staging: Path, tokenizer: Tokenizer) -> None:
    shutil.rmtree(staging, ignore_errors=True)  # left by a killed save
    (staging / "tokenizer").mkdir(parents=True)
    tokenizer.save(staging / "tokenizer")


def _contract(folder: NemoFolder) -> ScoringContract | None:
    return None if folder.contract is None else ScoringContract.from_dict(folder.contract)


def _check_head(folder: NemoFolder, num_attributes: int) -> bool:
    """Whether the archive has a reward head that fits."""
    stored = stored_tensors(folder.weights)
    if _HEAD not in stored:
        return False
    if _HEAD_BIAS in stored:
        raise CheckpointError(
            f"{folder.source}: its reward head has a bias ({_HEAD_BIAS}), wanted a head without one"
        )
    got = stored[_HEAD][0][0]
    if got != num_attributes:
        raise CheckpointError(
            f"{folder.source}: {_HEAD}: got {got} attributes, wanted {num_attributes}"
        )
    return True


def _check_tokenizer(tokenizer: Tokenizer, contract: ScoringContract, path: str | Path) -> None:
    if tokenizer.fingerprint != contract.tokenizer_fingerprint:
        raise CheckpointError(
            f"{path}: tokenizer: got fingerprint {tokenizer.fingerprint}, "
            f"the scoring contract wants {contract.tokenizer_fingerprint}"
        )


def _check_vocabulary(folder: NemoFolder, vocab_size: int) -> None:
    """The loader lets rows be missing, as padding differs from layout to layout; words may not."""
    stored = stored_tensors(folder.weights)
    if _EMBEDDING in stored and stored[_EMBEDDING][0][0] < vocab_size:
        raise CheckpointError(
            f"{folder.source}: {_EMBEDDING}: got {stored[_EMBEDDING][0][0]} rows, "
            f"wanted at least the vocabulary of {vocab_size}"
        )


def _load_into(model: GPTRewardModel, folder: NemoFolder, *, with_head: bool) -> None:
    _check_vocabulary(folder, int(folder.config["vocab_size"]))
    request = model.sharded_state_dict(prefix=_PREFIX)
    if not with_head:
        request.pop(_HEAD, None)
    state = load_weights(request, folder.weights)
    plain = {key.removeprefix(_PREFIX): value for key, value in state.items()}
    missing, unexpected = model.load_state_dict(plain, strict=False)
    # TransformerEngine's opaque state is never loaded; a new head stays as it was drawn.
    lost = [key for key in missing if "_extra_state" not in key and not key.startswith("rm_head.")]
    if lost or unexpected:
        raise CheckpointError(f"{folder.source}: not loaded: {', '.join([*lost, *unexpected])}")
