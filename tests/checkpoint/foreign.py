"""Checkpoints as NeMo, NeMo-Aligner, Megatron-LM and Megatron-Bridge lay them out, tiny.

The tensors are written by megatron-core itself, under the keys that each of them uses; the settings
are written by hand, after their public sources.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import tarfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from tests.harness import tiny

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Changes that make the settings below those of a Gemma, for NeMo 1 and for Megatron-Bridge.
NEMO1_GEMMA = {
    "activation": "geglu",
    "openai_gelu": True,
    "apply_embedding_scaling": True,
    "layernorm_zero_centered_gamma": True,
    "share_embeddings_and_output_weights": True,
    "scale_positional_embedding": False,
}
BRIDGE_GEMMA = {
    "_target_": "megatron.bridge.models.gemma.gemma_provider.GemmaModelProvider2B",
    "activation_func": {"_target_": "megatron.core.activations.fast_gelu", "_call_": False},
    "layernorm_zero_centered_gamma": True,
    "share_embeddings_and_output_weights": True,
    "rope_scaling": False,
    "rope_scaling_factor": 1.0,
    "scale_factor": None,
}
PADDED = 384  # rows of the embedding; the tokenizer has only tiny.SHAPE["vocab_size"] tokens
HEX = "0123456789abcdef" * 2
ITERATION = "iter_0000123"  # folder of a step in Megatron-LM's run
LAYERS = tiny.SHAPE["num_hidden_layers"]
Tensors = dict[str, Tensor]
# Writes a checkpoint with these tensors, tokenizer and changed settings; returns its path.
Writer = Callable[..., Path]


def tensors_of(path: Path) -> Tensors:
    """Read an archive's unsharded tensors by their names without prefix; change norms from 1."""
    from megatron.core import dist_checkpointing

    from nemo_aligner.checkpoint.nemo.archive import open_nemo

    with open_nemo(path) as folder:
        plain = dist_checkpointing.load_plain_tensors(str(folder.weights))
    tensors = {key.removeprefix("model."): tensor for key, tensor in plain.items()}
    generator = torch.Generator().manual_seed(3)
    for key, tensor in tensors.items():
        if "norm" in key:
            tensor.uniform_(0.5, 1.5, generator=generator)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if key in tensors:
            rows = tensors[key]
            padding = torch.full((PADDED - len(rows), rows.shape[1]), 7.0)
            tensors[key] = torch.cat([rows, padding])
    return tensors


def save(folder: Path, tensors: Tensors, prefix: str, **common: Any) -> None:
    """Save ``tensors`` with megatron-core under ``prefix``, with entries of real checkpoints."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    folder.mkdir(parents=True)
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(prefix + key, tensor)
        for key, tensor in tensors.items()
    }
    opaque = f"{prefix}decoder.layers.mlp.linear_fc1._extra_state"
    state["opaque"] = ShardedObject(opaque, io.BytesIO(b"opaque"), (1,), (0,))
    state["moment"] = ShardedTensor.from_rank_offsets(
        f"optimizer.state.exp_avg.{prefix}decoder.final_layernorm.weight", torch.zeros(4)
    )
    dist_checkpointing.save({**state, **common}, str(folder))


def per_layer(tensors: Tensors) -> Tensors:
    """Return the tensors with separate names for each layer, like newer Megatron versions."""
    split = {}
    for key, tensor in tensors.items():
        if key.startswith("decoder.layers."):
            for layer in range(LAYERS):
                name = key.replace("decoder.layers.", f"decoder.layers.{layer}.")
                split[name] = tensor[layer].clone()
        else:
            split[key] = tensor
    return split


def nemo1_config(**changes: Any) -> dict[str, Any]:
    """Build NeMo 1's ``model_config.yaml``: without ``vocab_size``, and with keys of training."""
    return {
        "mcore_gpt": True,
        "micro_batch_size": 1,
        "tensor_model_parallel_size": 2,
        "encoder_seq_length": 256,
        "max_position_embeddings": 256,
        "num_layers": LAYERS,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": None,
        "normalization": "rmsnorm",
        "layernorm_epsilon": 1e-5,
        "activation": "fast-swiglu",
        "bias": False,
        "make_vocab_size_divisible_by": 128,
        "position_embedding_type": "rope",
        "rotary_percentage": 1.0,
        "rotary_base": 10000.0,
        "scale_positional_embedding": True,
        "scale_factor": 4,
        "share_embeddings_and_output_weights": False,
        "tokenizer": {"library": "huggingface", "type": f"nemo:{HEX}_tokenizer"},
        "optim": {"name": "distributed_fused_adam", "lr": 1e-6},
        **changes,
    }


