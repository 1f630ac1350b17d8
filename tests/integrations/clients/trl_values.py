"""TRL's model with a value head loads an exported folder.

It needs a Python with a TRL that has this model (up to 0.x). ``python trl_values.py FOLDER FILE``
with JSON of token ids prints the value of the last token of each sample.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from trl import AutoModelForCausalLMWithValueHead

if __name__ == "__main__":
    model = AutoModelForCausalLMWithValueHead.from_pretrained(sys.argv[1]).eval()
    found = []
    with torch.no_grad():
        for ids in json.loads(Path(sys.argv[2]).read_text()):
            _, _, values = model(torch.tensor([ids]))
            found.append(float(values[0, -1]))
    print(json.dumps(found))
