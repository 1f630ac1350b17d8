"""Text decoders in multimodal models compute the same as the models in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.hf.multimodal import decoder_config, decoder_name, is_multimodal
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.step import infer
from tests.checkpoint.hf.exporting import assert_same, export, tensors_of
from tests.checkpoint.refusals import refusals
from tests.harness import families, family_cases, tiny
from tests.harness.families import SEQUENCES, WINDOW

TEXT = {**tiny.SHAPE, "initializer_range": 0.1}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28}
CLIP = {"model_type": "clip_vision_model", **SMALL, "num_attention_heads": 2, "patch_size": 14}
PIXTRAL = {**CLIP, "model_type": "pixtral", "head_dim": 16}
QWEN = {"depth": 1, "num_heads": 2, "patch_size": 14}
# RoPE with separate channels for the three coordinates of an image.
MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
CASES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, **families.CASES["gemma3"]},
        "vision_config": {**CLIP, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**SMALL, "image_size": [28, 28], "num_attention_heads": 2},
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama", "tie_word_embeddings": False},
        "vision_config": CLIP,
    },
    "llava_next": {
        "text_config": {**TEXT, **families.CASES["mistral_untied_window"]},
        "vision_config": CLIP,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": WINDOW},
        "vision_config": PIXTRAL,
    },
    "mistral3 with a ministral3": {
        "text_config": {**TEXT, **families.CASES["ministral3"]},
        "vision_config": PIXTRAL,
    },
    "qwen2_vl": {
        "text_config": {**TEXT, "model_type": "qwen2_vl_text", "rope_parameters": MROPE},
        "vision_config": {**QWEN, "embed_dim": 32, "hidden_size": 64},
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {
        "text_config": {
            **TEXT,
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {**family_cases.YARN_ROPE, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {**QWEN, "hidden_size": 32, "out_hidden_size": 64},
    },
    "qwen3_vl": {
        "text_config": {
            **TEXT,
            "model_type": "qwen3_vl_text",
            "head_dim": 32,
            "rope_parameters": {**MROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        },
        "vision_config": {
            **QWEN,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    },
    "qwen3_5": {
        "text_config": {
            **TEXT,
            "model_type": "qwen3_5_text",
            **family_cases.DELTA_NET,
            "rope_parameters": {
                **MROPE,
                "rope_type": "default",
                "partial_rotary_factor": 0.5,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {**QWEN, "hidden_size": 32, "out_hidden_size": 64},
    },
}
CASES["gemma4"] = {
    "text_config": {**TEXT, **family_cases.CASES["gemma4_small"]},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "audio_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}
CASES["qwen3_5_moe"] = {
    **CASES["qwen3_5"],
    "text_config": {**CASES["qwen3_5"]["text_config"], **families.CASES["qwen3_5_moe"]},
}


def write(folder: Path, case: str, kind: Any = AutoModelForImageTextToText, **config: Any) -> Any:
    config = AutoConfig.for_model(case.split()[0], **CASES[case], **config)
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_decoder_in_a_multimodal_folder_is_taken(
    case: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    theirs = write(tmp_path / "hf", case)
    summary = convert_hf_to_nemo(tmp_path / "hf", tmp_path / "base.nemo")
    assert "\ndropped: " in str(summary)
    assert "tensors of other parts (" in str(summary)
    ours = load_pretrained(
        tmp_path / "base.nemo", layout, num_attributes=3, precision=Precision.fp32
    ).model
    with torch.no_grad():
        hidden = [theirs.model(torch.tensor([states])).last_hidden_state for states in SEQUENCES]
        expected = torch.cat([states[:, -1] for states in hidden]) @ ours.rm_head.weight.T
    actual = infer(ours, [PackedBatch.pack(SEQUENCES)], layout)
    assert actual is not None
    assert expected.std() > 0.02
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(("case", "decoder"), [("gemma3", "Gemma3"), ("qwen3_5", "Qwen3_5")])
def test_reward_model_with_vision_parts_is_exported_as_its_decoder(
    case: str, decoder: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    labels = {"num_labels": 2, "id2label": {0: "one", 1: "other"}, "problem_type": "regression"}
    theirs = write(tmp_path / "hf", case, AutoModelForSequenceClassification, **labels)
    summary = convert_hf_to_nemo(tmp_path / "hf", tmp_path / "rm.nemo")
    assert summary.contract is not None
    assert summary.contract.attributes == ("one", "other")
    export(tmp_path / "rm.nemo", tmp_path / "back", layout)
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "back")
    assert type(back).__name__ == f"{decoder}TextForSequenceClassification"
    tensors = {
        f"model.{name}": tensor for name, tensor in theirs.model.language_model.state_dict().items()
    }
    assert_same(
        tensors_of(tmp_path / "back"), {**tensors, "score.weight": theirs.score.weight.data}
    )


def test_decoder_has_the_same_names_however_the_whole_is_written() -> None:
    for name, expected in (
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("v_head.summary.weight", "v_head.summary.weight"),
        ("visual.merger.mlp.0.bias", None),
        ("model.vision_tower.head.weight", None),
    ):
        assert decoder_name(name) == expected, name
    # Before transformers 5, Qwen2-VL had no text_config.
    text = {**tiny.SHAPE, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    older = {**text, "model_type": "qwen2_vl", "vision_config": {}}
    newer = {"model_type": "qwen2_vl", "text_config": text, "tie_word_embeddings": True}
    actual, expected = (
        find_family("qwen2").to_nemo(decoder_config(config, [])) for config in (older, newer)
    )
    assert actual == expected
    assert actual["rotary_base"] == 1000000.0
    # Without the setting, the stored tensors decide.
    for names, tied in (([], True), (["lm_head.weight"], False)):
        assert decoder_config({"model_type": "llava"}, names)["tie_word_embeddings"] is tied


@pytest.mark.parametrize("case", ["mistral3", "llava_next"])
def test_window_that_is_null_is_no_window(case: str) -> None:
    """A Mistral without the key has the window of transformers' class."""
    mistral = {**TEXT, "model_type": "mistral"}
    for text, expected in (({**mistral, "sliding_window": None}, None), (mistral, 4096)):
        whole = AutoConfig.for_model(case, **{**CASES[case], "text_config": dict(text)})
        assert whole.text_config.sliding_window == expected
        for config in (whole.to_dict(), {**CASES[case], "model_type": case, "text_config": text}):
            nemo = find_family("mistral").to_nemo(decoder_config(config, []))
            assert ModelShape.from_config(nemo).window_size == expected


