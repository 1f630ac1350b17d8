"""Which decoders are built from TransformerEngine: those whose tensors all have a place in it."""

from __future__ import annotations

import re

import pytest
import torch

from nemo_aligner.checkpoint.decoder_tensors import layer_tensors
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.models import backbone
from nemo_aligner.models.backbone import use_transformer_engine
from nemo_aligner.models.shapes.decoder import ModelShape
from tests.harness import families
from tests.harness.families import CASES

# Tensors of TransformerEngine's layers as megatron-core builds them, and of this package's modules
# between them. tests/paths/gpu_rehearsal builds the models.
PLACES = re.compile(
    r"self_attention\.(linear_qkv\.(weight|bias|layer_norm_weight|layer_norm_bias)"
    r"|linear_proj\.weight|[qk]_layernorm\.weight|core_attention\.softmax_offset)"
    r"|mlp\.(linear_fc1\.(weight|layer_norm_weight|layer_norm_bias)|linear_fc2\.weight"
    r"|activation_func\.\w+|router\..+|(shared_)?experts\..+)|pre_mlp_layernorm\.weight"
)


def shape_of(case: str) -> ModelShape:
    config = families.hf_config(case).to_dict()
    return ModelShape.from_config(find_family(CASES[case]["model_type"]).to_nemo(config))


def test_transformer_engine_is_used_only_where_every_tensor_has_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backbone, "find_spec", lambda name: object())
    shapes = {case: shape_of(case) for case in CASES}
    used = {case for case, shape in shapes.items() if use_transformer_engine(shape, torch.bfloat16)}
    for case in used:
        for number in range(1, shapes[case].num_layers + 1):
            names = layer_tensors(shapes[case].of_layer(number))
            assert [name for name in names if not PLACES.fullmatch(name)] == [], case
    assert {"llama", "qwen2", "nemotron", "olmoe", "mixtral"} <= used
    # Its output projection has a bias.
    assert "gpt_oss" not in used
    assert not use_transformer_engine(shapes["llama"], torch.float32)
