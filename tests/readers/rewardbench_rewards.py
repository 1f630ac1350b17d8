"""Run in an environment with rewardbench: what its pipeline makes of an export.

``rewardbench_rewards.py EXPORT CONVERSATIONS`` prints the rewards of the conversations. Only the
module of the pipeline is loaded: the package around it asks for more, and for a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from transformers import AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding


def main(export: str, conversations: str) -> None:
    package = importlib.util.find_spec("rewardbench")
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "models" / "pipeline.py"
    spec = importlib.util.spec_from_file_location("pipeline", path)
    assert spec is not None
    assert spec.loader is not None
    pipeline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pipeline)
    BatchEncoding.to = lambda self, device: self  # it says "cuda"

    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForSequenceClassification.from_pretrained(export)
    chats = json.loads(Path(conversations).read_text())
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    score = pipeline.RewardBenchPipeline("text-classification", model, tokenizer)
    print(json.dumps(score(texts).flatten().tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])