def nemo1(folder: Path, tensors: Tensors, tokenizer: Path, **changes: Any) -> Path:
    """Write an unpacked archive of NeMo 1."""
    save(folder / "model_weights", tensors, "model.")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(nemo1_config(**changes)))
    shutil.copytree(tokenizer, folder / f"{HEX}_tokenizer")
    return folder


def nemo1_tar_gz(folder: Path, tensors: Tensors, tokenizer: Path, **changes: Any) -> Path:
    return pack(nemo1(folder, tensors, tokenizer, **changes), folder.with_suffix(".nemo"), "w:gz")


def pack(folder: Path, path: Path, mode: str) -> Path:
    """Pack a folder as an archive like NeMo; ``mode`` is ``w`` or ``w:gz``."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        archive.add(folder, ".")
    return path


def function(name: str) -> dict[str, Any]:
    return {"_target_": name, "_call_": False}


def provider(**changes: Any) -> dict[str, Any]:
    """Build the fields of ``TransformerConfig`` and its subclasses that NeMo 2 and Bridge write."""
    return {
        "activation_func": function("torch.nn.functional.silu"),
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "attention_dropout": 0.0,
        "ffn_hidden_size": 128,
        "gated_linear_unit": True,
        "hidden_size": 64,
        "high_freq_factor": 4.0,
        "kv_channels": None,
        "layernorm_epsilon": 1e-5,
        "layernorm_zero_centered_gamma": False,
        "low_freq_factor": 1.0,
        "make_vocab_size_divisible_by": 128,
        "multi_latent_attention": False,
        "normalization": "RMSNorm",
        "num_attention_heads": 4,
        "num_layers": LAYERS,
        "num_moe_experts": None,
        "num_query_groups": 2,
        "old_context_len": 8192,
        "params_dtype": function("torch.bfloat16"),
        "position_embedding_type": "rope",
        "qk_layernorm": False,
        "rotary_base": 10000.0,
        "rotary_interleaved": False,
        "rotary_percent": 1.0,
        "scale_factor": 4.0,
        "seq_len_interpolation_factor": None,
        "seq_length": 256,
        "share_embeddings_and_output_weights": False,
        "softmax_type": "vanilla",
        "window_size": None,
        **changes,
    }


def nemo2_settings(**changes: Any) -> str:
    """Build ``context/model.yaml`` with the names of NeMo 2's ``io_dump``."""
    model = {
        "_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel",
        "config": {
            "_target_": "nemo.collections.llm.gpt.model.llama.Llama31Config8B",
            **provider(**changes),
        },
        "model_transform": None,
        "optim": {"_target_": "nemo.lightning.pytorch.optim.megatron.MegatronOptimizerModule"},
        "tokenizer": {
            "_target_": "nemo...AutoTokenizer",
            "pretrained_model_name": "./nemo_tokenizer",
        },
    }
    return yaml.safe_dump(model)


def nemo2(folder: Path, tensors: Tensors, tokenizer: Path, **changes: Any) -> Path:
    save(folder / "weights", tensors, "module.")
    (folder / "context").mkdir()
    (folder / "context" / "model.yaml").write_text(nemo2_settings(**changes))
    shutil.copytree(tokenizer, folder / "context" / "nemo_tokenizer")
    return folder


