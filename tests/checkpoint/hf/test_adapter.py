"""Export of LoRA for peft: names and values, the check on the base model, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from nemo_aligner.checkpoint.conversion_cache import TOKENIZER_FILES
from nemo_aligner.checkpoint.hf.adapter import _reward_model_class, export_adapter
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.reward_archive import ExportOptions
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, save_reward_model
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import BasePrecision
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.models.shapes.lora import LoraShape, is_of_adapter
from tests.checkpoint.hf.exporting import edit_tensors, export, tensors_of
from tests.checkpoint.hf.test_multimodal import write as write_multimodal
from tests.checkpoint.refusals import refusals
from tests.harness import families, tiny
from tests.harness.contracts import Contracts

QKV = LoraShape(3, 6.0, ("linear_qkv", "linear_proj"))


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    tiny.write_hf_checkpoint(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def make(hf: Path, layout: Any, contracts: Contracts, tmp_path: Path) -> Any:
    """Write a reward model with random LoRA adapters and two attributes."""

    def make(lora: LoraShape | None, tensor_parallel: int = 1) -> Path:
        base = tmp_path / "base.nemo"
        if not base.exists():
            convert_hf_to_nemo(hf, base, tensor_parallel=tensor_parallel)
        options = {"num_attributes": 2, "precision": Precision.fp32, "lora": lora}
        loaded = load_pretrained(base, layout, **options)
        groups = 2 + (tensor_parallel == 3)
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                if is_of_adapter(name) and "linear_out" in name:
                    parameter.normal_(std=0.2)
                    if groups == 3 and "qkv" in name:
                        parameter[2 * len(parameter) // 3 :] = 0.0  # as after training
        settings = contracts.config(["a", "b"])
        if lora is not None:
            settings.lora.rank, settings.lora.base_precision = lora.rank, lora.base_precision
        contract = build_contract(settings, loaded.tokenizer, Precision.fp32)
        path = tmp_path / ("plain.nemo" if lora is None else "rm.nemo")
        save_reward_model(path, loaded.model, loaded.config, loaded.tokenizer, contract)
        return path

    return make


@pytest.mark.parametrize("tensor_parallel", [1, 3])
def test_adapter_on_the_base_model_is_the_whole_export(
    make: Any, hf: Path, layout: Any, tmp_path: Path, tensor_parallel: int
) -> None:
    archive = make(QKV, tensor_parallel)
    summary = export_adapter(archive, tmp_path / "out", str(hf), layout, ExportOptions())
    assert "LoRA of rank 3, alpha 6, on linear_qkv, linear_proj" in summary
    assert "checked: 7 samples" in summary
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    export(archive, tmp_path / "whole", layout)
    full, base = tensors_of(tmp_path / "whole"), tensors_of(hf)
    assert torch.equal(adapter.pop("base_model.model.score.weight"), full["score.weight"])
    assert len(adapter) == 2 * 4 * 4  # A and B, layers, modules
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        added = torch.zeros_like(weight)
        if f"{stem}.lora_A.weight" in adapter:
            low, high = (adapter[f"{stem}.lora_{matrix}.weight"] for matrix in "AB")
            added = 2.0 * high @ low
            assert added.abs().max() > 0.01
        torch.testing.assert_close(full[name], weight + added, rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_adapter_and_export_of_a_quantized_base_tell_what_changes(
    make: Any, hf: Path, layout: Any, tmp_path: Path, precision: str
) -> None:
    archive = make(replace(QKV, base_precision=BasePrecision(precision)))
    summary = export_adapter(archive, tmp_path / "out", str(hf), layout, ExportOptions())
    assert (
        f"base precision: {precision}. The adapter was trained on a base in {precision}" in summary
    )
    assert 1e-6 < float(summary.split("differs by up to ")[1].split("\n")[0]) < 0.5
    assert "checked: 7 samples" in summary
    contract = json.loads((tmp_path / "out" / "scoring_contract.json").read_text())
    assert contract["base_precision"] == precision
    whole = str(export(archive, tmp_path / "whole", layout))
    assert f"base precision: {precision}. The adapters are folded into" in whole
    assert float(whole.split("a reward changes by up to ")[1].split("\n")[0]) < 1e-5
    assert "base_precision" not in (tmp_path / "whole" / "scoring_contract.json").read_text()


LATENTS = {
    "deepseek_v3": ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"],
    "deepseek_v3_untied": ["q_proj", "kv_a_proj_with_mqa", "o_proj"],
}


HYBRID_MIXTURES = {
    "qwen3_5_moe": [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba"],
    "nemotron_h_moe": ["in_proj"],
}


@pytest.mark.parametrize(
    "case",
    ["phi3_untied", "glm", "granite", "qwen3_5", "gpt_neox", *LATENTS, *HYBRID_MIXTURES],
)
def test_adapter_of_fused_and_reordered_weights_is_checked(
    case: str, make: Any, hf: Path, layout: Any, tmp_path: Path
) -> None:
    families.write_hf_checkpoint(hf, case)
    # peft has no adapters of experts.
    has_experts = case in {**LATENTS, **HYBRID_MIXTURES}
    second = "linear_proj" if has_experts else "linear_fc1"
    archive = make(LoraShape(3, 6.0, ("linear_qkv", second)))
    summary = export_adapter(archive, tmp_path / "out", str(hf), layout, ExportOptions())
    assert "checked: 7 samples" in summary
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    fused = {"phi3_untied": ["qkv_proj"], "gpt_neox": ["query_key_value"]}
    parts = fused.get(case, ["k_proj", "q_proj", "v_proj"])
    if case == "qwen3_5":
        parts += [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    # transformers has no class for a Granite, so the card defines one.
    gates = ["gate_proj", "up_proj"]
    mlps = {"granite": gates, "qwen3_5": gates, "gpt_neox": ["dense_h_to_4h"]}
    parts += mlps.get(case, ["gate_up_proj"])
    parts = LATENTS.get(case, parts)
    if case in HYBRID_MIXTURES:
        parts = ["k_proj", "q_proj", "v_proj", "o_proj", "out_proj", *HYBRID_MIXTURES[case]]
    assert config["target_modules"] == sorted(parts)
    # transformers has no class for these, so the card defines one.
    card = (tmp_path / "out" / "README.md").read_text()
    is_defined = "GenericForSequenceClassification" in card
    assert is_defined == (case in ("granite", "qwen3_5_moe", "nemotron_h_moe"))


@pytest.mark.parametrize("case", ["gemma3", "qwen3_5", "mistral3"])
def test_adapter_of_a_multimodal_base_adapts_its_decoder_alone(
    case: str, make: Any, hf: Path, layout: Any, tmp_path: Path
) -> None:
    write_multimodal(hf, case)
    summary = export_adapter(make(QKV), tmp_path / "out", str(hf), layout, ExportOptions())
    assert "checked: 7 samples" in summary
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    with torch.device("meta"):
        model = _reward_model_class(str(hf))(AutoConfig.from_pretrained(hf))
    adapted = {
        f"base_model.model.{name}.lora_{letter}.weight"
        for name, _ in model.named_modules()
        if re.fullmatch(config["target_modules"], name)  # as peft does with a string
        for letter in "AB"
    }
    assert adapted == adapter.keys() - {"base_model.model.score.weight"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("GenericForSequenceClassification" in card) == (case == "mistral3")
    assert "\nmodel.config.get_text_config().pad_token_id = tokenizer.pad_token_id\n" in card


def test_adapter_of_a_named_base_has_a_card_and_is_said_to_be_unchecked(
    make: Any, hf: Path, hub: Callable[[Path], dict[str, Any]], layout: Any, tmp_path: Path
) -> None:
    """The attributes can be merged into one."""
    requests = hub(hf)
    options = ExportOptions(merge=True, hub_name="org/rm")
    summary = export_adapter(make(QKV), tmp_path / "out", "org/base", layout, options)
    assert requests["allow_patterns"] == TOKENIZER_FILES
    assert "NOT CHECKED: org/base is not a folder on this machine" in summary
    assert "the head of reward" in summary
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(adapter["base_model.model.score.weight"]) == 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft" in card
    assert '"org/base", num_labels=1' in card
    assert 'PeftModel.from_pretrained(model, "org/rm")' in card
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1


def test_adapter_without_its_base_or_lora_is_refused_and_leaves_nothing(
    make: Any, hf: Path, layout: Any, tmp_path: Path
) -> None:
    archive, wide, short = make(QKV), tmp_path / "wide", tmp_path / "short"
    up = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(hf, {up: tensors_of(hf)[up] + 0.1})
    tiny.write_hf_checkpoint(wide, num_key_value_heads=4)
    tiny.write_hf_checkpoint(short, num_hidden_layers=3)
    others: dict[str, Any] = {"internlm2": {}, "phi3": {}, "bloom": {}}
    others |= {
        "paligemma": {"text_config": {}},
        "qwen2_5_vl": {"text_config": {"model_type": "llama"}},
    }
    for name, config in others.items():
        (tmp_path / name).mkdir()
        text = json.dumps({"model_type": name, **config})
        (tmp_path / name / "config.json").write_text(text)
    with refusals() as refused:
        for base, pattern in (
            (hf, "transformers scores"),
            (wide, "got shape .*, so this is not the base of the reward model"),
            (short, r"layers\.3\..*: there is no such module, .* not the base of the reward model"),
            (tmp_path / "internlm2", "model_type: got internlm2, .* other names than .* llama"),
            (tmp_path / "phi3", "model_type: got phi3, .* other names than those of llama"),
            (tmp_path / "bloom", "bloom: .*model_type"),
            (tmp_path / "paligemma", "paligemma: model_type: got 'paligemma'"),
            (tmp_path / "qwen2_5_vl", "got qwen2_5_vl, which transformers cannot load with"),
            (tmp_path / "none", "none: there is no such folder or file"),
        ):
            with refused(pattern, pattern):
                export_adapter(archive, tmp_path / "out", str(base), layout, ExportOptions())
        with refused("none", "it has no LoRA adapter"):
            export_adapter(make(None), tmp_path / "out", "org/base", layout, ExportOptions())
    assert not (tmp_path / "out").exists()
