"""Suggestions for misspelt names, and for settings by the names that other trainers give them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Of difflib's ratio: a letter or two of a word, and no other word.
_NEAR = 0.75
# Of whole keys that have the last name in common.
_MOVED = 0.65
# Of whole keys, where nothing else is near.
_MISSPELT = 0.85
_BATCH, _STEPS = "model.global_batch_size", "trainer.rm.max_steps"
_MICRO_BATCH = "model.micro_batch_tokens"
_BASE = "pretrained_checkpoint.restore_from_path"
_DATA = "model.data.data_prefix"
# The last name of a setting in Hugging Face's Trainer, TRL, OpenRLHF, NeMo RL, PEFT or Megatron,
# and the key here.
PEER_NAMES = {
    "learning_rate": "model.optim.lr",
    "weight_decay": "model.optim.weight_decay",
    "l2": "model.optim.weight_decay",
    "adam_beta1": "model.optim.betas",
    "adam_beta2": "model.optim.betas",
    "adam_betas": "model.optim.betas",
    "adam_epsilon": "model.optim.eps",
    "lr_scheduler_type": "model.optim.sched.name",
    "lr_scheduler": "model.optim.sched.name",
    "lr_warmup_iters": "model.optim.sched.warmup_steps",
    "max_grad_norm": "trainer.rm.gradient_clip_val",
    "max_norm": "trainer.rm.gradient_clip_val",
    "clip_grad": "trainer.rm.gradient_clip_val",
    "num_train_epochs": "trainer.rm.max_epochs",
    "max_num_epochs": "trainer.rm.max_epochs",
    "num_epochs": "trainer.rm.max_epochs",
    "max_num_steps": _STEPS,
    "train_iters": _STEPS,
    "eval_steps": "trainer.rm.val_check_interval",
    "val_period": "trainer.rm.val_check_interval",
    "eval_interval": "trainer.rm.val_check_interval",
    "save_steps": "trainer.rm.save_interval",
    "save_period": "trainer.rm.save_interval",
    "batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "train_global_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "per_device_train_batch_size": _MICRO_BATCH,
    "micro_train_batch_size": _MICRO_BATCH,
    "train_micro_batch_size": _MICRO_BATCH,
    "micro_batch_size": _MICRO_BATCH,
    "train_mb_tokens": _MICRO_BATCH,
    "r": "model.lora.rank",
    "dim": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "target_modules": "model.lora.targets",
    "lora_target_modules": "model.lora.targets",
    "max_length": "model.data.seq_length",
    "max_len": "model.data.seq_length",
    "max_seq_length": "model.data.seq_length",
    "max_total_sequence_length": "model.data.seq_length",
    "chat_template": "model.data.template",
    "chat_template_path": "model.data.template",
    "gradient_checkpointing": "model.activations_checkpoint_granularity",
    "activation_checkpointing": "model.activations_checkpoint_granularity",
    "recompute_granularity": "model.activations_checkpoint_granularity",
    "model_name_or_path": _BASE,
    "model_name": _BASE,
    "pretrain": _BASE,
    "dataset": f"{_DATA}.train",
    "dataset_name": f"{_DATA}.train",
    "train_files": f"{_DATA}.train",
    "train_data_path": f"{_DATA}.train",
    "eval_dataset": f"{_DATA}.validation",
    "val_files": f"{_DATA}.validation",
    "val_data_path": f"{_DATA}.validation",
    "output_dir": "exp_manager.explicit_log_dir",
    "save_path": "exp_manager.explicit_log_dir",
    "checkpoint_dir": "exp_manager.explicit_log_dir",
    "resume_from_checkpoint": "exp_manager.resume_if_exists",
    "loss": "model.objective",
    "loss_type": "model.objective",
    "metric_for_best_model": "exp_manager.checkpoint_callback_params.monitor",
    "save_total_limit": "exp_manager.checkpoint_callback_params.save_top_k",
    "keep_top_k": "exp_manager.checkpoint_callback_params.save_top_k",
    "tp": "model.tensor_model_parallel_size",
    "tensor_parallel_size": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "pipeline_parallel_size": "model.pipeline_model_parallel_size",
    "dtype": "trainer.precision",
    "torch_dtype": "trainer.precision",
    "bf16": "trainer.precision",
    "fp16": "trainer.precision",
}


def suggestion(key: str, known: Iterable[str]) -> str | None:
    """The key of ``known`` that ``key`` (``section.name``, or a plain word) was to be.

    A key with the same name in another section that is near, else one with nearly the same name in
    the same part of the settings (what stands before the first dot).
    """
    section, _, name = key.rpartition(".")
    part = key.partition(".")[0] if section else ""
    same_name = [each for each in known if each.rpartition(".")[2] == name]
    in_part = [each for each in known if not section or each.startswith(f"{part}.")]
    moved = [each for each in same_name if each in in_part]
    moved += difflib.get_close_matches(key, same_name, cutoff=_MOVED)
    if moved:
        return moved[0]
    by_name: dict[str, list[str]] = {}
    for each in in_part:
        by_name.setdefault(each.rpartition(".")[2], []).append(each)
    near = difflib.get_close_matches(name, by_name, cutoff=_NEAR)
    candidates = [each for found in near for each in by_name[found]]
    own = [each for each in candidates if each.rpartition(".")[0] == section]
    return next(iter(own or candidates), None)


def suggest_setting(key: str, known: Iterable[str]) -> str | None:
    """Find the setting of ``known`` that ``key`` stands for.

    A near name in the same part of the settings comes first, then another trainer's name for it,
    then the one key of the same name in any part, then a whole key that is near.
    """
    known = list(known)
    name = key.rpartition(".")[2]
    near = suggestion(key, known)
    if near is None and PEER_NAMES.get(name) in known:
        near = PEER_NAMES[name]
    if near is None:
        same_name = [each for each in known if each.rpartition(".")[2] == name and name != "name"]
        near_name = [each for each in known if _ratio(name, each.rpartition(".")[2]) >= _NEAR]
        misspelt = difflib.get_close_matches(key, near_name, n=1, cutoff=_MISSPELT)
        near = next(iter(same_name if len(same_name) == 1 else misspelt), None)
    return near


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()
