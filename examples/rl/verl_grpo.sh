#!/bin/bash
# GRPO in verl 0.8 and later with the reward of verl_reward.py, on one node of 8 GPUs.
#
#   nemo-aligner serve rm_model_file=megatron_gpt.nemo server.port=5555
#   REWARD_URL=http://127.0.0.1:5555 bash verl_grpo.sh
#
# A row of prompts.parquet has `data_source`, `prompt` (messages), `reward_model` with
# `ground_truth` (unused), and `extra_info` with a copy of `prompt`. verl's environment needs this
# package without its dependencies: pip install --no-deps --ignore-requires-python PATH.
# In verl before 0.8 the last two settings begin with custom_reward_function.
set -euo pipefail

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=prompts.parquet \
    data.val_files=heldout.parquet \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.return_raw_chat=true \
    actor_rollout_ref.model.path=Qwen/Qwen3-4B-Instruct-2507 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.total_epochs=1 \
    trainer.save_freq=50 \
    trainer.test_freq=10 \
    trainer.project_name=nemo_aligner \
    trainer.experiment_name=grpo \
    trainer.logger='["console"]' \
    reward.custom_reward_function.path="$(dirname "$0")/verl_reward.py" \
    +reward.custom_reward_function.reward_kwargs.refused_reward=-5.0 \
    "$@"
