"""A reward model of Hugging Face: the names of its outputs, and its scoring contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_aligner.checkpoint.attributes import attribute_names
from nemo_aligner.checkpoint.hf.source import Source
from nemo_aligner.checkpoint.hf.tensors import HF_HEAD, REWARD_SUFFIX
from nemo_aligner.checkpoint.nemo.folders import CONTRACT_NAME
from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.data import DataConfig, RegressionConfig
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.errors import CheckpointError, short, shown
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.contract_settings import build_contract
from nemo_aligner.text.tokenizer import Tokenizer

MAX_DEFAULT_SEQ_LENGTH = 4096
# A tensor without columns may have any number of rows, and takes no byte.
_MOST_LABELS = 10_000


@dataclass(frozen=True)
class ContractOptions:
    """What a reward model's folder leaves open: ``model.data.template`` and ``seq_length``.

    None is the tokenizer's template, and the model's longest text, but at most 4096 tokens.
    ``attributes`` name the outputs; None are those of ``id2label``.
    """

    template: str | None = None
    seq_length: int | None = None
    attributes: tuple[str, ...] | None = None


def labels_of(found: Source, options: ContractOptions | None) -> list[str] | None:
    """The names of a reward model's outputs, in order; None for a base model.

    Raises:
        CheckpointError: the head is not one linear map without a bias, its outputs are not rewards,
            or have no names that fit.
        ConfigError: the names that are given do not fit.
    """
    architectures = found.config.get("architectures") or [""]
    if not isinstance(architectures, list):
        raise CheckpointError(f"architectures: got {shown(architectures)}, wanted a list of names")
    architecture = str(architectures[0])
    if not architecture.endswith(REWARD_SUFFIX):
        if HF_HEAD in found.tensors:
            raise CheckpointError(
                f"architectures: got {shown(architectures)} beside {HF_HEAD}, wanted the name of a "
                f"...{REWARD_SUFFIX}"
            )
        return None
    if "score.bias" in found.tensors:
        raise CheckpointError("score.bias: got a head with a bias, wanted one without")
    if HF_HEAD not in found.tensors:
        raise CheckpointError(
            f"got a {short(architecture)} without {HF_HEAD}, wanted it as its head"
        )
    problem = found.config.get("problem_type")
    if problem not in (None, "regression"):
        raise CheckpointError(
            f"problem_type: got {shown(problem)}, wanted 'regression': the outputs of a classifier "
            "are no rewards"
        )
    if options is not None and options.attributes is not None:
        return list(attribute_names(options.attributes, _rows_of_head(found)))
    return _stated_labels(found)


def _stated_labels(found: Source) -> list[str]:
    names = found.config.get("id2label")
    try:
        if names is None:
            names = {number: f"LABEL_{number}" for number in range(_num_labels(found))}
        by_number = {int(key): str(names[key]) for key in names}
        labels = [by_number[number] for number in range(len(names))]
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"id2label: got {shown(names)}, wanted names for the numbers from 0 on (or num_labels)"
        ) from error
    return ["reward"] if labels == ["LABEL_0"] else labels


def _num_labels(found: Source) -> int:
    rows = _rows_of_head(found)
    count = found.config.get("num_labels", rows)
    if count != rows:
        raise CheckpointError(
            f"num_labels: got {shown(count)} and {rows} rows of {HF_HEAD}, wanted as many"
        )
    return rows


def _rows_of_head(found: Source) -> int:
    rows = next(iter(found.tensors[HF_HEAD].shape), 0)
    if rows > _MOST_LABELS:
        raise CheckpointError(f"{HF_HEAD}: got {rows} rows, wanted at most {_MOST_LABELS}")
    return rows


def contract_of(
    found: Source,
    labels: list[str] | None,
    tokenizer: Tokenizer,
    precision: Precision,
    options: ContractOptions | None,
) -> ScoringContract | None:
    """What a score of this model means: its own contract if we exported it, else a new one.

    Raises:
        CheckpointError: there are options, and nothing that they could decide; or its own contract
            is of another model.
        ConfigError: the template is not found, or unfit.
    """
    if options is not None and (labels is None or found.contract is not None):
        why = "a base model has none" if labels is None else f"it brings its own, {CONTRACT_NAME}"
        raise CheckpointError(f"got options for a scoring contract, but {why}")
    if labels is None:
        return None
    if found.contract is not None:
        contract = ScoringContract.from_dict(found.contract)
        contract.check_template_ends(tokenizer)
        _check_own(contract, labels, tokenizer.fingerprint)
        return contract.with_dtype(precision)
    return _new_contract(found, labels, tokenizer, precision, options or ContractOptions())


def _new_contract(
    found: Source,
    labels: list[str],
    tokenizer: Tokenizer,
    precision: Precision,
    options: ContractOptions,
) -> ScoringContract:
    longest = int(found.config["max_position_embeddings"])
    is_ranking = len(labels) == 1
    settings = ModelConfig(
        reward_model_type=RewardModelType.binary_ranking
        if is_ranking
        else RewardModelType.regression,
        regression=RegressionConfig(attributes=labels),
        data=DataConfig(
            template=options.template,
            seq_length=options.seq_length or min(longest, MAX_DEFAULT_SEQ_LENGTH),
        ),
    )
    contract = build_contract(settings, tokenizer, precision)
    if options.template is not None and not contract.template:
        raise CheckpointError(
            f"template: got {options.template!r}, but the tokenizer has no chat template"
        )
    return dataclasses.replace(contract, attributes=tuple(labels))


def _check_own(contract: ScoringContract, labels: Sequence[str], fingerprint: str) -> None:
    for name, got, wanted in (
        ("config.json: id2label", list(labels), list(contract.attributes)),
        ("tokenizer fingerprint", fingerprint, contract.tokenizer_fingerprint),
    ):
        if got != wanted:
            raise CheckpointError(
                f"{name}: got {shown(got)}, {CONTRACT_NAME} wants {shown(wanted)}"
            )
