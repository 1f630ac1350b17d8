"""Settings of megatron-core: the models that are known, and those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nemo_aligner.batch import PackedBatch
from nemo_aligner.errors import CheckpointError
from tests.checkpoint import foreign
from tests.checkpoint.loading import (
    SEQUENCES,
    Tensors,
    check,
    import_nemo,
    load,
)


def test_a_gemma_of_megatron_bridge_is_nemo_1s(
    tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    """Bridge calls the GELU with tanh fast_gelu, and scales embeddings by the provider's class."""
    from megatron.core.activations import fast_gelu

    from nemo_aligner.models.step import infer

    numbers = torch.linspace(-4, 4, 101)
    gelu = torch.nn.functional.gelu(numbers, approximate="tanh")
    torch.testing.assert_close(fast_gelu(numbers), gelu)
    tied = {key: tensor for key, tensor in tensors.items() if key != "output_layer.weight"}
    foreign.nemo1(tmp_path / "a", tied, tokenizer_folder, **foreign.NEMO1_GEMMA)
    foreign.bridge(tmp_path / "b", tied, tokenizer_folder, **foreign.BRIDGE_GEMMA)
    wanted, got = load(tmp_path / "a", layout), load(tmp_path / "b", layout)
    check(got.model, tied)
    batch = [PackedBatch.pack(SEQUENCES)]
    scores = [infer(loaded.model, batch, layout) for loaded in (wanted, got)]
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_interleaved": True}, "rotary_interleaved: got True"),
        ({"num_moe_experts": 8}, "num_moe_experts: got 8"),
        ({"multi_latent_attention": True}, "multi_latent_attention: got True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: got 50.0"),
        ({"query_pre_attn_scalar": 224}, "query_pre_attn_scalar: got 224"),
        ({"use_mup": True}, "use_mup: got True"),
        ({"rotary_base_per_layer": [1e4, 1e6]}, "rotary_base_per_layer: got"),
        (
            {"_target_": "nemo.collections.llm.Gemma2Config2B", "query_pre_attn_scalar": 256},
            "_target_: got 'Gemma2Config2B'",
        ),
        ({"activation_func": foreign.function("torch.nn.functional.gelu")}, "activation_func"),
        ({"normalization": "BatchNorm"}, "normalization: got 'BatchNorm'"),
        ({"add_bias_linear": True}, "bias: got True"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
        ({"num_layers": 5}, "4 layers of shape.*want 5"),
        ({"num_query_groups": None}, "linear_qkv"),
        ({"seq_length": None}, "max_position_embeddings|NoneType|None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_models_are_refused(
    changes: dict,
    message: str,
    tensors: Tensors,
    tokenizer_folder: Path,
    layout: Any,
    tmp_path: Path,
) -> None:
    foreign.nemo2(tmp_path / "theirs", tensors, tokenizer_folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "theirs", layout)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softmax_scale": 0.1}, r"model_config\.yaml: softmax_scale: got 0\.1"),
        (
            {"mcore_customization_config": {"query_pre_attn_scalar": 224}},
            "mcore_customization_config: query_pre_attn_scalar: got 224",
        ),
        ({"mcore_customization_config": [1]}, "mcore_customization_config: got .*wanted a mapping"),
    ],
    ids=["field", "section", "list"],
)
def test_what_nemo_1_hands_to_megatron_core_is_refused(
    changes: dict,
    message: str,
    tensors: Tensors,
    tokenizer_folder: Path,
    layout: Any,
    tmp_path: Path,
) -> None:
    """NeMo 1 sets fields of ``TransformerConfig`` by their names; a schedule changes no result."""
    foreign.nemo1(tmp_path / "theirs", tensors, tokenizer_folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "theirs", layout)
    harmless = {"mcore_customization_config": {"num_microbatches_per_virtual_pipe": 4}}
    config = tmp_path / "model_config.yaml"
    config.write_text(yaml.safe_dump(foreign.nemo1_config(**harmless)))
    import_nemo(tmp_path / "theirs", tmp_path / "ours.nemo", config=config)
