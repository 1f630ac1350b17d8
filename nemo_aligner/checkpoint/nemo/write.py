"""Write a conversion's archive, one tensor at a time, so that no model is held in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.nemo.archive import write_nemo
from nemo_aligner.checkpoint.nemo.fingerprint import build_fingerprints
from nemo_aligner.checkpoint.weights.save import LazyTensor, save_lazy
from nemo_aligner.contract.contract import ScoringContract


def write_lazy_nemo(
    output: Path,
    config: dict[str, Any],
    tensors: Mapping[str, LazyTensor],
    layers: Mapping[str, Sequence[LazyTensor]],
    scratch: Path,
    contract: ScoringContract | None,
) -> None:
    """Write a conversion's archive with its fingerprints, reading one tensor after the other.

    Args:
        output: path of the new archive.
        config: settings of the model by the keys of ``model_config.yaml``.
        tensors: tensors outside the layers, by their stored names.
        layers: for each stored name in the layers, one tensor of each layer.
        scratch: temporary folder on the disk of ``output``. Its folder ``tokenizer`` already has
            the tokenizer's files.
        contract: scoring contract of a reward model; None for a base model.
    """
    weights, rules = scratch / "weights", None if contract is None else contract.to_dict()
    fingerprints = build_fingerprints(save_lazy(tensors, layers, weights), config)
    write_nemo(output, config, weights, scratch / "tokenizer", rules, fingerprints)
