"""Serve a reward model over HTTP: the same as ``nemo-aligner serve``.

    python examples/serve_reward_model.py rm_model_file=megatron_gpt.nemo server.port=5555

``nemo_aligner/serving/run.py`` is what runs.
"""

from __future__ import annotations

import sys

try:
    from nemo_aligner.cli.main import main
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: activate its environment (source .venv/bin/activate) or pip install -e .")

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
