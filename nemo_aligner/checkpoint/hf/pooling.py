"""Folder of a reward model that reads the mean of a reply, for sentence-transformers.

The decoder is followed by a pooling that leaves out the tokens of a prompt, and by a dense module
for each layer of the head. What comes before a reply, its marker included, is given as the prompt.
Names and rules are those of sentence-transformers 6.2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_aligner.checkpoint.hf.check import (
    CheckedText,
    add_special_tokens,
    check_difference,
    compute_in_fp32,
)
from nemo_aligner.checkpoint.hf.heads import length_dependent_rope, reset_dynamic_rope
from nemo_aligner.checkpoint.hf.reward_archive import HeadOut
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.turns import reply_start
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.utils.errors import CheckpointError

_POOLING = "1_Pooling"
_TRANSFORMER = {
    # With a chat template, texts would be taken for messages, whose prompts are not left out.
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
    # The chat template has written all of them.
    "processing_kwargs": {"text": {"add_special_tokens": False}},
}
_DENSE_NAMES = {"weight": "linear.weight", "bias": "linear.bias"}


def require_package() -> None:
    """Refuse what only sentence-transformers can read and check, where it is not installed."""
    try:
        import sentence_transformers  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            "a head that reads the mean of a reply is exported for sentence-transformers (extra "
            "[pooling])"
        ) from error


def write_modules(folder: Path, head: HeadOut, hidden_size: int) -> None:
    """Write the modules behind the decoder: the mean, and the layers of a head that has biases."""
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
        named = {name: head.tensors[f"{layer}.{ours}"] for ours, name in _DENSE_NAMES.items()}
        save_file(named, folder / layer / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_pooled_folder(
    folder: Path, contract: ScoringContract, texts: Sequence[CheckedText], logits: Tensor
) -> float:
    """Load ``folder`` with sentence-transformers and compare, as ``check.check_folder`` does."""
    from sentence_transformers import SentenceTransformer

    try:
        model: Any = SentenceTransformer(
            str(folder),
            device=str(current_device()),
            local_files_only=True,
            model_kwargs={"dtype": "auto"},
        )
    except Exception as error:  # third-party code on files that may be wrong
        raise CheckpointError(
            f"sentence-transformers cannot load what was written: {error}"
        ) from error
    decoder = model[0].model
    compute_in_fp32(decoder)
    files = sorted(folder.glob("score*/model.safetensors"))
    # These have the head in fp32; it was cast to the decoder's dtype.
    for dense, file in zip(list(model)[2:], files, strict=True):
        dense.float().load_state_dict(load_file(file))

    def encode(replies: list[str], prompt: str) -> Tensor:
        reset_dynamic_rope(decoder)
        return model.encode(replies, prompt=prompt, convert_to_tensor=True)[:1].float().cpu()

    alone, padded = [], []
    for each in texts:
        prompt, reply = _split(each.text, contract, model.tokenizer)
        _check_tokens(model[0].preprocess([reply], prompt=prompt), each, contract)
        alone.append(encode([reply], prompt))
        # Where a batch is rotated by its longest text, only a text alone has a reward of its own.
        is_alone = bool(length_dependent_rope(decoder))
        padded.append(alone[-1] if is_alone else encode([reply, 2 * reply], prompt))
    return check_difference(torch.cat(alone), torch.cat(padded), logits, texts)


def _split(text: Text, contract: ScoringContract, tokenizer: Any) -> tuple[str, str]:
    """What comes before the reply, and the reply, as the model card has them."""
    if isinstance(text, str):
        ids = add_special_tokens([None], contract)  # None stands for the ids of the text
        return "", "".join(text if each is None else tokenizer.decode([each]) for each in ids)
    written = tokenizer.apply_chat_template(text, tokenize=False)
    before, marker, reply = written.rpartition(tokenizer.decode(list(contract.reply_marker or ())))
    return before + marker, reply


def _check_tokens(features: Any, checked: CheckedText, contract: ScoringContract) -> None:
    text, wanted = checked.text, checked.token_ids
    ids, left_out = features["input_ids"][0].tolist(), features.get("prompt_length", 0)
    start = reply_start(wanted, contract.reply_marker or ())
    if (ids, left_out) != (wanted, start):
        raise CheckpointError(
            f"sentence-transformers tokenizes {text!r} as {ids} and leaves out the first "
            f"{left_out}, wanted the scoring contract's {wanted} and {start}: it does not count a "
            "prompt's last token if that is BOS, EOS or padding"
        )
