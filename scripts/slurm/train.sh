# shellcheck shell=bash
# What the scripts in this folder have in common; they source it.

# train ARGUMENTS...: nemo-aligner train on every task of the job. Of a job whose time is nearly up it
# stops the ranks, which save, and puts the job back into the queue, where it goes on.
#
# Slurm sends SIGUSR1 to this shell (#SBATCH --signal=B:USR1@...), and srun passes on what it is sent.
# A run that has something left to do then ends with 138: the ranks with 0, and the first of them with
# that code, last, as srun ends all with the first that fails.
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
        # The signal ended the first wait.
        code=0
        wait "$step" || code=$?
    fi
    if "$time_is_up" && [ "$code" -eq 138 ]; then
        echo "the time is up, and the job goes back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
