"""Find the token at which a published reward model reads its reward, if that is not the last one.

Most classes read the last token of a sample. Some append their own token and read there, and
transformers' ``ForSequenceClassification`` takes every pad token at the end for padding, even one
that the chat template wrote. A class from a model's own code may read anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.heads import (
    LINEAR,
    REWARD_TOKEN_KEY,
    TWO_LAYERS,
    FoundHead,
    HeadLayout,
    architecture_in,
)
from nemo_aligner.checkpoint.hf.source import REWARD_SUFFIX, Source
from nemo_aligner.checkpoint.hf.transformers_classes import is_in_transformers
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.steps import OPEN_ENDED
from nemo_aligner.contract.template_trials import PROBE
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.utils.errors import CheckpointError, DataError, short, shown

# The layout of models whose classes append a token and read there: InternLM2ForRewardModel and
# Nexusflow's Athene. Only the code of the latter has the token's id.
_APPENDING = HeadLayout("v_head")
# A class with code of its own that reads before the first pad token.
_BEFORE_FIRST_PAD = "Qwen2ForRewardModel"
# Classes from models' own code whose scored token is known here, and OpenRLHF's.
_FOLLOWED = ("ForRewardModel", "ForProcessRewardModel", "ForPrmModel")
_OF_OPENRLHF = "RewardModel"


def read_reward_token(
    source: Source, head: FoundHead | None, tokenizer: Tokenizer, option: str | None
) -> int | None:
    """Return the id of the token that is appended to every sample and read; None if there is none.

    Args:
        option: the user's choice, a token's text or its id; None means the setting
            ``reward_token_id`` in ``config.json``.

    Raises:
        CheckpointError: the tokenizer has no such token, or the head needs one and none is set.
    """
    token_id = source.config.get(REWARD_TOKEN_KEY)
    key = REWARD_TOKEN_KEY
    if option is not None:
        key = "reward_token"
        is_id = option.isdecimal() and len(option) < len(str(tokenizer.vocab_size)) + 1
        token_id = int(option) if is_id else tokenizer.token_id(option)
    check_reward_token(head, token_id)
    # The scoring contract checks the type.
    if type(token_id) is int and token_id >= tokenizer.vocab_size:
        raise CheckpointError(
            f"{key}: got {token_id}, wanted a token id below the vocabulary size, "
            f"{tokenizer.vocab_size}"
        )
    return token_id


def check_reward_token(head: FoundHead | None, token_id: int | None) -> None:
    """Raise CheckpointError if ``head`` reads at an appended token, and ``token_id`` is None."""
    weight = _APPENDING.names()["weight"]
    if token_id is None and head is not None and head.names["weight"] == weight:
        raise CheckpointError(
            f"{REWARD_TOKEN_KEY}: it is missing in config.json, but classes with {weight} append a "
            "token to every sample and read the reward there. Look its id up in the class's code "
            "(128003 in Nexusflow's Athene-RM), and name it with --reward-token of nemo-aligner "
            "convert"
        )


def find_skipped_pad(source: Source, head: FoundHead | None) -> int | None:
    """Return the id of the pad token that the model's class skips at the end of a sample.

    The result is None if the class finds the last token without it. For an export of this package,
    it is ``trailing_pad_id`` of the scoring contract.
    """
    if source.contract is not None:
        return source.contract.get("trailing_pad_id")
    architecture, weights = architecture_in(source.config), _read_by_class()
    is_read_by_class = head is not None and not head.rows and head.names["weight"] in weights
    skips = architecture.endswith(REWARD_SUFFIX) or architecture == _BEFORE_FIRST_PAD
    if not (is_read_by_class and skips) or source.config.get(REWARD_TOKEN_KEY) is not None:
        return None
    pad = _read_pad_id(source.config)
    if pad is not None and (type(pad) is not int or pad < -1):
        raise CheckpointError(f"pad_token_id: got {shown(pad)}, wanted the id of a token or null")
    return pad_id_of(pad)


def pad_id_of(pad_token_id: int | None) -> int | None:
    """Return the id of the pad token by the value in a config; None if there is no pad token."""
    return None if pad_token_id == -1 else pad_token_id  # some configs write -1 for "none"


def _read_by_class() -> tuple[str, ...]:
    """Return the names of the heads that the classes themselves load, and not only this package."""
    return tuple(layout.names()["weight"] for layout in (LINEAR, TWO_LAYERS))


def _read_pad_id(config: Mapping[str, Any]) -> Any:
    """Return ``pad_token_id``; if the config lacks it, the default of transformers' class."""
    if "pad_token_id" in config:
        return config["pad_token_id"]
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return None
    return getattr(CONFIG_MAPPING[model_type](), "pad_token_id", None)


