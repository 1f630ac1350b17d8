"""Check of a written Hugging Face folder against the reward model it was made from.

Token ids, and the places at which steps are read, are made as the model card's program makes them,
by transformers' tokenizer and chat template alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_aligner.checkpoint.decoder_tensors import LAYERS
from nemo_aligner.checkpoint.hf.families.base import HF_HEAD
from nemo_aligner.checkpoint.hf.heads import (
    SCORE_WITH_BIAS,
    TOKEN_SUFFIX,
    BodyWithHead,
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
from nemo_aligner.contract.steps import ANSWERS, MARKS, OPEN_ENDED, TURNS
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.packing import SequenceReads, pack_sequences
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.step import gather_rewards, infer
from nemo_aligner.utils.errors import CheckpointError, DataError

TOLERANCE = 1e-4
_RELATIVE_TOLERANCE = 1e-5  # for rewards so large that fp32 is no more precise
_LONGEST = 512


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


# Steps of a reply, or what is said in turn.
_REPLIES = (
    ("4",),
    ("2+2=4, and", "4+3=7;", "so it is 7!"),
    ("Zuerst: ça va 🙂", "你好", "print('hello')\t# 1 < 2 & 3 > 2", "no"),
)


@dataclass(frozen=True)
class CheckedText:
    """A text with its token ids by the contract, and how it is scored.

    Attributes:
        text: a conversation, or what stands in a raw text.
        token_ids: at full length.
        scored: their end, short enough for a check; with steps all of them.
        reads: places in ``scored`` at which steps are read; without steps the last.
        steps: of the reply, or what is said in turn; none for a text that is read as a whole.
    """

    text: Text
    token_ids: list[int]
    scored: list[int]
    reads: tuple[int, ...]
    steps: tuple[str, ...] = ()


def encode_texts(contract: ScoringContract, tokenizer: Tokenizer) -> list[CheckedText]:
    """Select the texts that the contract accepts; those with steps, if it reads steps."""
    encode = _encode_steps if contract.has_steps else _encode_whole
    texts = list(encode(contract, tokenizer))
    if not texts:
        raise CheckpointError("the scoring contract accepts none of the texts to be checked")
    return texts


def _encode_whole(contract: ScoringContract, tokenizer: Tokenizer) -> Iterator[CheckedText]:
    for text in TEXTS:
        try:
            (ids,) = contract.tokenize(tokenizer, [text])
        except DataError:
            continue  # there is no chat template, or it refuses this conversation
        scored = ids[-min(contract.seq_length, _LONGEST) :]
        if contract.reply_marker is not None and scored != ids:
            continue  # its reader takes no ids that were cut
        yield CheckedText(text, ids, scored, (len(scored) - 1,))


def _encode_steps(contract: ScoringContract, tokenizer: Tokenizer) -> Iterator[CheckedText]:
    for steps in _REPLIES:
        for text in _written(contract, steps):
            try:
                found = contract.encode(tokenizer, text)
            except DataError:
                continue
            if found.reads is not None and len(found.reads) == len(steps) and not found.truncated:
                yield CheckedText(text, found.token_ids, found.token_ids, found.reads, steps)


def _written(contract: ScoringContract, steps: Sequence[str]) -> list[Text]:
    """A conversation and a raw text with these steps; none if the separator is within one."""
    question = {"role": "user", "content": "2+2+3?"}
    if contract.scored_position == TURNS:
        replies = ({"role": "assistant", "content": step} for step in steps)
        turns: list[Text] = [[message for reply in replies for message in (question, reply)]]
        return turns + ["".join(steps)] * (len(steps) == 1)
    separator = contract.step_separator or ""
    if any(separator in step for step in steps):
        return []
    reply = separator.join(steps) + separator * (contract.scored_position == MARKS)
    asked: Text = [question, {"role": "assistant", "content": reply}]
    return [asked] if contract.scored_position == ANSWERS else [asked, reply]


def our_logits(
    model: GPTRewardModel, texts: Sequence[CheckedText], layout: ParallelLayout
) -> Tensor:
    """Compute the head's outputs ``[S, A]`` float32 of all texts, a row for each text or step.

    They lack the contract's label means.
    """
    token_lists = [each.scored for each in texts]
    reads = SequenceReads.number([each.reads for each in texts]) if texts[0].steps else None
    budget = sum(map(len, token_lists))  # the weights are read once
    packs = pack_sequences(token_lists, budget, reads, model.length_dependent_rope)
    shape = (sum(len(each.reads) for each in texts), model.rm_head.weight.size(0))
    return gather_rewards(infer(model, packs, layout), packs, shape, layout)


def check_folder(
    folder: Path, contract: ScoringContract, texts: Sequence[CheckedText], logits: Tensor
) -> float:
    """Load ``folder`` with transformers and compare; returns the largest difference of a logit.

    Args:
        logits: ``[S, A]``, by ``our_logits`` and as exported.

    Raises:
        CheckpointError: transformers cannot load it, makes other token ids, or its logits in fp32
            differ by more than 1e-4 plus 1e-5 of their size, alone or padded beside a longer text.
    """
    return compare(*_load_written(folder), contract, texts, logits)


def _load_written(folder: Path) -> tuple[Any, Any]:
    """Load the tokenizer and the model of ``folder`` with transformers, to compute in fp32."""
    try:
        tokenizer, model = _load(folder)
    except Exception as error:  # third-party code on files that may be wrong
        raise CheckpointError(f"transformers cannot load what was written: {error}") from error
    pad_id = json.loads((folder / "config.json").read_text(encoding="utf-8"))["pad_token_id"]
    if tokenizer.pad_token_id != pad_id:
        raise CheckpointError(f"pad token: got id {tokenizer.pad_token_id}, wanted {pad_id}")
    return tokenizer, model


def _load(folder: Path) -> tuple[Any, Any]:
    from transformers import (
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    # local_files_only: a name in a config must not make the check ask the network.
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = open_source(folder)
    stored = {name for name in found.tensors if is_of_head(name)}
    has_bias = reads_steps(found)
    is_linear = stored == ({HF_HEAD, SCORE_WITH_BIAS} if has_bias else {HF_HEAD})
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
        model.score.bias.data = found.tensors[SCORE_WITH_BIAS].read().to(model.device)
    compute_in_fp32(model)
    return tokenizer, model


def compare(
    tokenizer: Any,
    model: Any,
    contract: ScoringContract,
    texts: Sequence[CheckedText],
    logits: Tensor,
) -> float:
    """Compare a tokenizer and a model that were loaded from a folder; see ``check_folder``."""
    for each in texts:
        _check_ids(tokenizer, contract, each)
    alone = [_their_logits(model, tokenizer, [each])[0] for each in texts]
    padded = list(alone)
    # Where a batch is rotated by its longest text, only a text alone has a reward of its own.
    numbers = [] if rotary_by_length(model) else range(len(texts))
    by_length = sorted(numbers, key=lambda row: len(texts[row].scored))
    for shorter, longer in pairwise(by_length):
        padded[shorter] = _their_logits(model, tokenizer, [texts[shorter], texts[longer]])[0]
    return differ_most(torch.cat(alone), torch.cat(padded), logits, texts)


def differ_most(
    alone: Tensor, padded: Tensor, logits: Tensor, texts: Sequence[CheckedText]
) -> float:
    """Largest difference of a library's logits, ``[S, A]``, from ours, if within tolerance."""
    rows = [each.text for each in texts for _ in each.reads]
    for how, got in (("alone", alone), ("padded", padded)):
        _check_logits(how, got, logits, rows)
    return float(torch.stack([alone - logits, padded - logits]).abs().max())


