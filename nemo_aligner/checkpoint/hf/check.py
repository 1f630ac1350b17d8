"""Compare an exported Hugging Face folder with the reward model from which it was exported.

``export`` runs this check before it renames the finished folder to its final name. A few samples
are tokenized and scored with transformers and with this package, and token ids, reading positions
and logits are compared. The transformers side follows the program in the exported model card: it
uses only transformers' tokenizer, chat template and model.

The last functions of this module run models that do not fit into memory, by loading one layer at a
time, or casting one module at a time to fp32.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_aligner.checkpoint.decoder_tensors import LAYERS
from nemo_aligner.checkpoint.hf.body_with_head import (
    BodyWithHead,
    length_dependent_rope,
    load_with_head,
    reset_dynamic_rope,
)
from nemo_aligner.checkpoint.hf.families.base import HF_HEAD
from nemo_aligner.checkpoint.hf.heads import (
    SCORE_WITH_BIAS,
    find_head,
    is_of_head,
    reads_steps,
)
from nemo_aligner.checkpoint.hf.scored_token import find_skipped_pad
from nemo_aligner.checkpoint.hf.source import open_source
from nemo_aligner.checkpoint.hf.transformers_classes import has_class, load_pretrained
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.steps import ANSWERS, MARKS, OPEN_ENDED, TURNS
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.packing import SequenceReads, pack_sequences
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.step import gather_rewards, infer
from nemo_aligner.utils.errors import CheckpointError, DataError, one_line

TOLERANCE = 1e-4
_RELATIVE_TOLERANCE = 1e-5  # tolerance relative to a reward, because fp32 rounds large values more
_MAX_CHECKED_TOKENS = 512


def _alternate_turns(*contents: str) -> Text:
    """Build a conversation from messages of user and assistant in turn; the user begins."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]


TEXTS: tuple[Text, ...] = (
    _alternate_turns("2+2?", "4"),
    _alternate_turns("Name three rivers.", "The Rhine, the Nile and the Amazon.\nShall I go on?"),
    _alternate_turns("Ça va ?", "Très bien, merci 🙂", "你好", "print('hello')\t# 1 < 2 & 3 > 2"),
    _alternate_turns("A long story!", " ".join(f"On day {day} it rained." for day in range(99))),
    "x",
    "A text without roles: it is scored as it stands.",
    "  spaces,\n\nlines\n",
)


# Each entry has the steps of one response, or the assistant's turns of one conversation.
_STEPS = (
    ("4",),
    ("2+2=4, and", "4+3=7;", "so it is 7!"),
    ("Zuerst: ça va 🙂", "你好", "print('hello')\t# 1 < 2 & 3 > 2", "no"),
)


@dataclass(frozen=True)
class CheckedText:
    """A sample to compare, tokenized by the scoring contract.

    Attributes:
        text: a conversation, or a raw text.
        token_ids: token ids of the whole sample.
        scored: the token ids to score: the last ones of ``token_ids``, few enough for a quick
            check. For a sample with steps, all of them.
        reads: positions in ``scored`` whose hidden states the head reads: the end of each step or,
            without steps, only the last position.
        steps: steps of the response, or the assistant's turns; empty for a sample with one reward.
        tail: ids that follow ``token_ids`` in the rendered sample, and that transformers has to
            skip: the contract's ``trailing_pad_id``, once for each time it occurs there.
    """

    text: Text
    token_ids: list[int]
    scored: list[int]
    reads: tuple[int, ...]
    steps: tuple[str, ...] = ()
    tail: tuple[int, ...] = ()


def encode_texts(contract: ScoringContract, tokenizer: Tokenizer) -> list[CheckedText]:
    """Tokenize the built-in samples with the contract, and skip those that it rejects.

    If the contract scores each step of a response, the samples are responses of several steps.

    Raises:
        CheckpointError: the contract rejects all samples.
    """
    encode = _encode_steps if contract.has_steps else _encode_samples
    texts = list(encode(contract, tokenizer))
    if not texts:
        raise CheckpointError(
            "the export cannot be checked: the model's scoring contract rejects all built-in "
            "samples with which an export is compared with its archive"
        )
    return texts


