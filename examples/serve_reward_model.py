"""Serve a reward model over HTTP and with NVIDIA Triton: ``conf/serve_reward_model.yaml``.

    python examples/serve_reward_model.py rm_model_file=megatron_gpt.nemo server.port=5555

The HTTP server answers every protocol. Triton answers on the ports 5600 (HTTP), 5601 (gRPC) and
5602 (metrics); it needs the extra ``triton``, and ``server.triton_port=null`` turns it off. With
``--config FILE``, the file decides about Triton. The code is in ``nemo_aligner/serving/run.py``.
"""

from __future__ import annotations

import sys

try:
    from nemo_aligner.cli.main import main
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: activate its environment (source .venv/bin/activate) or pip install -e .")

if __name__ == "__main__":
    # Put these settings first, so that a --config of the command line replaces the file.
    sys.exit(main(["serve", "--config", "serve_reward_model", *sys.argv[1:]]))
