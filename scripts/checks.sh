#!/usr/bin/env bash
# Check lint, types and import rules, as run_tests.sh does; their settings are in pyproject.toml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
use_environment test
ruff check .
mypy
lint-imports --no-logo
