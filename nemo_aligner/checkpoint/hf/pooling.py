"""Export a reward model that reads the mean of a response, for sentence-transformers.

sentence-transformers runs the modules of the exported folder one after the other: the decoder; a
pooling module, which averages hidden states without those of the prompt; and a dense module for
each layer of the head. The prompt is the text before the response, including the marker with which
a response begins. Names and rules follow sentence-transformers 6.2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_aligner.checkpoint.hf.body_with_head import length_dependent_rope, reset_dynamic_rope
from nemo_aligner.checkpoint.hf.check import (
    CheckedText,
    add_special_tokens,
    check_difference,
    compute_in_fp32,
)
from nemo_aligner.checkpoint.hf.reward_archive import ExportedHead
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.turns import reply_start
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.utils.errors import CheckpointError

_POOLING = "1_Pooling"
_TRANSFORMER = {
    # Declare text as the only kind of input. Otherwise sentence-transformers, if there is a chat
    # template, treats inputs as messages, and the mean includes their prompts.
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
    # The text comes from the chat template, which has already written the special tokens.
    "processing_kwargs": {"text": {"add_special_tokens": False}},
}
_DENSE_NAMES = {"weight": "linear.weight", "bias": "linear.bias"}


def require_package() -> None:
    """Raise CheckpointError, before an export begins, if sentence-transformers is not installed."""
    try:
        import sentence_transformers  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            "a head that reads the mean of a response is exported for sentence-transformers, which "
            "is not installed. Install the extra [pooling]"
        ) from error


def write_modules(folder: Path, head: ExportedHead, hidden_size: int) -> None:
    """Write the folders of the modules after the decoder.

    They are the pooling module, which computes the mean, and for each layer of ``head`` a dense
    module with a bias. ``modules.json`` lists them.
    """
    layers = sorted({name.rpartition(".")[0] for name in head.tensors})
    kinds = {"": "Transformer", _POOLING: "Pooling", **dict.fromkeys(layers, "Dense")}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(kinds.items())
    ]
    pooling = {"embedding_dimension": hidden_size, "pooling_mode": "mean", "include_prompt": False}
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "sentence_bert_config.json", _TRANSFORMER)
    _write_json(folder / _POOLING / "config.json", pooling)
    for layer in layers:
        weight = head.tensors[f"{layer}.weight"]
        activation = "linear.Identity" if layer == layers[-1] else "activation.ReLU"
        dense = {
            "in_features": weight.size(1),
            "out_features": weight.size(0),
            "bias": True,
            "activation_function": f"torch.nn.modules.{activation}",
        }
        _write_json(folder / layer / "config.json", dense)
        tensors = {name: head.tensors[f"{layer}.{kind}"] for kind, name in _DENSE_NAMES.items()}
        save_file(tensors, folder / layer / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_pooled_folder(
    folder: Path, contract: ScoringContract, texts: Sequence[CheckedText], logits: Tensor
) -> float:
    """Load ``folder`` with sentence-transformers, and compare as ``check.check_folder`` does.

    Arguments, result and errors are those of ``check_folder``; ``[S, A]`` has a row per sample.
    """
    from sentence_transformers import SentenceTransformer

    try:
        model: Any = SentenceTransformer(
            str(folder),
            device=str(current_device()),
            local_files_only=True,
            model_kwargs={"dtype": "auto"},
        )
    except Exception as error:  # third-party code may raise anything
        raise CheckpointError(
            f"sentence-transformers cannot load the exported files: {error}"
        ) from error
    decoder = model[0].model
    compute_in_fp32(decoder)
    files = sorted(folder.glob("score*/model.safetensors"))
    # Loading has cast the head to the decoder's dtype, so read it again from the files, which have
    # it in fp32.
    for dense, file in zip(list(model)[2:], files, strict=True):
        dense.float().load_state_dict(load_file(file))

    def encode(replies: list[str], prompt: str) -> Tensor:
        reset_dynamic_rope(decoder)
        return model.encode(replies, prompt=prompt, convert_to_tensor=True)[:1].float().cpu()

    single, padded = [], []
    for text in texts:
        prompt, reply = _split_prompt(text.text, contract, model.tokenizer)
        _check_tokens(model[0].preprocess([reply], prompt=prompt), text, contract)
        single.append(encode([reply], prompt))
        # If RoPE depends on the longest sequence of a batch, rewards are comparable only in batches
        # of one. Then no padded batch is scored.
        is_length_dependent = bool(length_dependent_rope(decoder))
        padded.append(single[-1] if is_length_dependent else encode([reply, 2 * reply], prompt))
    return check_difference(torch.cat(single), torch.cat(padded), logits, texts)


def _split_prompt(text: Text, contract: ScoringContract, tokenizer: Any) -> tuple[str, str]:
    """Split a sample into prompt and response as the program in the exported model card does."""
    if isinstance(text, str):
        ids = add_special_tokens([None], contract)  # None marks the text's own ids
        pieces = (text if token_id is None else tokenizer.decode([token_id]) for token_id in ids)
        return "", "".join(pieces)
    rendered = tokenizer.apply_chat_template(text, tokenize=False)
    marker = tokenizer.decode(list(contract.reply_marker or ()))
    prompt, separator, reply = rendered.rpartition(marker)
    return prompt + separator, reply


def _check_tokens(features: Any, checked: CheckedText, contract: ScoringContract) -> None:
    """Raise CheckpointError if the token ids or the prompt's length are not the contract's.

    ``features`` is the result of sentence-transformers' tokenizer for one sample.
    """
    text, expected = checked.text, checked.token_ids
    ids, prompt_length = features["input_ids"][0].tolist(), features.get("prompt_length", 0)
    start = reply_start(expected, contract.reply_marker or ())
    if (ids, prompt_length) != (expected, start):
        raise CheckpointError(
            f"sentence-transformers tokenizes {text!r} as {ids} with a prompt of {prompt_length} "
            f"tokens, but the scoring contract as {expected} with a prompt of {start}. "
            "sentence-transformers does not count a prompt's last token if that is BOS, EOS or "
            "padding"
        )
