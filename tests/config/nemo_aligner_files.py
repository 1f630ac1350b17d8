"""Keys and values of NeMo-Aligner's settings files, for tests; the files are not copied."""

from __future__ import annotations

from pathlib import Path

_LAUNCH = """
trainer.num_nodes=8 trainer.devices=8 trainer.accelerator=gpu trainer.precision=bf16
model.precision=${trainer.precision} trainer.logger=false
"""
_TRAINER = "trainer.enable_checkpointing=false trainer.use_distributed_sampler=false"
_FOLDER = """
exp_manager.explicit_log_dir=/results exp_manager.exp_dir=null exp_manager.name=megatron_gpt
exp_manager.create_wandb_logger=false exp_manager.wandb_logger_kwargs.project=rm
exp_manager.wandb_logger_kwargs.name=rm_2b exp_manager.resume_if_exists=true
exp_manager.resume_ignore_no_checkpoint=true exp_manager.create_checkpoint_callback=true
"""
_CALLBACK = """
save_top_k=3 always_save_nemo=false save_nemo_on_train_end=true filename=gpt-{step}
model_parallel_size=${multiply:${model.tensor_model_parallel_size},${model.pipeline_model_parallel_size}}
"""
_OPTIM = """
name=distributed_fused_adam bucket_cap_mb=200 overlap_grad_sync=false overlap_param_sync=false
contiguous_grad_buffer=true lr=9e-6 weight_decay=0.1 betas=[0.9,0.98] sched.name=CosineAnnealing
sched.warmup_steps=10 sched.constant_steps=1000 sched.min_lr=9e-7
"""
_MODEL = """
model.reward_model_type=binary_ranking model.regression.num_attributes=1
model.regression.attribute_weights=null model.use_avg_pool=false model.force_head_dtype=bfloat16
model.micro_batch_size=2 model.global_batch_size=64 model.megatron_amp_O2=true
model.forward_micro_batch_size=${.micro_batch_size} model.encoder_seq_length=4096
model.max_position_embeddings=${model.encoder_seq_length} model.seed=1234
"""
_TRAIN = """
trainer.rm.max_epochs=1 trainer.rm.max_steps=-1 trainer.rm.val_check_interval=100
trainer.rm.save_interval=100 trainer.rm.train_random_sampler=true
trainer.rm.val_random_sampler=false trainer.rm.limit_val_batches=1.0
trainer.rm.gradient_clip_val=1.0 trainer.max_time=null trainer.max_epochs=${.rm.max_epochs}
trainer.max_steps=${.rm.max_steps} exp_manager.max_time_per_run=${trainer.max_time}
trainer.gradient_clip_val=${trainer.rm.gradient_clip_val}
exp_manager.resume_from_checkpoint=null pretrained_checkpoint.restore_from_path=null
model.mcore_gpt=true model.share_embeddings_and_output_weights=false
model.regression.merge_attributes=false model.regression.loss_mask_val=-100
model.regression.loss_func=regression model.regression.load_rm_head_weights=false
model.output_sequence=false model.data.data_impl=jsonl model.data.splits_string=null
model.data.seq_length=${model.encoder_seq_length} model.data.skip_warmup=true
model.data.num_workers=0 model.data.reset_position_ids=false model.data.reset_attention_mask=false
model.data.eod_mask_loss=false model.data.index_mapping_dir=null model.data.data_prefix=null
model.overwrite_base_config.data.data_prefix=true
"""
_SERVE = """
inference.port=5555 inference.model_name=reward_model
inference.max_queue_delay_microseconds=2000 inference.strip_sequence_length_to_multiple=null
inference.inference_micro_batch_size=${model.forward_micro_batch_size} rm_model_file=null
model.forward_micro_batch_size=4 model.sequence_parallel=false
model.activations_checkpoint_granularity=null model.activations_checkpoint_method=null
model.reward_standardization.enable=false model.reward_standardization.mean=null
model.reward_standardization.std=null model.regression.merge_attributes=false
model.regression.attribute_weights=null model.global_batch_size=0
"""
_CRITIC = """
trainer.ppo.port=5556 trainer.ppo.combine_rm_and_critic_server=true trainer.ppo.max_steps=10000
trainer.ppo.gradient_clip_val=1.0 trainer.ppo.max_queue_delay_microseconds=2000
trainer.ppo.strip_sequence_length_to_multiple=null trainer.max_epochs=null
trainer.ppo.inference_micro_batch_size=${model.forward_micro_batch_size}
trainer.max_steps=${.ppo.max_steps} trainer.gradient_clip_val=${trainer.ppo.gradient_clip_val}
pretrained_checkpoint.restore_from_path=null model.loss_clip_val=0.2
model.offload_adam_states=false model.output_sequence=true
model.reward_standardization.enable=false model.reward_standardization.mean=null
model.reward_standardization.std=null model.regression.merge_attributes=true
"""
_TP_OVERLAP = "[{optional tp_overlap@model.ub_tp_comm_overlap_cfg: null}]"


def _under(section: str, settings: str) -> list[str]:
    return [f"{section}.{setting}" for setting in settings.split()]


_CALLBACKS = _under("exp_manager.checkpoint_callback_params", _CALLBACK)
_OPTIMS = _under("model.optim", _OPTIM)
_MONITOR = "exp_manager.checkpoint_callback_params.monitor"
_MODE = "exp_manager.checkpoint_callback_params.mode"
SETTINGS = {
    "training_rm.yaml": [
        f"defaults={_TP_OVERLAP}",
        *" ".join((_LAUNCH, _TRAINER, _FOLDER, _MODEL, _TRAIN)).split(),
        *_CALLBACKS,
        *_OPTIMS,
        f"{_MONITOR}=val_loss",
        f"{_MODE}=min",
    ],
    "inference_rm.yaml": [*_LAUNCH.split(), *_SERVE.split()],
    "gpt_ppo_critic.yaml": [
        f"defaults={_TP_OVERLAP}",
        *" ".join((_LAUNCH, _TRAINER, _FOLDER, _MODEL, _CRITIC)).split(),
        *_CALLBACKS,
        *_OPTIMS,
        f"{_MONITOR}=step",
        f"{_MODE}=max",
    ],
}
"""Of each file all keys, as ``key=value``."""


def write_file(folder: Path, name: str) -> Path:
    """Write the settings as YAML, in the sections of NeMo-Aligner's file."""
    lines: list[str] = []
    seen: list[str] = []
    for setting in sorted(SETTINGS[name]):
        key, _, value = setting.partition("=")
        *sections, last = key.split(".")
        for depth, section in enumerate(sections):
            if seen[: depth + 1] != sections[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
                seen = sections[: depth + 1]
        seen = sections
        written = f"'{value}'" if "{step}" in value else value
        lines.append(f"{'  ' * len(sections)}{last}: {written}")
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path
