#!/usr/bin/env bash
# Everything that only a GPU can show, within half an hour, without internet: one JSON and one page.
# docs/gpu.md says what the parts are; scripts/gpu_wheels.sh gathers what such a machine needs.
#
#   bash scripts/gpu_first_hour.sh                        everything, into first_hour/
#   bash scripts/gpu_first_hour.sh --minutes 9            the same, what matters most first
#   bash scripts/gpu_first_hour.sh --wheels DIR ...       with the packages of these wheels, which
#                                                         stay out of the machine's own environment
#   bash scripts/gpu_first_hour.sh --device cpu           in miniature, without a GPU
#   bash scripts/gpu_first_hour.sh --help                 all options
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$(command -v python3 || command -v python)"

packages=""
if [ "${1:-}" = --wheels ]; then
    wheels="${2:?--wheels: wanted a folder}"
    packages="$(mktemp -d)"
    echo "unpacking $wheels into $packages, which stays"
    # A wheel is an archive with its packages on top, so pip, which may be missing, is not needed.
    for wheel in "$wheels"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$packages"
    done
    shift 2
fi
# The wheels come before the machine's own packages, of which there may be other versions.
export PYTHONPATH="$repo${packages:+:$packages}${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$repo/benchmarks/gpu_first_hour.py" "$@"
