# shellcheck shell=bash
# Sourced by the sbatch scripts in this folder. Variables that a job reads:
#   CONTAINER_IMAGE   run in this image: a file *.sif by Apptainer, any other by Pyxis (Enroot)
#   CONTAINER_MOUNTS  folders that the container sees, separated by commas; the folder of sbatch is
#                     always among them
#   OMP_NUM_THREADS   CPU threads of each task; without it, its --cpus-per-task
#   NCCL_*, GLOO_*    passed on unchanged (docs/clusters.md)

# launch ARGUMENTS...: start `nemo-aligner ARGUMENTS` as every task of the job. srun tells each task
# its rank, and the ranks read it: SLURM_PROCID and others.
launch() {
    # Since Slurm 22.05 srun does not take over sbatch's --cpus-per-task: each task would get 1 CPU.
    export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SRUN_CPUS_PER_TASK}"
    local options=(--kill-on-bad-exit=1) program=(nemo-aligner)
    local mounts="$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
    # In a container the image's packages count, not those of ~/.local, which may be mounted.
    if [ -n "${CONTAINER_IMAGE:-}" ]; then
        export PYTHONNOUSERSITE=1
    fi
    case "${CONTAINER_IMAGE:-}" in
        "")
            if [ -f .venv/bin/activate ]; then
                # shellcheck disable=SC1091
                source .venv/bin/activate
            fi
            ;;
        *.sif)
            program=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$CONTAINER_IMAGE" nemo-aligner)
            ;;
        *)
            # Pyxis wants FROM:TO for every folder.
            mounts="$(tr ',' '\n' <<<"$mounts" | sed -E 's/^[^:]+$/&:&/' | paste -sd ,)"
            options+=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts"
                --container-workdir="$PWD")
            ;;
    esac
    exec srun "${options[@]}" "${program[@]}" "$@"
}

# train ARGUMENTS...: train on every task of the job. Shortly before the job's time limit it stops the
# ranks, which save, and requeues the job, which then resumes.
#
# Slurm sends SIGUSR1 to this shell (#SBATCH --signal=B:USR1@...), and srun forwards it to the ranks. A
# run that is not finished then ends with 138. Only the first rank returns that code, after all others
# have returned 0, because srun kills all tasks when one fails.
train() {
    cd "$SLURM_SUBMIT_DIR" || return
    local step code=0 time_is_up=false
    (launch train "$@") &
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

# serve ARGUMENTS...: serve on every task of the job, until it is cancelled or its time is up. The
# first task answers HTTP; the other ranks compute their parts of the model.
serve() {
    cd "$SLURM_SUBMIT_DIR" || return
    local first
    first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
    echo "the server will answer at http://$first:5555 once it prints that it is ready"
    launch serve "$@"
}