def with_trailing_pad(
    contract: ScoringContract, tokenizer: Tokenizer, source: Source, head: FoundHead | None
) -> ScoringContract:
    """Return the contract with ``trailing_pad_id``, if samples end with the pad token of the class.

    They do if the chat template ends with it, or if it is the EOS that raw texts get. Otherwise the
    contract is returned unchanged.

    Raises:
        CheckpointError: the reward of a turn or step would be read at the pad token; or the class
            reads before the first pad token, and the chat template writes one inside a sample.
    """
    pad = find_skipped_pad(source, head)
    if pad is None or contract.scored_position in OPEN_ENDED:
        return contract
    samples = list(_encode_samples(contract, tokenizer))
    ending = [ids for ids in samples if ids[-1] == pad]
    if not ending:
        return contract
    token = f"{tokenizer.decode([pad])!r} (pad_token_id {pad})"
    if contract.has_steps:
        raise CheckpointError(
            f"reads: got {contract.scored_position}, but a turn or sample ends with {token}, which "
            f"{architecture_in(source.config)} takes for padding. Leave --reads and "
            "--step-separator out, or set another pad_token_id in config.json"
        )
    for ids in ending:
        first = ids.index(pad)
        if architecture_in(source.config) == _BEFORE_FIRST_PAD and any(
            i != pad for i in ids[first:]
        ):
            raise CheckpointError(
                f"pad_token_id: got {token}, which the chat template also writes inside a sample. "
                f"{_BEFORE_FIRST_PAD} reads before the first pad token, so its rewards do not "
                "depend on the reply. Set another pad_token_id in config.json"
            )
    return replace(contract, trailing_pad_id=pad)


def _encode_samples(contract: ScoringContract, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Encode a conversation, if there is a chat template, and a raw text."""
    samples: list[Text] = [*([PROBE] if contract.template else []), "x"]
    for sample in samples:
        try:
            yield contract.tokenize(tokenizer, [sample])[0]
        except DataError:
            continue  # the template accepts only conversations of another kind


def describe_scored_token(
    source: Source, contract: ScoringContract, tokenizer: Tokenizer
) -> Iterator[str]:
    """Yield notes for the user: trailing padding, and a class that may read at another token.

    There are none for an export of this package.
    """
    if source.contract is not None:
        return
    pad, name = contract.trailing_pad_id, architecture_in(source.config)
    if pad is not None:
        yield (
            f"note: samples end with {tokenizer.decode([pad])!r}, which is also the pad token, so "
            f"{name} reads the token before it, and so does the archive (trailing_pad_id)"
        )
    if contract.reward_token_id is None and not contract.has_steps and not _is_followed(source):
        yield (
            f"note: this package does not know the class {short(name)}. It reads the reward at the "
            "last token of a sample; check in the code of the class that it does the same"
        )


def _is_followed(source: Source) -> bool:
    """Tell if a checkpoint's class is one of transformers or one that this package follows."""
    name, model_type = architecture_in(source.config), str(source.config.get("model_type"))
    auto_map = source.config.get("auto_map")
    own_names = [
        str(value).rpartition(".")[2]
        for value in (auto_map.values() if isinstance(auto_map, Mapping) else ())
    ]
    prefix = model_type.removesuffix("_text").replace("_", "")
    is_of_family = name.lower().replace("_", "").startswith(prefix)
    if name in ("", _OF_OPENRLHF) or (is_of_family and name.endswith(_FOLLOWED)):
        return True
    return name not in own_names and (is_of_family or is_in_transformers(name))
