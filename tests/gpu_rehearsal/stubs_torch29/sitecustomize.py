"""torch 2.8 and 2.9 have no such module."""

import sys

sys.modules["torch.nn.attention.varlen"] = None  # type: ignore[assignment]