def _encode_samples(contract: ScoringContract, tokenizer: Tokenizer) -> Iterator[CheckedText]:
    for text in TEXTS:
        try:
            (ids,) = contract.tokenize(tokenizer, [text])
        except DataError:
            continue  # no chat template, or one that rejects this conversation
        scored = ids[-min(contract.seq_length, _MAX_CHECKED_TOKENS) :]
        if contract.reply_marker is not None and scored != ids:
            continue  # without its whole prompt, the marker before the response may be lost
        (rendered,) = replace(contract, trailing_pad_id=None).tokenize(tokenizer, [text])
        tail = tuple(rendered[len(ids) :])
        yield CheckedText(text, ids, scored, (len(scored) - 1,), tail=tail)


def _encode_steps(contract: ScoringContract, tokenizer: Tokenizer) -> Iterator[CheckedText]:
    for steps in _STEPS:
        for text in _write_steps(contract, steps):
            try:
                encoded = contract.encode(tokenizer, text)
            except DataError:
                continue
            has_all_reads = encoded.reads is not None and len(encoded.reads) == len(steps)
            if encoded.reads is not None and has_all_reads and not encoded.truncated:
                ids = encoded.token_ids
                yield CheckedText(text, ids, ids, encoded.reads, steps)


def _write_steps(contract: ScoringContract, steps: Sequence[str]) -> list[Text]:
    """Write the steps as the response of a conversation and, if the contract allows, as a raw text.

    The result is empty if the step separator occurs within a step.
    """
    question = {"role": "user", "content": "2+2+3?"}
    if contract.scored_position == TURNS:
        replies = ({"role": "assistant", "content": step} for step in steps)
        turns: list[Text] = [[message for reply in replies for message in (question, reply)]]
        return turns + ["".join(steps)] * (len(steps) == 1)
    separator = contract.step_separator or ""
    if any(separator in step for step in steps):
        return []
    reply = separator.join(steps) + separator * (contract.scored_position == MARKS)
    conversation: Text = [question, {"role": "assistant", "content": reply}]
    return [conversation] if contract.scored_position == ANSWERS else [conversation, reply]


def compute_reference_logits(
    model: GPTRewardModel, texts: Sequence[CheckedText], layout: ParallelLayout
) -> Tensor:
    """Compute the head's outputs for all samples with this package.

    Returns:
        float32 ``[S, A]``: one row for each sample (or for each step, if steps are scored), one
        column for each output. They are raw logits, without the contract's label means.
    """
    token_lists = [text.scored for text in texts]
    reads = SequenceReads.number([text.reads for text in texts]) if texts[0].steps else None
    # Put all samples into one pack, so that the weights are read only once.
    budget = sum(map(len, token_lists))
    packs = pack_sequences(token_lists, budget, reads, model.length_dependent_rope)
    shape = (sum(len(text.reads) for text in texts), model.rm_head.weight.size(0))
    return gather_rewards(infer(model, packs, layout), packs, shape, layout)


def check_folder(
    folder: Path, contract: ScoringContract, texts: Sequence[CheckedText], logits: Tensor
) -> float:
    """Load ``folder`` with transformers, and compare its token ids and logits with this package's.

    Args:
        logits: expected ``[S, A]``, from ``compute_reference_logits``, in the exported form.

    Returns:
        The largest difference of a logit.

    Raises:
        CheckpointError: transformers cannot load or run the folder, computes other token ids, or
            computes logits in fp32 that differ by more than 1e-4 plus 1e-5 of their size, in a
            batch of one or padded in a batch with a longer sample.
    """
    return compare(*_load_exported(folder), contract, texts, logits)


def _load_exported(folder: Path) -> tuple[Any, Any]:
    """Load an exported folder with transformers, so that the model computes in fp32.

    Returns:
        transformers' tokenizer and reward model.

    Raises:
        CheckpointError: the exported tensors are not those that transformers' class has.
    """
    try:
        tokenizer, model = _load_with_transformers(folder)
    except Exception as error:  # third-party code may raise anything
        raise CheckpointError(f"transformers cannot load the exported files: {error}") from error
    pad_id = json.loads((folder / "config.json").read_text(encoding="utf-8"))["pad_token_id"]
    if tokenizer.pad_token_id != pad_id:
        raise CheckpointError(
            f"pad token: transformers reads the id {tokenizer.pad_token_id} from the exported "
            f"tokenizer, but config.json has {pad_id}"
        )
    return tokenizer, model


