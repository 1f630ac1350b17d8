#!/bin/bash
# GRPO in OpenRLHF with a reward model of nemo_aligner, on one node of 8 GPUs.
#
#   nemo-aligner serve rm_model_file=megatron_gpt.nemo server.port=5555 server.refused_reward=-5
#   bash openrlhf_grpo.sh              # OpenRLHF 0.10 and later
#   OLD_FLAGS=1 bash openrlhf_grpo.sh  # 0.9.2 to 0.9.10: flags without sections
#
# The policy and the reward model must have the same chat template, because OpenRLHF sends texts.
# Without refused_reward, a reply that the reward model rejects ends the run. That includes
# texts longer than its seq_length (GET /v1/contract), unless it truncates them: keep
# --data.max_len at most as large.
# A line of prompts.jsonl is {"messages": [{"role": "user", "content": "What is red?"}]}.
set -euo pipefail
URL=${REWARD_URL:-http://127.0.0.1:5555}/get_reward
MODEL=${MODEL:-Qwen/Qwen3-4B-Instruct-2507}

if [ -z "${OLD_FLAGS:-}" ]; then
    python3 -m openrlhf.cli.train_ppo_ray \
        --reward.remote_url "$URL" \
        --actor.model_name_or_path "$MODEL" \
        --actor.num_nodes 1 \
        --actor.num_gpus_per_node 8 \
        --ref.num_nodes 1 \
        --ref.num_gpus_per_node 8 \
        --vllm.num_engines 8 \
        --vllm.tensor_parallel_size 1 \
        --vllm.gpu_memory_utilization 0.5 \
        --vllm.enable_sleep \
        --ds.enable_sleep \
        --train.colocate_all \
        --algo.advantage.estimator group_norm \
        --algo.kl.use_loss \
        --algo.kl.estimator k3 \
        --algo.kl.init_coef 1e-3 \
        --rollout.batch_size 64 \
        --rollout.n_samples_per_prompt 8 \
        --train.batch_size 512 \
        --train.max_epochs 1 \
        --data.prompt_dataset prompts.jsonl \
        --data.input_key messages \
        --data.apply_chat_template \
        --data.max_len 2048 \
        --ds.zero_stage 3 \
        --ds.param_dtype bf16 \
        --ds.packing_samples \
        --actor.adam.lr 1e-6 \
        --actor.gradient_checkpointing_enable \
        --ckpt.output_dir results/openrlhf \
        "$@"
else
    python3 -m openrlhf.cli.train_ppo_ray \
        --remote_rm_url "$URL" \
        --pretrain "$MODEL" \
        --actor_num_nodes 1 \
        --actor_num_gpus_per_node 8 \
        --ref_num_nodes 1 \
        --ref_num_gpus_per_node 8 \
        --vllm_num_engines 8 \
        --vllm_tensor_parallel_size 1 \
        --vllm_gpu_memory_utilization 0.5 \
        --vllm_enable_sleep \
        --deepspeed_enable_sleep \
        --colocate_all_models \
        --advantage_estimator group_norm \
        --use_kl_loss \
        --kl_estimator k3 \
        --init_kl_coef 1e-3 \
        --rollout_batch_size 64 \
        --n_samples_per_prompt 8 \
        --train_batch_size 512 \
        --max_epochs 1 \
        --prompt_data prompts.jsonl \
        --input_key messages \
        --apply_chat_template \
        --max_len 2048 \
        --zero_stage 3 \
        --param_dtype bf16 \
        --packing_samples \
        --actor_learning_rate 1e-6 \
        --gradient_checkpointing \
        --save_path results/openrlhf \
        "$@"
fi
