#!/usr/bin/env bash
# Everything that only a GPU can show, within half an hour, without internet: one JSON and one page.
# docs/gpu.md says what the parts are, and how wheels come to a machine without internet.
#
#   bash scripts/gpu_first_hour.sh                        everything, into first_hour/
#   bash scripts/gpu_first_hour.sh --wheels DIR ...       with the packages of these wheels, which
#                                                         stay out of the machine's own environment
#   bash scripts/gpu_first_hour.sh --device cpu           in miniature, without a GPU
#   bash scripts/gpu_first_hour.sh --help                 all options
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$(command -v python || command -v python3)"
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"

if [ "${1:-}" = --wheels ]; then
    site="$(mktemp -d)"
    echo "unpacking ${2:?a folder of wheels} into $site, which stays"
    "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
        --no-index --no-deps --no-compile --target "$site" "$2"/*.whl
    # Before the machine's own: there may be another version.
    export PYTHONPATH="$repo:$site${PYTHONPATH#"$repo"}"
    shift 2
fi
exec "$python" "$repo/benchmarks/gpu_first_hour.py" "$@"
