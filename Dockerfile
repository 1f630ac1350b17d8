# GPU image: PyTorch, TransformerEngine and Apex from NVIDIA's base image; megatron-core and the rest
# from pyproject.toml.
#   docker build -t nemo_aligner .
#   docker run --gpus all --shm-size=1g -it nemo_aligner    NCCL needs shared memory for several GPUs
# It runs as the user 10001, not as root: that user needs write access to mounted folders (or
# --user "$(id -u):$(id -g)" --env HOME=/tmp to write as yourself).
#
# 26.01 is the newest whose TransformerEngine (2.11) is one that megatron-core 0.16.1 asks for, and
# its torch (2.10) has varlen attention: one kernel for all texts of a pack, where torch before 2.10
# has no public function. docs/gpu.md has the versions of other images, and where they are from.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.01-py3
FROM ${BASE_IMAGE}

# For a newer base: --build-arg MEGATRON_CORE=0.19.2 --build-arg TRANSFORMER_ENGINE=">=2.9"
ARG MEGATRON_CORE=0.16.1
ARG TRANSFORMER_ENGINE=">=2.9,<2.12"

# NVIDIA's Apex is no PyPI package (the one of that name there is another project): it is built where
# the base image does not bring it; TransformerEngine likewise.
ARG APEX_REF=master
RUN pip show apex > /dev/null 2>&1 || ( \
        git clone --filter=blob:none https://github.com/NVIDIA/apex /opt/apex && \
        git -C /opt/apex checkout ${APEX_REF} && \
        APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-cache-dir --no-build-isolation /opt/apex )
# The versions are in the variable.
# hadolint ignore=DL3013
RUN pip show transformer_engine > /dev/null 2>&1 || \
    pip install --no-cache-dir --no-build-isolation \
        "transformer_engine[pytorch]${TRANSFORMER_ENGINE}"

# Another base may lack what this one was chosen for: better now than in a run.
RUN python -c "import torch.nn.attention.varlen" && \
    python -c "import sys; from importlib.metadata import version; \
from packaging.specifiers import SpecifierSet; found = version('transformer_engine'); \
sys.exit(None if SpecifierSet('${TRANSFORMER_ENGINE}').contains(found, prereleases=True) \
else f'TransformerEngine is {found}, wanted ${TRANSFORMER_ENGINE}')"

WORKDIR /workspace/nemo_aligner
COPY . .

# The server needs no Triton. For gRPC or perf_analyzer (server.triton_port):
# --build-arg EXTRAS=serving,gguf,hub,report,triton, which installs a numpy below 2.
ARG EXTRAS=serving,gguf,hub,report

# The image's torch fits its CUDA and its TransformerEngine: nothing may replace it.
RUN python -c "from importlib.metadata import version; print('torch==' + version('torch'))" \
        > /tmp/constraints.txt && \
    echo "megatron-core==${MEGATRON_CORE}" >> /tmp/constraints.txt && \
    PIP_CONSTRAINT=/tmp/constraints.txt pip install --no-cache-dir -e ".[${EXTRAS}]" && \
    rm /tmp/constraints.txt

# Nothing here needs root. By its number, which is all that Kubernetes compares.
RUN groupadd --gid 10001 aligner && \
    useradd --uid 10001 --gid aligner --create-home aligner && \
    chown aligner:aligner /workspace/nemo_aligner
USER 10001:10001

# The reward server: every protocol, health and metrics. A gateway, if there is one, takes 8000.
EXPOSE 5555 8000
