#!/usr/bin/env bash
# Install what is missing, then ruff, mypy and pytest with a worker on each core; arguments go to
# pytest:
#   bash scripts/run_tests.sh                    everything
#   bash scripts/run_tests.sh -m "not slow"      the fast part
#   bash scripts/run_tests.sh -n 0               in one process
#   bash scripts/run_tests.sh --mutations 3000   fuzz ten times as much
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment test

# Tests run several processes at once: more threads each would fight for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false

took() {
    echo "$1: $(($2 / 60)) min $(($2 % 60)) s"
}

SECONDS=0
ruff check .
mypy
checked=$SECONDS
# xdist's own counts are of physical cores, or of cores that this process may not use.
cores="$(python -c 'import os; print(len(os.sched_getaffinity(0)))')"
status=0
python -m pytest -n "$cores" --dist worksteal "$@" || status=$?
took "ruff and mypy" "$checked"
took "pytest${*:+ $*}" "$((SECONDS - checked))"
exit "$status"
