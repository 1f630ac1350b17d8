"""``nemo-aligner train`` on a processor on which all products go to oneDNN, small ones, too."""

from __future__ import annotations

import sys

from nemo_aligner.cli.main import main
from nemo_aligner.parallel.cpu import products

if __name__ == "__main__":
    products.is_slow_with_mkl = lambda: True  # type: ignore[assignment]
    products._LARGE = products._FEWEST = 0
    sys.exit(main(["train", *sys.argv[1:]]))
