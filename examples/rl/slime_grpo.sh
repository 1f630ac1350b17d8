#!/bin/bash
# GRPO in slime with a reward model of nemo_aligner, on one node of 8 GPUs; run it in slime's folder.
#
#   nemo-aligner serve rm_model_file=megatron_gpt.nemo server.port=5555 server.refused_reward=-5
#   ray start --head --num-gpus 8 && bash slime_grpo.sh
#
# A line of prompts.jsonl is {"prompt": [{"role": "user", "content": "What is red?"}]}. The policy
# and the reward model must have the same chat template, because slime sends texts. They end with
# the end of the turn, where the reward is read, so do not pass --rollout-skip-special-tokens.
# Without refused_reward, a reply that the reward model rejects ends the run.
# A second call resumes from the newest checkpoint in results/slime.
set -euo pipefail
URL=${REWARD_URL:-http://127.0.0.1:5555}/remote_rm
MODEL=${MODEL:-/root/Qwen3-4B}
source scripts/models/qwen3-4B.sh  # sets MODEL_ARGS

# Before Blackwell, Megatron requires CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor parallelism. Its
# default dropout is 0.1.
ray job submit --address=http://127.0.0.1:8265 \
    --runtime-env-json='{"env_vars": {
        "PYTHONPATH": "/root/Megatron-LM/",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1"
    }}' \
    -- python3 train.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node 8 \
    --colocate \
    "${MODEL_ARGS[@]}" \
    --hf-checkpoint "$MODEL" \
    --ref-load "${MODEL}_torch_dist" \
    --load results/slime \
    --save results/slime \
    --save-interval 20 \
    --rm-type remote_rm \
    --rm-url "$URL" \
    --prompt-data prompts.jsonl \
    --input-key prompt \
    --apply-chat-template \
    --rollout-shuffle \
    --num-rollout 1000 \
    --rollout-batch-size 32 \
    --n-samples-per-prompt 8 \
    --rollout-max-response-len 1024 \
    --rollout-temperature 1 \
    --global-batch-size 256 \
    --advantage-estimator grpo \
    --use-kl-loss \
    --kl-loss-coef 0.001 \
    --kl-loss-type low_var_kl \
    --eps-clip 0.2 \
    --optimizer adam \
    --lr 1e-6 \
    --lr-decay-style constant \
    --tensor-model-parallel-size 2 \
    --sequence-parallel \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 9216 \
    --attention-dropout 0 \
    --hidden-dropout 0 \
    --rollout-num-gpus-per-engine 2 \
    "$@"
