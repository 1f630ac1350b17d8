"""The scoring contract of a converted reward model: that of an export, or a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nemo_aligner.checkpoint.hf.heads import FoundHead, is_reward_model, reads_steps
from nemo_aligner.checkpoint.hf.quantized.methods import read_dtype
from nemo_aligner.checkpoint.hf.scored_token import read_reward_token, with_trailing_pad
from nemo_aligner.checkpoint.hf.source import Source
from nemo_aligner.checkpoint.nemo.folder import CONTRACT_NAME
from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.dtypes import format_of
from nemo_aligner.config.model import (
    DataConfig,
    HeadConfig,
    ModelConfig,
    RegressionConfig,
    ScoredPosition,
)
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.fields import are_numbers
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.contract.readout import BINS, Readout
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import CheckpointError, DataError, shown

_MAX_DEFAULT_SEQ_LENGTH = 4096


class ContractLimits(NamedTuple):
    """What training that starts from a reward model takes over from its contract, if not set.

    Attributes:
        seq_length: tokens of the longest sample.
        dtype: the precision, such as ``bf16``; None if it is unknown.
    """

    seq_length: int
    dtype: str | None


def predict_limits(config: Mapping[str, Any], longest: int) -> ContractLimits | None:
    """Predict from ``config.json`` what the contract will be after a conversion with no options.

    ``longest`` is the model's limit for the tokens of a sample. None for a base model.

    Raises:
        CheckpointError: the class in the config has no valid name.
    """
    if not is_reward_model(config):
        return None
    dtype = read_dtype(config)
    precision = None if dtype is None else format_of(dtype).precision.value
    return ContractLimits(min(longest, _MAX_DEFAULT_SEQ_LENGTH), precision)


class ContractOptions(NamedTuple):
    """Options of ``convert_hf_to_nemo`` for a new scoring contract; None means not set.

    Attributes:
        template: chat template.
        seq_length: tokens of the longest sample.
        attributes: names of the rewards.
        step_separator: text after each step of a response.
        reads: rule that finds the tokens at which the head reads.
        reward_token: token that is appended to every sample and read, by its text or its id.
    """

    template: str | None = None
    seq_length: int | None = None
    attributes: Sequence[str] | None = None
    step_separator: str | None = None
    reads: ScoredPosition | None = None
    reward_token: str | None = None

    @property
    def has_steps(self) -> bool:
        """True if an option asks for one reward per step."""
        return self.step_separator is not None or self.reads is not None


def refuse_options(source: Source, labels: list[str] | None, options: ContractOptions) -> None:
    """Raise CheckpointError if a contract option is set, but no new contract will be built.

    No contract is built for a base model (``labels`` is None), nor for a folder that this package
    exported, which has a contract already.
    """
    builds_contract = labels is not None and source.contract is None
    if not builds_contract and any(option is not None for option in options):
        reason = "a base model has none" if labels is None else f"the model has {CONTRACT_NAME}"
        raise CheckpointError(
            f"got options for a new scoring contract, but {reason}. Leave out --template, "
            "--seq-length, --attributes, --step-separator, --reads and --reward-token"
        )


def read_or_build_contract(
    source: Source,
    labels: list[str] | None,
    tokenizer: Tokenizer,
    precision: Precision,
    longest: int,
    options: ContractOptions,
    head: FoundHead | None,
) -> ScoringContract | None:
    """Read the contract of an export of this package, or build a contract for another model.

    Args:
        labels: names of the rewards; None for a base model. The result is then None, too.
        precision: precision of the weights in the archive.
        longest: the model's limit for the tokens of a sample.
        options: options for a new contract.
        head: the model's head. If it has two outputs per step but one reward, the contract gets a
            readout that turns the two logits into the reward.
    """
    if labels is None:
        return None
    if source.contract is not None:
        contract = ScoringContract.from_dict(source.contract)
        # A GGUF file has no tokenizer.json, so the source has rebuilt one. It assigns the same ids
        # as the one in the archive, but has other bytes, and therefore another fingerprint.
        if source.remakes_tokenizer:
            fingerprint = tokenizer.fingerprint
            contract = replace(contract, tokenizer_fingerprint=fingerprint)
        # Anybody may have edited the template in the folder, so make sure that it does not loop
        # forever.
        contract.check_template_ends(tokenizer)
        _check_exported_contract(contract, labels, tokenizer.fingerprint)
        return contract.with_dtype(precision)
    contract = _build_new_contract(source, labels, tokenizer, precision, longest, options)
    if contract.has_steps and head is not None and (head.outputs, len(labels)) == (2, 1):
        contract = contract.with_readout(Readout(BINS, ((0.0, 1.0),)))
    is_ranking = contract.reward_model_type == RewardModelType.binary_ranking.value
    statistics: list[Any] = [source.config.get(key) for key in ("mean", "std")]
    if is_ranking and are_numbers(statistics) and statistics[1] > 0:
        # OpenRLHF stores mean and std in config.json, but normalizes rewards with them only if
        # --normalize_reward is set.
        mean, std = statistics
        contract = contract.with_statistics([mean], [std], "OpenRLHF's evaluation (config.json)")
    token_id = read_reward_token(source, head, tokenizer, options.reward_token)
    if token_id is not None:
        contract = replace(contract, reward_token_id=token_id)
    else:
        contract = with_trailing_pad(contract, tokenizer, source, head)
    if options.template is not None and not contract.template:
        raise CheckpointError(
            f"template: got {options.template!r}, but the tokenizer has no chat template"
        )
    return replace(contract, attributes=tuple(labels))


def _build_new_contract(
    source: Source,
    labels: list[str],
    tokenizer: Tokenizer,
    precision: Precision,
    longest: int,
    options: ContractOptions,
) -> ScoringContract:
    has_steps = reads_steps(source) or options.has_steps
    is_ranking = len(labels) == 1 and not has_steps
    reads, step_separator = options.reads, options.step_separator
    if reads is None:
        reads = ScoredPosition.step_marks if has_steps else ScoredPosition.last_token
    if reads is ScoredPosition.step_marks:
        step_separator = _choose_separator(tokenizer, step_separator)
    settings = ModelConfig(
        reward_model_type=RewardModelType.binary_ranking
        if is_ranking
        else RewardModelType.regression,
        regression=RegressionConfig(attributes=labels),
        data=DataConfig(
            template=options.template,
            seq_length=options.seq_length or min(longest, _MAX_DEFAULT_SEQ_LENGTH),
            step_separator=step_separator,
        ),
        head=HeadConfig(reads=reads),
    )
    return build_contract(settings, tokenizer, precision)


# The step token of Qwen2.5-Math-PRM.
_STEP_TOKEN = "<extra_0>"


def _choose_separator(tokenizer: Tokenizer, option: str | None) -> str:
    """Return the text after each step: the user's option, or Qwen's step token.

    Checkpoints do not store the separator, so without the option it can only be the token
    ``<extra_0>``.

    Raises:
        CheckpointError: the option is not set, and the tokenizer does not have the token.
    """
    if option is not None:
        return option
    try:
        tokenizer.token_id(_STEP_TOKEN)
    except DataError as error:
        raise CheckpointError(
            f"step_separator: it is not set, and the tokenizer has no {_STEP_TOKEN}. Set it to the "
            "text after each step, at which the head reads (a line break, if TRL trained the model)"
        ) from error
    return _STEP_TOKEN


def _check_exported_contract(
    contract: ScoringContract, labels: Sequence[str], fingerprint: str
) -> None:
    """Raise CheckpointError if an export's labels or tokenizer differ from its contract.

    They differ if somebody edited the exported folder. The contract would then describe other
    rewards than the model computes.
    """
    for name, value, expected in (
        ("config.json: id2label", list(labels), list(contract.attributes)),
        ("tokenizer fingerprint", fingerprint, contract.tokenizer_fingerprint),
    ):
        if value != expected:
            raise CheckpointError(
                f"{name}: got {shown(value)}, but {CONTRACT_NAME} has {shown(expected)}. Use an "
                "unchanged copy of the exported folder"
            )
