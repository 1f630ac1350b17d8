"""Run reward heads for which transformers has no class, on top of transformers' decoders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.checkpoint.hf.heads import FoundHead, reads_steps
from nemo_aligner.checkpoint.hf.source import Source
from nemo_aligner.checkpoint.hf.transformers_classes import load_pretrained
from nemo_aligner.utils.errors import CheckpointError


class BodyWithHead(torch.nn.Module):
    """transformers' decoder with a head for which transformers has no class.

    It can replace transformers' ``ForSequenceClassification``, which reads the last token, or, if
    ``reads_all``, ``ForTokenClassification``. Padding must be on the right. Tokens ``pad_id`` at
    the end count as padding, as in that class; None reads the last token whatever it is.
    """

    def __init__(
        self,
        body: Any,
        head: Mapping[str, Tensor],
        *,
        reads_all: bool = False,
        pad_id: int | None = None,
    ) -> None:
        super().__init__()
        self.reads_all, self.pad_id = reads_all, pad_id
        self.body = body
        self.head = dict(head)
        if body.config.num_labels != len(head["weight"]):
            body.config.num_labels = len(head["weight"])

    @property
    def config(self) -> Any:
        return self.body.config

    @property
    def device(self) -> torch.device:
        return self.body.device

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        """Compute the logits at the last token of each sequence, or at all tokens.

        Args:
            input_ids: ``[S, T]``, padded on the right.
            attention_mask: ``[S, T]``, 0 for padding.

        Returns:
            An object whose ``logits`` are float32 ``[S, A]``, or ``[S, T, A]`` if ``reads_all``.
        """
        hidden = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        is_token = attention_mask.bool()
        if self.pad_id is not None:
            is_token = is_token & (input_ids != self.pad_id)
        # The sum of the flags is largest from the last token on.
        last = is_token.cumsum(dim=1).argmax(dim=1)
        rows = torch.arange(len(hidden), device=hidden.device)
        states = (hidden if self.reads_all else hidden[rows, last]).float()
        head = {name: tensor.to(states.device) for name, tensor in self.head.items()}
        if "hidden.weight" in head:
            states = F.linear(states, head["hidden.weight"], head.get("hidden.bias")).relu()
        return SimpleNamespace(logits=F.linear(states, head["weight"], head.get("bias")))


@contextmanager
def quiet_about_heads() -> Iterator[None]:
    """Suppress transformers' warning that a class and a checkpoint have different heads.

    The callers load the head themselves, so the warning would mislead users.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_with_head(
    name: str,
    source: Source,
    head: FoundHead,
    dtype: torch.dtype | str,
    pad_id: int | None = None,
) -> Any:
    """Load a decoder with transformers, and put the head of the same checkpoint on top.

    Args:
        name: a folder, or a model's name on the hub.
        source: the opened checkpoint.
        head: head of ``source``; its ``rows``, if any, must be indices.
        dtype: dtype of the decoder; the head is fp32.
        pad_id: see ``BodyWithHead``.

    Raises:
        CheckpointError: transformers cannot load the decoder, or weights of it are missing.
    """
    from transformers import AutoModel

    with quiet_about_heads():
        body, report = load_pretrained(AutoModel, name, dtype=dtype, output_loading_info=True)
    if report["missing_keys"]:
        missing = ", ".join(sorted(map(str, report["missing_keys"]))[:3])
        raise CheckpointError(f"{name}: weights of the decoder are missing: {missing}")
    lazy_tensors = head.tensors(body.config.get_text_config().hidden_size)
    tensors = {head_name: tensor.read() for head_name, tensor in lazy_tensors.items()}
    return BodyWithHead(body, tensors, reads_all=reads_steps(source), pad_id=pad_id)


# If RoPE depends on a sequence's length, transformers applies the RoPE of the longest sequence to
# the whole batch. With dynamic RoPE, earlier batches matter, too, because the frequencies of the
# longest sequence so far are kept. So this package defines a sample's reward as that of a newly
# loaded model in a batch of one.


def length_dependent_rope(model: torch.nn.Module) -> list[Any]:
    """List a model's rotary embeddings that depend on the longest sequence of a batch."""
    kinds = "dynamic", "longrope"
    return [module for module in model.modules() if getattr(module, "rope_type", None) in kinds]


def reset_dynamic_rope(model: torch.nn.Module) -> None:
    """Reset dynamic RoPE to its state after loading, so that earlier batches change no reward."""
    for rotary in length_dependent_rope(model):
        if rotary.rope_type == "dynamic":
            rotary.inv_freq = rotary.original_inv_freq.clone()
            rotary.max_seq_len_cached = rotary.original_max_seq_len