def _load_with_transformers(folder: Path) -> tuple[Any, Any]:
    from transformers import (
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Set local_files_only, so that a model name in a config does not start a download.
    tokenizer = load_pretrained(AutoTokenizer, folder, local_files_only=True)
    source = open_source(folder)
    stored = {name for name in source.tensors if is_of_head(name)}
    has_bias = reads_steps(source)
    is_linear = stored == ({HF_HEAD, SCORE_WITH_BIAS} if has_bias else {HF_HEAD})
    architecture, model_type = str(source.config["architectures"][0]), source.config["model_type"]
    if not (is_linear and has_class(architecture, model_type)):
        head = find_head(source)
        assert head is not None  # the export has just written a head
        pad_id = find_skipped_pad(source, head)
        model = load_with_head(str(folder), source, head, "auto", pad_id)
        model = model.to(current_device()).eval()
        compute_in_fp32(model)
        return tokenizer, model
    # Load the weights in the files' dtype: transformers then maps the files into memory, and copies
    # nothing. compute_in_fp32 casts each module when it runs.
    auto = AutoModelForTokenClassification if has_bias else AutoModelForSequenceClassification
    model, report = load_pretrained(
        auto, folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    differing = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if differing:
        raise CheckpointError(
            "transformers' class has other tensors than the exported files; missing, unknown or of "
            "another shape: "
            f"{', '.join(map(str, differing))}"
        )
    model = model.to(current_device()).eval()
    # transformers has cast the head to the decoder's dtype, so read it again from the files, which
    # have it in fp32.
    model.score.weight.data = source.tensors[HF_HEAD].read().to(model.device)
    if has_bias:
        model.score.bias.data = source.tensors[SCORE_WITH_BIAS].read().to(model.device)
    compute_in_fp32(model)
    return tokenizer, model


def compare(
    tokenizer: Any,
    model: Any,
    contract: ScoringContract,
    texts: Sequence[CheckedText],
    logits: Tensor,
) -> float:
    """Compare the token ids and logits of a transformers model with this package's.

    ``check_folder`` calls this for an exported folder; the export of an adapter, for the base model
    with the adapter folded in. The other arguments, result and errors are those of
    ``check_folder``.

    Args:
        tokenizer: tokenizer of transformers.
        model: reward model of transformers.
    """
    for text in texts:
        _check_ids(tokenizer, contract, text)
    single = [transformers_logits(model, tokenizer, [text])[0] for text in texts]
    padded = list(single)
    # If RoPE depends on the longest sequence of a batch, rewards are comparable only in batches
    # of one, so padded batches are not compared.
    indices = [] if length_dependent_rope(model) else range(len(texts))
    by_length = sorted(indices, key=lambda index: len(texts[index].scored))
    for shorter, longer in pairwise(by_length):
        pair = [texts[shorter], texts[longer]]
        padded[shorter] = transformers_logits(model, tokenizer, pair)[0]
    return check_difference(torch.cat(single), torch.cat(padded), logits, texts)


def check_difference(
    single: Tensor, padded: Tensor, logits: Tensor, texts: Sequence[CheckedText]
) -> float:
    """Compare another library's logits with this package's, and return the largest difference.

    Args:
        single: the other library's logits ``[S, A]`` in batches of one.
        padded: the other library's logits ``[S, A]`` in padded batches.
        logits: this package's logits ``[S, A]``.
        texts: the samples. S is the number of their reading positions.

    Raises:
        CheckpointError: a difference exceeds the tolerance.
    """
    rows = [checked.text for checked in texts for _ in checked.reads]
    for batch_kind, library_logits in (("in a batch of one", single), ("padded", padded)):
        _check_logits(batch_kind, library_logits, logits, rows)
    return float(torch.stack([single - logits, padded - logits]).abs().max())


def _check_ids(tokenizer: Any, contract: ScoringContract, checked: CheckedText) -> None:
    """Raise CheckpointError if transformers' token ids or step positions are not the contract's."""
    text, expected = checked.text, [*checked.token_ids, *checked.tail]
    if not checked.steps:
        ids = _transformers_ids(tokenizer, contract, text)
        if ids != expected:
            raise CheckpointError(
                f"transformers tokenizes {text!r} as {ids}, but the scoring contract as {expected}"
            )
        return
    ids, reads = _transformers_steps(tokenizer, contract, checked)
    if (ids, reads) != (expected, checked.reads):
        raise CheckpointError(
            f"transformers tokenizes {text!r} as {ids} and reads at {reads}, but the scoring "
            f"contract as {expected} and reads at {checked.reads}"
        )


def _transformers_ids(tokenizer: Any, contract: ScoringContract, text: Text) -> list[int]:
    """Tokenize a sample as the Python program in the exported model card does; return token ids."""
    if not isinstance(text, str):
        text = tokenizer.apply_chat_template(text, tokenize=False)
        return tokenizer(text, add_special_tokens=False).input_ids
    return add_special_tokens(tokenizer(text, add_special_tokens=False).input_ids, contract)


def add_special_tokens(
    ids: list[Any], contract: ScoringContract, *, ends: bool = True
) -> list[int]:
    """Add the contract's BOS, EOS and reward token, if it has them, to the ids of a raw text.

    Args:
        ends: whether the text ends here. If not, only BOS is added.
    """
    if contract.add_bos and ids[:1] != [contract.bos_id]:
        ids = [contract.bos_id, *ids]
    if ends and contract.add_eos and ids[-1:] != [contract.eos_id]:
        ids = [*ids, contract.eos_id]
    if ends and contract.reward_token_id is not None and ids[-1:] != [contract.reward_token_id]:
        ids = [*ids, contract.reward_token_id]
    return ids


def _transformers_steps(
    tokenizer: Any, contract: ScoringContract, checked: CheckedText
) -> tuple[list[int], tuple[int, ...]]:
    """Return token ids and reading positions as the exported model card's program computes them.

    The sample is tokenized in pieces. Each piece ends with the token at which the head reads a
    step.
    """
    position, text, steps = contract.scored_position, checked.text, checked.steps
    separator = contract.step_separator or ""
    if position == TURNS and isinstance(text, list):
        pieces, previous = [], ""
        for turns in range(2, len(text) + 1, 2):
            rendered = tokenizer.apply_chat_template(text[:turns], tokenize=False)
            pieces.append(rendered.removeprefix(previous))
            previous = rendered
    elif position == ANSWERS and isinstance(text, list):
        pieces, previous = [], ""
        messages: list[dict[str, str]] = []
        for step in (f"{text[0]['content']} {steps[0]}", *steps[1:]):
            messages += [{"role": "user", "content": step}, {"role": "assistant", "content": "+"}]
            rendered = tokenizer.apply_chat_template(messages, tokenize=False)
            context = rendered[: rendered.rindex("+")]
            pieces.append(context.removeprefix(previous))
            previous = context
    else:
        pieces = [steps[0], *(separator + step for step in steps[1:])]
        if position == MARKS:
            pieces = [piece for step in steps for piece in (step, separator)]
        if not isinstance(text, str):
            rendered = tokenizer.apply_chat_template(text, tokenize=False)
            prefix, _, suffix = rendered.rpartition("".join(pieces))
            pieces[0] = prefix + pieces[0]
            pieces[-1] += "" if position == MARKS else suffix
    ids: list[int] = []
    reads = []
    for piece in pieces:
        ids += tokenizer(piece, add_special_tokens=False).input_ids
        reads.append(len(ids) - 1)
    reads = reads[1::2] if position == MARKS else reads
    if isinstance(text, str):
        complete_ids = add_special_tokens(ids, contract, ends=position not in OPEN_ENDED)
        num_bos = len(add_special_tokens(ids, contract, ends=False)) - len(ids)
        reads = [*(read + num_bos for read in reads[:-1]), len(complete_ids) - 1]
        ids = complete_ids
    return ids, tuple(reads)


def transformers_logits(model: Any, tokenizer: Any, texts: Sequence[CheckedText]) -> list[Tensor]:
    """Compute one batch with transformers; return each sample's logits, ``[1 or steps, A]``."""
    reset_dynamic_rope(model)
    has_steps = bool(texts[0].steps)
    # Positions of steps are counted from the left, so padding must be on the right. The last token
    # is found with padding on either side.
    side = {"padding_side": "right"} if has_steps else {}
    lists = {"input_ids": [[*text.scored, *text.tail] for text in texts]}
    batch = tokenizer.pad(lists, **side, return_tensors="pt").to(model.device)
    try:
        with torch.no_grad():
            output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    except Exception as error:  # third-party code may raise anything
        raise CheckpointError(f"transformers cannot run the model: {one_line(error)}") from error
    logits = output.logits.float().cpu()
    if not has_steps:
        return list(logits.split(1))
    return [row_logits[list(text.reads)] for row_logits, text in zip(logits, texts, strict=True)]


def _check_logits(
    batch_kind: str, library_logits: Tensor, logits: Tensor, texts: Sequence[Text]
) -> None:
    difference = (library_logits - logits).abs()
    # "not <=" instead of ">", so that a NaN counts as wrong.
    wrong = ~(difference <= TOLERANCE + _RELATIVE_TOLERANCE * logits.abs())
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise CheckpointError(
            f"transformers scores {texts[row]!r} {batch_kind} as "
            f"{library_logits[row, column]:.6g}, but this package as {logits[row, column]:.6g}; "
            f"the tolerance is {TOLERANCE}"
        )


# Checks of models that do not fit into memory: each layer has its weights only while it runs.


def load_layers_on_demand(model: GPTRewardModel, read: Callable[[str, int | None], Tensor]) -> None:
    """Make each layer of ``model`` load its weights when it is called, and free them afterwards.

    At most one layer is in memory at a time. Weights outside the layers are loaded at once and
    stay. The model must run in one process; it cannot be trained.

    Args:
        read: reads an unsharded tensor, in any dtype, by its name in ``decoder_tensors`` and its
            layer (None outside the layers).
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    by_layer: dict[int | None, list[tuple[Tensor, str]]] = defaultdict(list)
    # By default Megatron has one key for all layers; with this option, each layer has its own keys.
    entries = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    for name, entry in entries.items():
        if name not in tensors:
            continue  # TransformerEngine's opaque _extra_state holds no weights
        number, _, name_in_layer = entry.key.removeprefix(LAYERS).partition(".")
        is_inside = entry.key.startswith(LAYERS)
        layer, key = (int(number), name_in_layer) if is_inside else (None, entry.key)
        by_layer[layer].append((tensors[name], key))

    def fill(layer: int | None) -> None:
        for tensor, key in by_layer[layer]:
            tensor.data = read(key, layer).to(tensor.device, tensor.dtype)

    def empty(layer: int) -> None:
        for tensor, _ in by_layer[layer]:
            tensor.data = tensor.new_empty(0)

    # Load the weights outside the layers (embedding, final norm, head) once; they stay in memory.
    fill(None)
    for layer, module in enumerate(model.decoder.layers):
        empty(layer)
        module.register_forward_pre_hook(lambda *unused, layer=layer: fill(layer))
        module.register_forward_hook(lambda *unused, layer=layer: empty(layer))


def compute_in_fp32(model: torch.nn.Module) -> None:
    """Make every module of ``model`` compute in fp32, casting its weights only while it runs.

    The outputs equal those of a model loaded in fp32, but take less memory: only the module that is
    running has its weights in fp32.

    Args:
        model: a model of transformers that was loaded in the files' dtype, or a ``BodyWithHead``.
    """
    _restore_buffers(model.body if isinstance(model, BodyWithHead) else model)
    for module in model.modules():
        # Qwen3.5's attention uses its convolution's weight without calling the convolution, so the
        # hooks of the attention module must cast that weight, too. A layer of Nemotron-H casts its
        # input to the dtype of its norm's weight.
        children = [child for name, child in module.named_children() if name in ("conv1d", "norm")]
        stored = {
            parameter: parameter.data
            for owner in (module, *children)
            for parameter in owner.parameters(recurse=False)
            if parameter.dtype != torch.float32
        }
        # Cast only the embedded tokens: the result is the same, and the embedding is the largest
        # matrix.
        if type(module) is torch.nn.Embedding:
            module.register_forward_hook(lambda module, inputs, rows: rows.float())
        elif stored:
            module.register_forward_pre_hook(lambda *unused, stored=stored: _cast(stored, True))
            module.register_forward_hook(lambda *unused, stored=stored: _cast(stored, False))


def _restore_buffers(model: Any) -> None:
    """Replace a transformers model's buffers by the values that its class computes in fp32.

    Buffers that the files do not have are computed by transformers, in the dtype in which it loads
    the model. In bf16 a Gemma scales its embeddings by 25.25, although the root of its hidden size
    is 25.298. A later cast to fp32 would keep 25.25.
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
    """Context manager in which ``torch.empty`` makes tensors without memory, on the meta device.

    A transformers model that is built in this context has no weights, but its buffers have values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **device})


def _cast(stored: Mapping[torch.nn.Parameter, Tensor], is_running: bool) -> None:
    """Cast a module's parameters to fp32 if it ``is_running``; otherwise restore the stored data.

    Args:
        stored: for each parameter its data in the stored dtype.
        is_running: True before the module's forward pass, False after it.
    """
    for parameter, data in stored.items():
        parameter.data = data.float() if is_running else data
