# GPU image: PyTorch, TransformerEngine and Apex from NVIDIA's base image; megatron-core and the rest
# from pyproject.toml.
#   docker build -t nemo_aligner .
#   docker run --gpus all --shm-size=1g -it nemo_aligner
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:25.09-py3
FROM ${BASE_IMAGE}

# NVIDIA's Apex is no PyPI package (the one of that name there is another project): it is built where
# the base image does not bring it; TransformerEngine likewise.
ARG APEX_REF=master
RUN pip show apex > /dev/null 2>&1 || ( \
        git clone --filter=blob:none https://github.com/NVIDIA/apex /opt/apex && \
        git -C /opt/apex checkout ${APEX_REF} && \
        APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-cache-dir --no-build-isolation /opt/apex )
RUN pip show transformer_engine > /dev/null 2>&1 || \
    pip install --no-cache-dir --no-build-isolation "transformer_engine[pytorch]"

WORKDIR /workspace/nemo_aligner
COPY . .

# The image's torch fits its CUDA and its TransformerEngine: nothing may replace it.
RUN python -c "from importlib.metadata import version; print('torch==' + version('torch'))" \
        > /tmp/constraints.txt && \
    PIP_CONSTRAINT=/tmp/constraints.txt pip install --no-cache-dir -e ".[serving,gateway,gguf]" && \
    rm /tmp/constraints.txt

# The reward server, and the gateway
EXPOSE 5555 8000
