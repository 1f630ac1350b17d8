"""Serve a reward model over HTTP and with NVIDIA Triton: ``nemo-aligner serve`` with Triton on.

    python examples/serve_reward_model.py rm_model_file=megatron_gpt.nemo server.port=5555

The HTTP server answers every protocol. Triton answers on the ports 5600 (HTTP), 5601 (gRPC) and
5602 (metrics); it needs the extra ``triton``, and ``server.triton_port=null`` turns it off. The
code is in ``nemo_aligner/serving/run.py``.
"""

from __future__ import annotations

import sys

try:
    from nemo_aligner.cli.main import main
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: activate its environment (source .venv/bin/activate) or pip install -e .")

if __name__ == "__main__":
    # Put this setting first, so that one from the command line replaces it.
    sys.exit(main(["serve", "server.triton_port=5600", *sys.argv[1:]]))