def _check_ids(tokenizer: Any, contract: ScoringContract, checked: CheckedText) -> None:
    text, wanted = checked.text, checked.token_ids
    if not checked.steps:
        ids = _their_ids(tokenizer, contract, text)
        if ids != wanted:
            raise CheckpointError(
                f"transformers tokenizes {text!r} as {ids}, wanted the scoring contract's {wanted}"
            )
        return
    ids, reads = _their_steps(tokenizer, contract, checked)
    if (ids, reads) != (wanted, checked.reads):
        raise CheckpointError(
            f"transformers reads {text!r} as the ids {ids} at {reads}, wanted the scoring "
            f"contract's {wanted} at {checked.reads}"
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


def _their_steps(
    tokenizer: Any, contract: ScoringContract, checked: CheckedText
) -> tuple[list[int], tuple[int, ...]]:
    """Token ids and the places that are read, as the model card says."""
    position, text, steps = contract.scored_position, checked.text, checked.steps
    separator = contract.step_separator or ""
    if position == TURNS and isinstance(text, list):
        pieces, before = [], ""
        for turns in range(2, len(text) + 1, 2):
            written = tokenizer.apply_chat_template(text[:turns], tokenize=False)
            pieces.append(written.removeprefix(before))
            before = written
    elif position == ANSWERS and isinstance(text, list):
        pieces, before = [], ""
        asked: list[dict[str, str]] = []
        for step in (f"{text[0]['content']} {steps[0]}", *steps[1:]):
            asked += [{"role": "user", "content": step}, {"role": "assistant", "content": "+"}]
            written = tokenizer.apply_chat_template(asked, tokenize=False)
            begun = written[: written.rindex("+")]
            pieces.append(begun.removeprefix(before))
            before = begun
    else:
        pieces = [steps[0], *(separator + step for step in steps[1:])]
        if position == MARKS:
            pieces = [piece for step in steps for piece in (step, separator)]
        if not isinstance(text, str):
            written = tokenizer.apply_chat_template(text, tokenize=False)
            before, _, after = written.rpartition("".join(pieces))
            pieces[0] = before + pieces[0]
            pieces[-1] += "" if position == MARKS else after
    ids: list[int] = []
    reads = []
    for piece in pieces:
        ids += tokenizer(piece, add_special_tokens=False).input_ids
        reads.append(len(ids) - 1)
    reads = reads[1::2] if position == MARKS else reads
    if isinstance(text, str):
        whole = complete(ids, contract, ends=position not in OPEN_ENDED)
        begun = len(complete(ids, contract, ends=False)) - len(ids)
        ids, reads = whole, [*(place + begun for place in reads[:-1]), len(whole) - 1]
    return ids, tuple(reads)


def _their_logits(model: Any, tokenizer: Any, texts: Sequence[CheckedText]) -> list[Tensor]:
    """Each text's ``[S, A]``."""
    forget_lengths(model)
    has_steps = bool(texts[0].steps)
    # A class that reads one token finds it on either side; places of steps count from the left.
    side = {"padding_side": "right"} if has_steps else {}
    lists = {"input_ids": [each.scored for each in texts]}
    batch = tokenizer.pad(lists, **side, return_tensors="pt").to(model.device)
    with torch.no_grad():
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits = output.logits.float().cpu()
    if not has_steps:
        return list(logits.split(1))
    return [own[list(each.reads)] for own, each in zip(logits, texts, strict=True)]


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


BODY_SUFFIX, LANGUAGE_MODEL_SUFFIX = "Model", "ForCausalLM"


def class_name(model_type: str, suffix: str) -> str:
    """Name a decoder's class for a head, by the suffix of that head's classes.

    It begins as that of the language model, by which vLLM finds the decoder: transformers calls
    Gemma 3's classes ``Gemma3ForCausalLM`` and ``Gemma3TextForSequenceClassification``.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    # Includes classes that third-party families registered with transformers' Auto classes.
    try:
        config = CONFIG_MAPPING[model_type]
        body: Any = MODEL_MAPPING[config]
    except KeyError as error:
        raise CheckpointError(f"{model_type}: transformers has no decoder of this type") from error
    if suffix == BODY_SUFFIX or config not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return body.__name__.removesuffix(BODY_SUFFIX) + suffix
    language_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config]
    return language_model.__name__.removesuffix(LANGUAGE_MODEL_SUFFIX) + suffix


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
    # A key for each layer, as the archive's reader takes them.
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

    # Embeddings and final norm stay; only layers take turns.
    fill(None)
    for layer, module in enumerate(model.decoder.layers):
        empty(layer)
        module.register_forward_pre_hook(lambda *unused, layer=layer: fill(layer))
        module.register_forward_hook(lambda *unused, layer=layer: empty(layer))


def compute_in_fp32(model: torch.nn.Module) -> None:
    """Make every module of ``model`` compute in fp32, casting its own weights while it runs.

    Same results as the class of transformers loaded in fp32 from the same files, with fp32 memory
    for one module at a time.

    Args:
        model: a model of transformers that was loaded in the files' dtype, or a head beside one.
    """
    _restore_buffers(model.body if isinstance(model, BodyWithHead) else model)
    for module in model.modules():
        stored = {
            parameter: parameter.data
            for parameter in module.parameters(recurse=False)
            if parameter.dtype != torch.float32
        }
        # Widening its rows after the look-up is exact, and spares the largest matrix.
        if type(module) is torch.nn.Embedding:
            module.register_forward_hook(lambda module, inputs, rows: rows.float())
        elif stored:
            module.register_forward_pre_hook(lambda *unused, stored=stored: _put(stored, True))
            module.register_forward_hook(lambda *unused, stored=stored: _put(stored, False))


def _restore_buffers(model: Any) -> None:
    """Give a model of transformers the buffers that its class computes in fp32.

    transformers computes what no file has in the dtype in which it loads: a Gemma in bf16 scales
    its embeddings by 25.25 where the root of its width is 25.298. A cast to fp32 keeps 25.25.
    """
    config = deepcopy(model.config)
    config.dtype = torch.float32
    with _WithoutLargeTensors():
        fresh = type(model)(config)
    stored = fresh.state_dict().keys()
    for name, buffer in fresh.named_buffers():
        if name not in stored and model.get_buffer(name).dtype != buffer.dtype:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, buffer.to(model.device))


class _WithoutLargeTensors(TorchFunctionMode):
    """Creates the matrices of a model on the meta device, where they take no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **device})


def _put(stored: Mapping[torch.nn.Parameter, Tensor], is_running: bool) -> None:
    for parameter, data in stored.items():
        parameter.data = data.float() if is_running else data
