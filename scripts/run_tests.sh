#!/usr/bin/env bash
# Install what is missing, then ruff, mypy and pytest; arguments go to pytest:
#   bash scripts/run_tests.sh                    everything
#   bash scripts/run_tests.sh -m "not slow"      the fast part
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment test

# Tests run several processes at once: more threads each would fight for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false

ruff check .
mypy
exec python -m pytest "$@"
