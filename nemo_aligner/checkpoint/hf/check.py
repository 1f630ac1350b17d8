"""Check of a written Hugging Face folder against the reward model it was made from."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import LAYERS
from nemo_aligner.checkpoint.hf.families.base import HF_HEAD
from nemo_aligner.checkpoint.hf.heads import (
    TOKEN_SUFFIX,
    find_head,
    forget_lengths,
    is_of_head,
    load_with_head,
    reads_steps,
    rotary_by_length,
)
from nemo_aligner.checkpoint.hf.source import REWARD_SUFFIX, open_source
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.packing import pack_sequences
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.step import gather_rewards, infer
from nemo_aligner.utils.errors import CheckpointError, DataError

HF_BIAS = "score.bias"
TOLERANCE = 1e-4
_RELATIVE_TOLERANCE = 1e-5  # for rewards so large that fp32 is no more precise
_LONGEST = 512
# End of the name of a class whose head has two layers, as vLLM's Qwen2ForRewardModel.
TWO_LAYERS_SUFFIX = "ForRewardModel"


def _turns(*contents: str) -> Text:
    return [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]


TEXTS: tuple[Text, ...] = (
    _turns("2+2?", "4"),
    _turns("Name three rivers.", "The Rhine, the Nile and the Amazon.\nShall I go on?"),
    _turns("Ça va ?", "Très bien, merci 🙂", "你好", "print('hello')\t# 1 < 2 & 3 > 2"),
    _turns("A long story!", " ".join(f"On day {day} it rained." for day in range(99))),
    "x",
    "A text without roles: it is scored as it stands.",
    "  spaces,\n\nlines\n",
)


def encode_texts(contract: ScoringContract, tokenizer: Tokenizer) -> list[tuple[Text, list[int]]]:
    """Select the texts that the contract accepts, with their token ids at full length."""
    texts = []
    for text in TEXTS:
        try:
            texts.append((text, contract.tokenize(tokenizer, [text])[0]))
        except DataError:
            continue  # there is no chat template, or it refuses this conversation
    if not texts:
        raise CheckpointError("the scoring contract accepts none of the texts to be checked")
    return texts


def cut(token_ids: Sequence[int], seq_length: int) -> list[int]:
    """Cut a text to its end, so that a check stays short."""
    return list(token_ids[-min(seq_length, _LONGEST) :])


def our_logits(
    model: GPTRewardModel, token_lists: Sequence[list[int]], layout: ParallelLayout
) -> Tensor:
    """Compute the head's outputs ``[N, A]`` float32, without the contract's label means."""
    budget = sum(map(len, token_lists))  # the weights are read once
    packs = pack_sequences(token_lists, budget, None, model.rotation_by_length)
    attributes = model.rm_head.weight.size(0)
    shape = (len(token_lists), attributes)
    return gather_rewards(infer(model, packs, layout), packs, shape, layout)


def architecture_of(model_type: str) -> str:
    """Class for a reward model of this type, by the name that transformers has or would give it."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

    # Includes classes that third-party families registered with transformers' Auto classes.
    try:
        config = CONFIG_MAPPING[model_type]
        found: Any = CLASSES[config] if config in CLASSES else MODEL_MAPPING[config]
    except KeyError as error:
        raise CheckpointError(f"{model_type}: transformers has no decoder of this type") from error
    return found.__name__ if config in CLASSES else found.__name__[:-5] + REWARD_SUFFIX


def has_class(architecture: str, model_type: str) -> bool:
    """Tell if transformers has the class of a reward model; if not, it loads only the decoder."""
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    )

    config = CONFIG_MAPPING[model_type]
    if architecture.endswith(TOKEN_SUFFIX):
        return config in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    return (
        architecture.endswith(REWARD_SUFFIX) and config in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    )


def check_folder(
    folder: Path, contract: ScoringContract, texts: Sequence[tuple[Text, list[int]]], logits: Tensor
) -> float:
    """Load ``folder`` with transformers and compare; returns the largest difference of a logit.

    Args:
        logits: ``[N, A]``, for every text's token ids after ``cut``.

    Raises:
        CheckpointError: transformers cannot load it, makes other token ids, or its logits in fp32
            differ by more than 1e-4 plus 1e-5 of their size, alone or padded beside a longer text.
    """
    return compare(*load_written(folder), contract, texts, logits)


