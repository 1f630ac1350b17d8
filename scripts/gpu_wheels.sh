#!/usr/bin/env bash
# Downloads the wheels that scripts/gpu_first_hour.sh needs on a machine without internet, for
# Python 3.12 on x86-64 Linux. docs/gpu.md lists the packages that the machine must already have.
#
#   bash scripts/gpu_wheels.sh [FOLDER]                  default: wheels/
#   bash scripts/gpu_wheels.sh FOLDER --flash-attn-4     also flash-attn-4 for CUDA 13 (113 MiB)
#
# Any Python with pip can run this. The folder can then be copied, and passed to
# scripts/gpu_first_hour.sh --wheels FOLDER.
set -euo pipefail
folder="${1:-wheels}"
if [[ $folder == -* ]]; then
    echo "$folder: wanted a folder first, as in: bash scripts/gpu_wheels.sh wheels $folder" >&2
    exit 2
fi
python="$(command -v python3 || command -v python)"
# Some ways of copying files to a machine reject more than this.
limit_mib=45

# megatron-core, and the packages that megatron-core and our settings import.
engine=(megatron-core==0.16.1 omegaconf==2.3.0 psutil argcomplete lightning)
# What tests/conftest.py needs next to pytest.
tests=(pytest-xdist execnet)
# Fused kernels, and TRL for the comparison of training; TRL needs datasets, which needs the rest.
comparisons=(
    liger-kernel==0.8.5 fla-core==0.6.0 einops trl==1.16.0
    'datasets>=4,<5' multiprocess dill requests urllib3 charset-normalizer
)
if [ "${2:-}" = --flash-attn-4 ]; then
    # flash-attn-4 (model.attention_kernels=flash_attn_4) and the compiler of its kernels.
    comparisons+=(
        flash-attn-4==4.0.0b36 quack-kernels==0.6.5 torch-c-dlpack-ext==0.1.5
        nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1
        nvidia-cutlass-dsl-libs-core==4.8.1 nvidia-cutlass-dsl-libs-cu13==4.8.1
        apache-tvm-ffi==0.1.15.post2 protobuf
    )
    limit_mib=160
fi

# The HTTP server and client, which the parts "tests" and "invariance" import. pip also downloads
# their dependencies.
serving=('fastapi>=0.115,<1' 'uvicorn>=0.54,<0.55' httptools 'pydantic>=2.8,<3' 'prometheus-client>=0.20,<1' 'aiohttp>=3.12,<4')

mkdir -p "$folder"
download() {
    "$python" -m pip download --quiet --disable-pip-version-check --dest "$folder" \
        --only-binary=:all: --python-version 3.12 --implementation cp \
        --abi cp312 --abi abi3 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any "$@"
}
download --no-deps "${engine[@]}" "${tests[@]}" "${comparisons[@]}"
download "${serving[@]}"
# antlr4, which omegaconf needs, has no wheel on PyPI, so build one.
"$python" -m pip wheel --quiet --disable-pip-version-check --wheel-dir "$folder" --no-deps \
    antlr4-python3-runtime==4.9.3

size="$(du -sk "$folder" | cut -f1)"
ls -l "$folder"
echo "$((size / 1024)) MiB in $folder"
if ((size > limit_mib * 1024)); then
    echo "$folder: more than $limit_mib MiB; remove older versions from it" >&2
    exit 1
fi
