"""The scoring contract that the settings of a training ask for."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.data import DataConfig
from nemo_aligner.config.model import ModelConfig, ScoredPosition
from nemo_aligner.errors import ConfigError
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.reply_marker import make_reply_marker
from nemo_aligner.text.templates import canonical_kwargs, check_template, resolve_template
from nemo_aligner.text.tokenizer import Tokenizer


def build_contract(
    config: ModelConfig,
    tokenizer: Tokenizer,
    precision: Precision,
    start: ScoringContract | None = None,
    before: ScoringContract | None = None,
) -> ScoringContract:
    """The contract of a model about to be trained; ``label_means`` are still zero.

    ``start`` is the contract of the reward model that training starts from, if it starts from one:
    it decides what the settings leave open. ``before`` is that of the run that goes on. Where one
    of the two has an earlier text of the built-in template that is asked for, it stays.

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
    known = [each.template for each in (start, before) if each is not None]
    template = _template(data.template, tokenizer, start, known)
    kwargs, reads = _kwargs(data, template, start), config.head.reads
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
        reply_marker=make_reply_marker(template, tokenizer, kwargs) if is_mean else None,
        chat_template_kwargs=kwargs or None,
    )
    if contract.template:
        check_template(contract.template, data.template or "tokenizer", tokenizer, kwargs)
    elif kwargs:
        raise ConfigError(
            "model.data.chat_template_kwargs: got some, wanted none: there is no chat template"
        )
    return contract


def _template(
    setting: str | None, tokenizer: Tokenizer, start: ScoringContract | None, known: Sequence[str]
) -> str:
    if setting is None and start is not None:
        return start.template
    return resolve_template(setting or "tokenizer", tokenizer, known)


def _kwargs(data: DataConfig, template: str, start: ScoringContract | None) -> str:
    """Those of the settings; where they say nothing, of the start, if its template stays."""
    if data.chat_template_kwargs is not None:
        return canonical_kwargs(data.chat_template_kwargs)
    return start.template_kwargs if start is not None and start.template == template else ""


def _resolve(setting: bool | None, habit: bool, token_id: int | None, name: str) -> bool:
    if setting and token_id is None:
        token = name.removeprefix("add_").upper()
        raise ConfigError(f"model.data.{name}: got true, but the tokenizer has no {token} token")
    return habit if setting is None else setting
