"""A reward model of every family, from Hugging Face and back: every number, and every score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import families, tiny

pytestmark = pytest.mark.usefixtures("layout")


def write_reward_model(folder: Path, case: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForSequenceClassification

    config = families.hf_config(case)
    config.num_labels, config.pad_token_id = 2, 0
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.to(dtype).save_pretrained(folder)
    tiny.write_tokenizer(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", families.CASES)
def test_there_and_back(case: str, dtype: torch.dtype, layout: Any, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
    from nemo_aligner.checkpoint.hf.export import ExportOptions, export_to_hf

    write_reward_model(tmp_path / "there", case, dtype)
    # Of two query groups, for which a third of zeros is added and removed again.
    convert_hf_to_nemo(tmp_path / "there", tmp_path / "rm.nemo", tensor_parallel=3)
    summary = export_to_hf(tmp_path / "rm.nemo", tmp_path / "back", layout, ExportOptions())
    # The export scored texts longer than any window through both.
    assert summary.largest_difference < 2e-5
    there, back = (load_file(tmp_path / name / "model.safetensors") for name in ("there", "back"))
    assert there.keys() == back.keys()
    for name, tensor in there.items():
        wanted = tensor.float() if name == "score.weight" else tensor
        assert torch.equal(back[name], wanted), name
