"""Table of every key of three files of NeMo-Aligner 0.7, and its counterpart here.

They are examples/nlp/gpt/conf/training_rm.yaml, inference_rm.yaml and gpt_ppo_critic.yaml.
``docs/migration/nemo_aligner_keys.md`` shows these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.config.compat import KeyRule
from nemo_aligner.config.serving import ServeConfig, ServeCriticConfig
from nemo_aligner.config.training import TrainConfig

_PRECISIONS = {
    "32": "fp32",
    "32-true": "fp32",
    "16": "fp16",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
}
_NO_STEPS = {"-1": None}


def _same(*keys: str, why: str = "", values: Mapping[str, Any] | None = None) -> list[KeyRule]:
    return [KeyRule(key, why, to=key, values=values or {}) for key in keys]


def _ignored(why: str, *keys: str) -> list[KeyRule]:
    return [KeyRule(key, why) for key in keys]


def _only(value: str, why: str, *keys: str) -> list[KeyRule]:
    return [KeyRule(key, why, only=(value,)) for key in keys]


def _clipping(counts: str) -> list[KeyRule]:
    keys = ("trainer.gradient_clip_val", "model.gradient_clip_val")
    return [KeyRule(key, "it is the one that counts", same_as=counts) for key in keys]


_LAUNCH = [
    KeyRule(
        "defaults",
        "other files are not read; move their settings into this one",
        only=("[{optional tp_overlap@model.ub_tp_comm_overlap_cfg: null}]", "[_self_]", "[]"),
    ),
    *_ignored(
        "the launcher says how many processes there are: --processes, torchrun or srun",
        "trainer.num_nodes",
        "trainer.devices",
    ),
    *_ignored("GPUs are used if there are any", "trainer.accelerator"),
    *_ignored("Lightning's trainer is not used", "trainer.logger", "trainer.enable_checkpointing"),
    *_ignored("Lightning's trainer is not used", "trainer.use_distributed_sampler"),
]
_PRECISION = [
    *_same("trainer.precision", values=_PRECISIONS),
    KeyRule(
        "model.precision",
        "there is one precision",
        same_as="trainer.precision",
        values=_PRECISIONS,
    ),
]
_RUN_FOLDER = [
    *_same("exp_manager.explicit_log_dir"),
    *_only("null", "set exp_manager.explicit_log_dir, the run's folder", "exp_manager.exp_dir"),
    *_ignored(
        "a run is named after its folder; its model is megatron_gpt.nemo", "exp_manager.name"
    ),
    *_same("exp_manager.create_wandb_logger", "exp_manager.wandb_logger_kwargs"),
    *_same("exp_manager.resume_if_exists"),
    *_only(
        "true",
        "a run without a checkpoint starts fresh",
        "exp_manager.resume_ignore_no_checkpoint",
    ),
    *_only("true", "checkpoints are always written", "exp_manager.create_checkpoint_callback"),
    *_ignored(
        "checkpoints are folders step_N, complete for any layout",
        "exp_manager.checkpoint_callback_params.filename",
        "exp_manager.checkpoint_callback_params.model_parallel_size",
    ),
    *_only(
        "false",
        "the archive is written once, at the end of the run or by critic_save",
        "exp_manager.checkpoint_callback_params.always_save_nemo",
    ),
]
_OPTIMIZER = [
    KeyRule(
        "model.optim.name",
        "the optimizer is AdamW, sharded over the ranks",
        only=("distributed_fused_adam", "fused_adam", "adamw", "mcore_distributed_optim"),
    ),
    *_ignored(
        "affects speed only; communication always overlaps with computation",
        "model.optim.bucket_cap_mb",
        "model.optim.overlap_grad_sync",
        "model.optim.overlap_param_sync",
        "model.optim.contiguous_grad_buffer",
    ),
    *_same("model.optim.lr", "model.optim.weight_decay", "model.optim.betas"),
    *_same("model.optim.sched.name", values={"CosineAnnealing": "cosine"}),
    *_same(
        "model.optim.sched.warmup_steps",
        why="the first step has a small rate, not 0",
    ),
    *_same(
        "model.optim.sched.constant_steps",
        why="a run is refused if they leave no step for the decay; NeMo trains it at min_lr",
    ),
    *_same("model.optim.sched.min_lr"),
]
_MODEL = [
    *_only("true", "models are megatron-core's", "model.mcore_gpt"),
    *_ignored("a reward model has no output layer", "model.share_embeddings_and_output_weights"),
    *_ignored("optimizers keep fp32 weights in any case", "model.megatron_amp_O2"),
    *_ignored("the head is fp32", "model.force_head_dtype"),
    *_only(
        "false",
        "its mean is over the whole text; model.head.reads=reply_mean is over the reply",
        "model.use_avg_pool",
    ),
    *_ignored(
        "packs have a size in tokens, model.micro_batch_tokens, which changes no result",
        "model.micro_batch_size",
        "model.forward_micro_batch_size",
    ),
    *_same("model.global_batch_size", "model.seed"),
]
_TRAIN = [
    *_LAUNCH,
    *_PRECISION,
    *_same("trainer.rm.max_epochs"),
    *_same("trainer.rm.max_steps", values=_NO_STEPS),
    *_same(
        "trainer.rm.val_check_interval",
        why="in steps; a fraction of an epoch is refused",
    ),
    *_same("trainer.rm.save_interval", "trainer.rm.gradient_clip_val"),
    *_only("true", "every epoch has its own order", "trainer.rm.train_random_sampler"),
    *_ignored(
        "validation takes every record once, in any order",
        "trainer.rm.val_random_sampler",
        "model.data.validation_drop_last",
    ),
    *_only(
        "1.0",
        "trainer.rm.limit_val_records says how many records of each set",
        "trainer.rm.limit_val_batches",
    ),
    *_same("trainer.max_time"),
    KeyRule("trainer.max_epochs", "it is the one that counts", same_as="trainer.rm.max_epochs"),
    KeyRule(
        "trainer.max_steps",
        "did you mean trainer.rm.max_steps? It is the one that counts",
        same_as="trainer.rm.max_steps",
        values=_NO_STEPS,
    ),
    KeyRule("exp_manager.max_time_per_run", to="trainer.max_time"),
    *_only(
        "null",
        "a run resumes from the newest checkpoint in exp_manager.explicit_log_dir",
        "exp_manager.resume_from_checkpoint",
    ),
    *_RUN_FOLDER,
    *_same(
        "exp_manager.checkpoint_callback_params.monitor",
        why="a name without a set refers to the first validation set",
        values={"val_loss": "loss", "val_acc": "accuracy"},
    ),
    *_same(
        "exp_manager.checkpoint_callback_params.save_top_k",
        "exp_manager.checkpoint_callback_params.mode",
    ),
    *_only(
        "true",
        "the archive is always written at the end",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end",
    ),
    *_same("pretrained_checkpoint.restore_from_path"),
    *_MODEL,
    *_same("model.reward_model_type"),
    KeyRule(
        "model.regression.num_attributes",
        "model.regression.attributes names each of them",
        same_as="model.num_attributes",
    ),
    *_only(
        "false",
        "a model keeps its attributes; servers and clients merge them (shaping.attribute_weights)",
        "model.regression.merge_attributes",
    ),
    *_same(
        "model.regression.attribute_weights",
        why="weights by name ({helpfulness: 1}), not a list",
        values={"null": {}},
    ),
    *_same("model.regression.loss_mask_val"),
    *_only(
        "regression",
        "pairs are model.reward_model_type=binary_ranking; margin_bt and scaled_bt are then "
        "model.objective_kwargs.label_margin=subtract and =scale",
        "model.regression.loss_func",
    ),
    KeyRule(
        "model.regression.load_rm_head_weights",
        to="pretrained_checkpoint.new_head",
        values={"false": True, "true": False},
    ),
    *_only("false", "a text has one reward", "model.output_sequence"),
    *(
        KeyRule(
            key,
            "one length holds in training, evaluation and serving",
            same_as="model.data.seq_length",
        )
        for key in ("model.encoder_seq_length", "model.max_position_embeddings")
    ),
    *_clipping("trainer.rm.gradient_clip_val"),
    *_OPTIMIZER,
    *_same(
        "model.activations_checkpoint_granularity",
        why="NeMo-Aligner's file leaves it out and uses the base model's",
        values={"null": "none"},
    ),
    KeyRule(
        "model.activations_checkpoint_method",
        "for uniform omit model.activations_checkpoint_num_layers: all layers are recomputed",
        only=("null", "block"),
    ),
    *_only("jsonl", "files are JSON lines or tables (docs/data.md)", "model.data.data_impl"),
    *_only(
        "null",
        "nemo-aligner data split writes files for training and validation",
        "model.data.splits_string",
    ),
    *_same(
        "model.data.seq_length",
        why="a longer pair is dropped and counted; NeMo-Aligner uses a later one instead",
    ),
    *_ignored(
        "data is tokenized once, before the first step",
        "model.data.skip_warmup",
        "model.data.num_workers",
    ),
    *_only(
        "false",
        "every text has its own positions and attention",
        "model.data.reset_position_ids",
        "model.data.reset_attention_mask",
        "model.data.eod_mask_loss",
    ),
    KeyRule("model.data.index_mapping_dir", to="model.data.index_dir"),
    KeyRule("model.data.append_eod", to="model.data.add_eos"),
    *_only("false", "texts are read as they are", "model.data.apply_ftfy"),
    *_same("model.data.data_prefix.train", why="files only; weights go into train_weights"),
    *_same("model.data.data_prefix.validation"),
    KeyRule(
        "model.data.data_prefix.validation?*",
        "each is a set of its own, named after its file",
        to="model.data.data_prefix.validation",
        adds=True,
    ),
    *_same("model.data.data_prefix.test", why="measured once, at the end, on the finished model"),
    *_ignored(
        "only shape and scoring contract are taken from the base model",
        "model.overwrite_base_config",
    ),
]
_SERVE = [
    *_LAUNCH,
    KeyRule("trainer.precision", to="precision", values=_PRECISIONS),
    KeyRule("model.precision", "there is one precision", same_as="precision", values=_PRECISIONS),
    KeyRule("inference.port", to="server.port"),
    *_only("reward_model", "the endpoint always has this name", "inference.model_name"),
    *_ignored(
        "waiting rows form calls of up to model.micro_batch_tokens",
        "inference.max_queue_delay_microseconds",
        "inference.inference_micro_batch_size",
        "model.forward_micro_batch_size",
    ),
    *_ignored("nothing is padded", "inference.strip_sequence_length_to_multiple"),
    *_same("rm_model_file", "model.sequence_parallel"),
    *_ignored(
        "it saves memory in the backward pass, and there is none",
        "model.activations_checkpoint_granularity",
        "model.activations_checkpoint_method",
    ),
    KeyRule(
        "model.reward_standardization.enable",
        to="shaping.standardize",
        values={"false": "none", "true": "given"},
    ),
    KeyRule(
        "model.reward_standardization.mean", "a number, or one for each attribute", "shaping.mean"
    ),
    KeyRule(
        "model.reward_standardization.std", "a number, or one for each attribute", "shaping.std"
    ),
    *_only(
        "false",
        "name what is merged in shaping.attribute_weights; NeMo-Aligner's default is the mean",
        "model.regression.merge_attributes",
    ),
    *_only(
        "null",
        "set them by name in shaping.attribute_weights",
        "model.regression.attribute_weights",
    ),
    *_ignored("a server has no steps", "model.global_batch_size"),
]
_CRITIC = [
    *_LAUNCH,
    *_PRECISION,
    KeyRule("trainer.ppo.port", to="server.port"),
    *_same(
        "trainer.ppo.combine_rm_and_critic_server",
        "trainer.ppo.max_steps",
        "trainer.ppo.gradient_clip_val",
    ),
    *_ignored(
        "waiting rows form calls of up to model.micro_batch_tokens",
        "trainer.ppo.max_queue_delay_microseconds",
        "trainer.ppo.inference_micro_batch_size",
    ),
    *_ignored(
        "nothing is padded",
        "trainer.ppo.strip_sequence_length_to_multiple",
        "trainer.ppo.pad_sequence_length_to_multiple",
    ),
    *_ignored("the actor's trainer counts epochs", "trainer.max_epochs"),
    KeyRule("trainer.max_steps", "it is the one that counts", same_as="trainer.ppo.max_steps"),
    *_same("pretrained_checkpoint.restore_from_path"),
    *_RUN_FOLDER,
    *_ignored(
        "critic_save keeps the newest and writes its archive whenever the actor asks",
        "exp_manager.checkpoint_callback_params.monitor",
        "exp_manager.checkpoint_callback_params.save_top_k",
        "exp_manager.checkpoint_callback_params.mode",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end",
    ),
    *_same("model.loss_clip_val", "model.offload_adam_states"),
    *_only("true", "a critic has a value for each token", "model.output_sequence"),
    *_only(
        "false",
        "values and rewards are the models' own; nemo-aligner serve can standardize",
        "model.reward_standardization.enable",
    ),
    *_ignored(
        "nothing is standardized here",
        "model.reward_standardization.mean",
        "model.reward_standardization.std",
    ),
    *_MODEL,
    *_ignored(
        "the archive has the length of texts, the attributes and how to merge them",
        "model.encoder_seq_length",
        "model.max_position_embeddings",
        "model.reward_model_type",
        "model.regression.merge_attributes",
    ),
    *_only(
        "1",
        "several are merged by the archive's attribute_weights; omit this key",
        "model.regression.num_attributes",
    ),
    *_only(
        "null",
        "the archive's scoring contract has them",
        "model.regression.attribute_weights",
    ),
    *_clipping("trainer.ppo.gradient_clip_val"),
    *_OPTIMIZER,
]
RULES: Mapping[type, tuple[KeyRule, ...]] = {
    TrainConfig: tuple(_TRAIN),
    ServeConfig: tuple(_SERVE),
    ServeCriticConfig: tuple(_CRITIC),
}
"""By the settings that a file of NeMo-Aligner is read as."""
FILES = {
    "training_rm.yaml": TrainConfig,
    "inference_rm.yaml": ServeConfig,
    "gpt_ppo_critic.yaml": ServeCriticConfig,
}
