"""vLLM scores token ids by exported folders.

Run in a Python with vLLM. ``python vllm_scores.py FILE`` with JSON of a list of ``folder``, ``ids``
and ``task`` prints the logits of each folder: those of a text, or of its last token where the task
is ``token_classify``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

# On a CPU, in this process, with a cache of 1 GiB.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)


def logits(asked: dict[str, Any]) -> list[list[float]]:
    from vllm import LLM, PoolingParams

    task = asked["task"]
    model = LLM(
        asked["folder"],
        runner="pooling",
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
    )
    # The folder's problem_type says for classify that there is no activation.
    how = PoolingParams() if task == "classify" else PoolingParams(use_activation=False)
    texts = [{"prompt_token_ids": ids} for ids in asked["ids"]]
    answers = model.encode(texts, pooling_task=task, pooling_params=how, use_tqdm=False)
    data = [each.outputs.data.float() for each in answers]
    return [(each if task == "classify" else each[-1]).tolist() for each in data]


if __name__ == "__main__":
    found = []
    for each in json.loads(Path(sys.argv[1]).read_text()):
        found.append(logits(each))
        gc.collect()  # a model that is still there would end the next one's process group
    print(json.dumps(found))