def test_null_in_a_decoder_s_config_switches_off_what_it_does_by_itself() -> None:
    experts = {"num_experts_per_tok": 3, "num_key_value_heads": 4}
    for decoder, key, more in (
        ("gemma2", "attn_logit_softcapping", {}),
        ("deepseek_v3", "q_lora_rank", experts),
        # As many key heads as query heads.
        ("mistral", "num_key_value_heads", {"num_attention_heads": 16}),
    ):
        text = {**TEXT, **more, "model_type": decoder, key: None}
        inside = decoder_config({"model_type": "llava", "text_config": text}, ["lm_head.weight"])
        to_nemo = find_family(decoder).to_nemo
        alone = to_nemo({**text, "tie_word_embeddings": inside["tie_word_embeddings"]})
        assert to_nemo(inside) == alone
        with_default = {name: value for name, value in text.items() if name != key}
        assert alone != to_nemo(
            decoder_config({"model_type": "llava", "text_config": with_default}, [])
        )


def test_multimodal_config_that_is_not_known_is_refused() -> None:
    text: dict[str, Any] = {"text_config": dict(tiny.SHAPE)}
    assert not is_multimodal({"model_type": "llama", "text_config": None})
    with refusals() as refused:
        for config, pattern in (
            (
                {"model_type": "paligemma", **text},
                "'paligemma', .* attends to a prompt in both directions",
            ),
            (
                {"model_type": "new", **text},
                "got 'new', a model with more parts than .*, or one of gemma3, ",
            ),
            ({"model_type": ["x"], **text}, r"model_type: got \['x'\]"),
            (
                {"model_type": "gemma3", "text_config": 5},
                "text_config: got 5, wanted a mapping",
            ),
        ):
            assert is_multimodal(config)
            with refused(config, pattern):
                decoder_config(config, [])
