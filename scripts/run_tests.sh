#!/usr/bin/env bash
# Install what is missing, then check lint, types and imports, and test with a worker on each core:
#   bash scripts/run_tests.sh                        the quick tier: what took up to 3 s
#   bash scripts/run_tests.sh --all                  everything, as CI does
#   bash scripts/run_tests.sh tests/serving -k client      these alone; arguments go to pytest
#   bash scripts/run_tests.sh --all --store-durations      and measure which tier each belongs to
# Tests of several processes take turns, so that what else runs beside them is not starved.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

if [ "${1:-}" = --help ]; then
    sed -n '2,/^set/s/^# //p' scripts/run_tests.sh
    exit
fi
tier=(--quick)
if [ "${1:-}" = --all ]; then
    tier=()
    shift
fi

took() {
    echo "$1: $(($2 / 60)) min $(($2 % 60)) s"
}

use_environment test
SECONDS=0
bash scripts/checks.sh
checked=$SECONDS
# Tests run several processes at once: more threads each would fight for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false
# xdist's own counts are of physical cores, or of cores that this process may not use.
cores="$(python -c 'import os; print(len(os.sched_getaffinity(0)))')"
status=0
python -m pytest -n "$cores" --durations=10 "${tier[@]}" "$@" || status=$?
took "lint, types and imports" "$checked"
took "pytest${*:+ $*}" "$((SECONDS - checked))"
exit "$status"
