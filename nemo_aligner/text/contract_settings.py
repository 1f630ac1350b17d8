"""The scoring contract that the settings of a training ask for."""

from __future__ import annotations

from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.model import ModelConfig, ScoredPosition
from nemo_aligner.errors import ConfigError
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.reply_marker import make_reply_marker
from nemo_aligner.text.templates import check_template, resolve_template
from nemo_aligner.text.tokenizer import Tokenizer


def build_contract(
    config: ModelConfig,
    tokenizer: Tokenizer,
    precision: Precision,
    start: ScoringContract | None = None,
) -> ScoringContract:
    """The contract of a model about to be trained; ``label_means`` are still zero.

    ``start`` is the contract of the reward model that training starts from, if it starts from one:
    it decides what the settings leave open.

    Raises:
        ConfigError: the template is not found, or fails its checks (see ``check_template``), or a
            BOS or EOS is asked for that the tokenizer does not have.
    """
    data = config.data
    ranking = config.reward_model_type is RewardModelType.binary_ranking
    attributes = ("reward",) if ranking else tuple(config.regression.attributes)
    weights = {} if ranking else config.regression.attribute_weights
    bos, eos = tokenizer.adds_bos, tokenizer.adds_eos
    if start is not None:
        bos, eos = start.add_bos, start.add_eos
    template, reads = _template(data.template, tokenizer, start), config.head.reads
    is_mean = reads is ScoredPosition.reply_mean
    contract = ScoringContract(
        template=template,
        add_bos=_resolve(data.add_bos, bos, tokenizer.bos_id, "add_bos"),
        add_eos=_resolve(data.add_eos, eos, tokenizer.eos_id, "add_eos"),
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        overlong=data.overlong.value,
        seq_length=data.seq_length,
        attributes=attributes,
        attribute_weights=tuple(weights.get(name, 0.0 if weights else 1.0) for name in attributes),
        label_means=(0.0,) * len(attributes),
        dtype=precision.value,
        tokenizer_fingerprint=tokenizer.fingerprint,
        reward_model_type=config.reward_model_type.value,
        scored_position=reads.value,
        reply_marker=make_reply_marker(template, tokenizer) if is_mean else None,
    )
    if contract.template:
        check_template(contract.template, data.template or "tokenizer", tokenizer)
    return contract


def _template(setting: str | None, tokenizer: Tokenizer, start: ScoringContract | None) -> str:
    if setting is None and start is not None:
        return start.template
    return resolve_template(setting or "tokenizer", tokenizer)


def _resolve(setting: bool | None, habit: bool, token_id: int | None, name: str) -> bool:
    if setting and token_id is None:
        token = name.removeprefix("add_").upper()
        raise ConfigError(f"model.data.{name}: got true, but the tokenizer has no {token} token")
    return habit if setting is None else setting
