#!/usr/bin/env bash
# All measurements that need a GPU, within half an hour and without internet: one JSON file and one
# page. docs/gpu.md describes the parts; scripts/gpu_wheels.sh downloads the wheels they need.
#
#   bash scripts/gpu_first_hour.sh                        all parts, into first_hour/
#   bash scripts/gpu_first_hour.sh --minutes 9            the most important parts
#   bash scripts/gpu_first_hour.sh --wheels DIR ...       with the packages of these wheels, which
#                                                         are not installed into the environment
#   bash scripts/gpu_first_hour.sh --device cpu           a tiny rehearsal without a GPU
#   bash scripts/gpu_first_hour.sh --help                 all options
set -euo pipefail
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$(command -v python3 || command -v python)"

packages=""
if [ "${1:-}" = --wheels ]; then
    wheels="${2:?--wheels: wanted a folder}"
    packages="$(mktemp -d)"
    echo "unpacking $wheels into $packages, which is not deleted"
    # A wheel is a zip archive of its packages, so this works without pip.
    for wheel in "$wheels"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$packages"
    done
    # Python reads the .pth files of installed packages, but not those of a folder in PYTHONPATH.
    echo "import site; site.addsitedir('$packages')" >"$packages/sitecustomize.py"
    shift 2
fi
# The wheels take precedence over installed packages, which may have other versions.
export PYTHONPATH="$repo${packages:+:$packages}${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$repo/benchmarks/gpu_first_hour.py" "$@"
