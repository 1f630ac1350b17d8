"""Rotary positions, as ``config.json`` and as ``model_config.yaml`` describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.errors import CheckpointError, shown
from nemo_aligner.models.shape import ModelShape


def rope_to_nemo(config: Config, rotated: float | None) -> dict[str, Any]:
    """NeMo's keys; transformers 5 writes ``rope_parameters``, older ones several keys.

    ``rotated`` is the part of a head's channels that a family rotates unless the config says
    otherwise; None is a family that rotates all.

    Raises:
        CheckpointError: it is rotated in a way that is not supported.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"rope_parameters: got {shown(rope)}, wanted keys and values")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    beside = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    inside = {key: value for key, value in rope.items() if value is not None}
    scaling = HfSettings({**beside, **inside})
    if rotated is None:
        scaling.only("partial_rotary_factor", None, 1.0)
    rotary = {
        "position_embedding_type": "rope",
        "rotary_base": scaling.number("rope_theta", 10000.0),
        "rotary_percentage": scaling.number("partial_rotary_factor", rotated or 1.0),
        "scale_positional_embedding": kind == "llama3",
    }
    if kind == "default":
        return rotary
    if kind == "linear":
        return {**rotary, "seq_len_interpolation_factor": scaling.number("factor")}
    if kind == "llama3":
        return {
            **rotary,
            "scale_factor": scaling.number("factor"),
            "low_freq_factor": scaling.number("low_freq_factor"),
            "high_freq_factor": scaling.number("high_freq_factor"),
            "old_context_len": scaling.number("original_max_position_embeddings"),
        }
    raise CheckpointError(
        f"rope_type: got {shown(kind)}, which is not supported; wanted 'default' or 'linear' or "
        "'llama3'"
    )


def rope_to_hf(shape: ModelShape) -> dict[str, Any]:
    """The keys of ``config.json``, for transformers 4 and 5.

    Raises:
        CheckpointError: Hugging Face has no name for such a rotation.
    """
    rope: dict[str, Any] = {"rope_theta": shape.rotary_base, "rope_type": "default"}
    linear, llama3 = shape.seq_len_interpolation_factor, shape.rope_scaling
    if linear is not None and llama3 is not None:
        raise CheckpointError(
            f"model_config.yaml: got seq_len_interpolation_factor={linear} and "
            "scale_positional_embedding=True, wanted one of them: Hugging Face has no name for both"
        )
    if linear is not None:
        rope |= {"rope_type": "linear", "factor": linear}
    if llama3 is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": llama3.factor,
            "low_freq_factor": llama3.low_freq_factor,
            "high_freq_factor": llama3.high_freq_factor,
            "original_max_position_embeddings": llama3.old_context_len,
        }
    # transformers 5 reads the first, 4 the other two.
    scaling = None if rope["rope_type"] == "default" else rope
    return {"rope_parameters": rope, "rope_theta": shape.rotary_base, "rope_scaling": scaling}
