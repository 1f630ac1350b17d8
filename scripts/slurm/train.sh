# shellcheck shell=bash
# Sourced by the sbatch scripts in this folder.

# train ARGUMENTS...: run nemo-aligner train on every task of the job. Shortly before the job's time
# limit it stops the ranks, which save, and requeues the job, which then resumes.
#
# Slurm sends SIGUSR1 to this shell (#SBATCH --signal=B:USR1@...), and srun forwards it to the ranks. A
# run that is not finished then ends with 138. Only the first rank returns that code, after all others
# have returned 0, because srun kills all tasks when one fails.
train() {
    cd "$SLURM_SUBMIT_DIR" || return
    if [ -f .venv/bin/activate ]; then
        # shellcheck disable=SC1091
        source .venv/bin/activate
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
    local step code=0 time_is_up=false
    # srun tells each task its rank, and the ranks read it: SLURM_PROCID and others.
    srun --kill-on-bad-exit=1 nemo-aligner train "$@" &
    step=$!
    trap 'time_is_up=true; kill -USR1 "$step" || true' USR1
    wait "$step" || code=$?
    if "$time_is_up"; then
        # The signal interrupted the first wait.
        code=0
        wait "$step" || code=$?
    fi
    if "$time_is_up" && [ "$code" -eq 138 ]; then
        echo "the time is up, and the job goes back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
