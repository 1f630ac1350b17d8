"""What no field of a GGUF file says is as llama.cpp has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests import families
from tests.checkpoint.hf.gguf.writing import (
    LLAMA3,
    write_fields,
)

gguf = pytest.importorskip("gguf")


def test_llama3_divisors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from nemo_aligner.checkpoint.hf.families.gguf_fields import llama3_divisors

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / LLAMA3["rope_theta"] ** (torch.arange(0, 64, 2) / 64)
    got = llama3_divisors(LLAMA3["rope_theta"], 64, LLAMA3)
    assert got.min() == 1.0
    assert got.max() == 32.0
    torch.testing.assert_close(got, plain / scaled)


@pytest.mark.parametrize("layers", [42, 46])
def test_gemma2_scales_its_scores_as_llama_cpp_does(layers: int, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.gguf.file import GgufCheckpoint

    # 9B and 27B, but for the tensors.
    writer = gguf.GGUFWriter(tmp_path / "gemma2.gguf", "gemma2")
    shape = {"hidden_size": 4608, "num_attention_heads": 32, "num_key_value_heads": 16}
    write_fields(
        writer,
        "gemma2",
        {
            **families.hf_config("gemma2").to_dict(),
            **shape,
            "head_dim": 128,
            "num_hidden_layers": layers,
        },
    )
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = GgufCheckpoint(tmp_path / "gemma2.gguf").config
    assert config["query_pre_attn_scalar"] == {42: 128, 46: 144}[layers]
