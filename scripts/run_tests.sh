#!/usr/bin/env bash
# Install missing dependencies, check lint, types and imports, and run the tests:
#   bash scripts/run_tests.sh                          the quick tier: tests of up to 2 s
#   bash scripts/run_tests.sh --all                    all tests, as CI does
#   bash scripts/run_tests.sh tests/serving -k client  some tests; arguments go to pytest
#   bash scripts/run_tests.sh --all --store-durations  all tests, and store their durations anew
# Tests that start several processes take turns, so that other tests are not starved.
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
# Tests run several processes at once, so one thread per process keeps all cores busy.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false
# xdist's own counts ignore hyperthreads, or include cores that this process may not use.
cores="$(python -c 'import os; print(len(os.sched_getaffinity(0)))')"
# One worker more than cores: tests of servers and timers mostly wait.
status=0
python -m pytest -n "$((cores + 1))" --durations=10 "${tier[@]}" "$@" || status=$?
took "lint, types and imports" "$checked"
took "pytest${*:+ $*}" "$((SECONDS - checked))"
exit "$status"