def load_written(folder: Path) -> tuple[Any, Any]:
    """Load the tokenizer and the model of ``folder`` with transformers, to compute in fp32.

    Raises:
        CheckpointError: it cannot, or the pad token is not that of ``config.json``.
    """
    try:
        tokenizer, model = _load(folder)
    except Exception as error:  # third-party code on files that may be wrong
        raise CheckpointError(f"transformers cannot load what was written: {error}") from error
    pad_id = json.loads((folder / "config.json").read_text(encoding="utf-8"))["pad_token_id"]
    if tokenizer.pad_token_id != pad_id:
        raise CheckpointError(f"pad token: got id {tokenizer.pad_token_id}, wanted {pad_id}")
    return tokenizer, model


def compare(
    tokenizer: Any,
    model: Any,
    contract: ScoringContract,
    texts: Sequence[tuple[Text, list[int]]],
    logits: Tensor,
) -> float:
    """Compare a tokenizer and a model that were loaded from a folder; see ``check_folder``."""
    _check_ids(tokenizer, contract, texts)
    token_lists = [cut(ids, contract.seq_length) for _, ids in texts]
    alone = torch.cat([_their_logits(model, tokenizer, [ids]) for ids in token_lists])
    padded = alone.clone()
    # Where a batch is rotated by its longest text, only a text alone has a reward of its own.
    rows = [] if rotary_by_length(model) else range(len(texts))
    by_length = sorted(rows, key=lambda row: len(token_lists[row]))
    for shorter, longer in pairwise(by_length):
        batch = [token_lists[shorter], token_lists[longer]]
        padded[shorter] = _their_logits(model, tokenizer, batch)[0]
    return differ_most(alone, padded, logits, [text for text, _ in texts])


def differ_most(alone: Tensor, padded: Tensor, logits: Tensor, texts: Sequence[Text]) -> float:
    """Largest difference of transformers' logits, ``[N, A]``, from ours.

    Raises:
        CheckpointError: one is out of tolerance, with its text.
    """
    for how, got in (("alone", alone), ("padded", padded)):
        _check_logits(how, got, logits, texts)
    return float(torch.stack([alone - logits, padded - logits]).abs().max())