def bridge(folder: Path, tensors: Tensors, tokenizer: Path, **changes: Any) -> Path:
    """Write the folder of a run of Megatron-Bridge; return its ``iter_0000010``."""
    inner = folder / "iter_0000010"
    save(inner, per_layer(tensors), "")
    target = "megatron.bridge.models.llama.llama_provider.Llama31ModelProvider"
    model = {"_target_": target, **provider(vocab_size=tiny.SHAPE["vocab_size"], **changes)}
    run = {"model": model, "rng": {"seed": 1234}, "peft": None}
    (inner / "run_config.yaml").write_text(yaml.safe_dump(run))
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    shutil.copytree(tokenizer, inner / "tokenizer")
    return inner


def bridge_run(folder: Path, tensors: Tensors, tokenizer: Path, **changes: Any) -> Path:
    return bridge(folder, tensors, tokenizer, **changes).parent


def megatron_lm(
    folder: Path, tensors: Tensors, tokenizer: Path, among_shards: bool = False, **changes: Any
) -> Path:
    """A run's folder of Megatron-LM, of step 123.

    Its arguments are in ``common.pt``, or ``among_shards`` as since megatron-core 0.17.
    """
    arguments = {
        "num_layers": LAYERS,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 16,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "apply_layernorm_1p": False,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "rotary_interleaved": False,
        "use_rope_scaling": True,
        "rope_scaling_factor": 4.0,
        "seq_length": 256,
        "max_position_embeddings": 256,
        "untie_embeddings_and_output_weights": True,
        "padded_vocab_size": PADDED,
        "make_vocab_size_divisible_by": 128,
        "params_dtype": torch.bfloat16,
        **changes,
    }
    inner = folder / ITERATION
    common = {"args": Namespace(**arguments), "iteration": 123, "checkpoint_version": 3.0}
    save(inner, tensors, "", **common)
    if not among_shards:
        torch.save(common, inner / "common.pt")
    elif (inner / "common.pt").exists():
        put_common_among_shards(inner, common)
    (folder / "latest_checkpointed_iteration.txt").write_text("123\n")
    shutil.copytree(tokenizer, folder / "tokenizer")
    return folder


def put_common_among_shards(folder: Path, common: Any) -> None:
    """Store ``common`` like a shard, as megatron-core does since version 0.17."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    from nemo_aligner.checkpoint.safe_load import read_metadata

    piece, key = folder / "__9_0.distcp", "common_state/shard_0_1"
    stored = io.BytesIO()
    torch.save([common], stored)
    prefix, length = b"another piece", len(stored.getvalue())
    piece.write_bytes(prefix + stored.getvalue() + b"the next one")
    (folder / "common.pt").unlink(missing_ok=True)
    metadata = read_metadata(folder)
    info = type(next(iter(metadata.storage_data.values())))
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(key)] = info(piece.name, len(prefix), length)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def write_zarr(folder: Path, tensors: Tensors, prefix: str = "model.") -> None:
    """As megatron-core 0.15 still did: an array of zarr's version 2 for each tensor.

    Its chunks are of one layer's size, and not compressed.
    """
    folder.mkdir(parents=True)
    for key, tensor in tensors.items():
        path = folder / (prefix + key)
        path.mkdir()
        chunks = list(tensor.shape)
        if key.startswith("decoder.layers."):
            chunks[0] = 1
        dtype = {torch.float32: "<f4", torch.bfloat16: "bfloat16"}[tensor.dtype]
        header = {
            "zarr_format": 2,
            "shape": list(tensor.shape),
            "chunks": chunks,
            "dtype": dtype,
            "compressor": None,
            "fill_value": None,
            "filters": None,
            "order": "C",
        }
        (path / ".zarray").write_text(json.dumps(header))
        for index, piece in enumerate(tensor.split(chunks[0])):
            name = ".".join([str(index), *["0"] * (tensor.ndim - 1)])
            (path / name).write_bytes(piece.contiguous().view(torch.uint8).numpy().tobytes())
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1})
    )


def zarr_folder(folder: Path, tensors: Tensors, tokenizer: Path, **changes: Any) -> Path:
    nemo1(folder, tensors, tokenizer, **changes)
    shutil.rmtree(folder / "model_weights")
    write_zarr(folder / "model_weights", tensors)
    return folder
