"""``local_ranks.py ARGUMENT...`` runs ``python ARGUMENT...`` on two ranks of this machine."""

from __future__ import annotations

import sys

from nemo_aligner.distributed.launch import run_ranks

if __name__ == "__main__":
    sys.exit(run_ranks(sys.argv[1:], 2))