def _load(folder: Path) -> tuple[Any, Any]:
    from transformers import (
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = open_source(folder)
    stored = {name for name in found.tensors if is_of_head(name)}
    has_bias = reads_steps(found)
    is_linear = stored == ({HF_HEAD, HF_BIAS} if has_bias else {HF_HEAD})
    architecture, model_type = str(found.config["architectures"][0]), found.config["model_type"]
    if not (is_linear and has_class(architecture, model_type)):
        head = find_head(found)
        assert head is not None  # it was just written
        model = load_with_head(str(folder), found, head, "auto").to(current_device()).eval()
        compute_in_fp32(model)
        return tokenizer, model
    # In the dtype of the files, which are then mapped instead of copied.
    auto = AutoModelForTokenClassification if has_bias else AutoModelForSequenceClassification
    model, report = auto.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    lost = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if lost:
        raise CheckpointError(f"tensors do not match: {', '.join(map(str, lost))}")
    model = model.to(current_device()).eval()
    # The files have the head in fp32; transformers has cast it to the body's dtype.
    model.score.weight.data = found.tensors[HF_HEAD].read().to(model.device)
    if has_bias:
        model.score.bias.data = found.tensors[HF_BIAS].read().to(model.device)
    compute_in_fp32(model)
    return tokenizer, model


def _check_ids(
    tokenizer: Any, contract: ScoringContract, texts: Sequence[tuple[Text, list[int]]]
) -> None:
    for text, wanted in texts:
        ids = _their_ids(tokenizer, contract, text)
        if ids != wanted:
            raise CheckpointError(
                f"transformers tokenizes {text!r} as {ids}, wanted the scoring contract's {wanted}"
            )


def _check_logits(how: str, got: Tensor, logits: Tensor, texts: Sequence[Text]) -> None:
    difference = (got - logits).abs()
    # Written so that NaN fails.
    wrong = ~(difference <= TOLERANCE + _RELATIVE_TOLERANCE * logits.abs())
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise CheckpointError(
            f"transformers scores {texts[row]!r} {how} as {got[row, column]:.6g}, "
            f"wanted {logits[row, column]:.6g} within {TOLERANCE}"
        )


def _their_ids(tokenizer: Any, contract: ScoringContract, text: Text) -> list[int]:
    """Tokenize a text as the model card says."""
    if not isinstance(text, str):
        text = tokenizer.apply_chat_template(text, tokenize=False)
        return tokenizer(text, add_special_tokens=False).input_ids
    return complete(tokenizer(text, add_special_tokens=False).input_ids, contract)


def complete(ids: list[Any], contract: ScoringContract, *, ends: bool = True) -> list[int]:
    """Add to the ids of a raw text what the contract has around it; behind it only if it ends."""
    if contract.add_bos and ids[:1] != [contract.bos_id]:
        ids = [contract.bos_id, *ids]
    if ends and contract.add_eos and ids[-1:] != [contract.eos_id]:
        ids = [*ids, contract.eos_id]
    if ends and contract.reward_token_id is not None and ids[-1:] != [contract.reward_token_id]:
        ids = [*ids, contract.reward_token_id]
    return ids


def _their_logits(model: Any, tokenizer: Any, token_lists: list[list[int]]) -> Tensor:
    forget_lengths(model)
    batch = tokenizer.pad({"input_ids": token_lists}, return_tensors="pt").to(model.device)
    with torch.no_grad():
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return output.logits.float().cpu()


# Models larger than memory: weights of a layer are loaded only while it runs.


def read_as_it_runs(model: GPTRewardModel, read: Callable[[str, int | None], Tensor]) -> None:
    """Run ``model``, of one process, with each layer's weights read when it is called.

    Weights outside the layers are read at once. A layer is empty again afterwards, so that at most
    one is in memory. The model can run, but not be trained.

    Args:
        read: gives a whole tensor, in any dtype, by its name in ``decoder_tensors`` and its layer.
    """
    parameters = dict(model.named_parameters())
    of_layer: dict[int | None, list[tuple[torch.nn.Parameter, str]]] = defaultdict(list)
    entries = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    for name, entry in entries.items():
        if name not in parameters:
            continue  # TransformerEngine's opaque _extra_state
        number, _, rest = entry.key.removeprefix(LAYERS).partition(".")
        is_inside = entry.key.startswith(LAYERS)
        layer, key = (int(number), rest) if is_inside else (None, entry.key)
        of_layer[layer].append((parameters[name], key))

    def fill(layer: int | None) -> None:
        for parameter, key in of_layer[layer]:
            parameter.data = read(key, layer).to(parameter.device, parameter.dtype)

    def empty(layer: int) -> None:
        for parameter, _ in of_layer[layer]:
            parameter.data = parameter.new_empty(0)

    fill(None)
    for layer, module in enumerate(model.decoder.layers):
        empty(layer)
        module.register_forward_pre_hook(lambda *unused, layer=layer: fill(layer))
        module.register_forward_hook(lambda *unused, layer=layer: empty(layer))


def compute_in_fp32(model: torch.nn.Module) -> None:
    """Make every module of ``model`` compute in fp32, casting its own weights while it runs.

    Same results as ``model.float()``, with fp32 memory for one module at a time.
    """
    for module in model.modules():
        stored = {
            parameter: parameter.data
            for parameter in module.parameters(recurse=False)
            if parameter.dtype != torch.float32
        }
        if type(module) is torch.nn.Embedding:
            module.register_forward_hook(lambda module, inputs, rows: rows.float())
        elif stored:
            module.register_forward_pre_hook(lambda *unused, stored=stored: _widen(stored))
            module.register_forward_hook(lambda *unused, stored=stored: _restore(stored))


def _widen(stored: Mapping[torch.nn.Parameter, Tensor]) -> None:
    for parameter, data in stored.items():
        parameter.data = data.float()


def _restore(stored: Mapping[torch.nn.Parameter, Tensor]) -> None:
    for parameter, data in stored.items():
        parameter.data = data
