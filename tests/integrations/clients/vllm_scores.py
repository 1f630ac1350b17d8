"""vLLM scores token ids with exported folders.

It needs a Python with vLLM. ``python vllm_scores.py FILE`` with a JSON list of ``folder``, ``ids``
and ``task`` prints the logits of each folder: one row per sample, or with the task
``token_classify`` that of the last token. With ``reads``, positions in each sample, there is a row
for each of them. With ``step_tag_id`` there is a row for each such token, found by vLLM's STEP
pooling with its softmax. With ``pairs`` of texts these are vLLM's scores. ``options`` are the
engine's.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

# On a CPU, in this process, with a KV cache of 1 GiB.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)


def logits(asked: dict[str, Any]) -> list[Any]:
    from vllm import LLM, PoolingParams
    from vllm.config import PoolerConfig

    task, tag = asked["task"], asked.get("step_tag_id")
    pooler = None if tag is None else PoolerConfig(tok_pooling_type="STEP", step_tag_id=tag)
    model = LLM(
        asked["folder"],
        runner="pooling",
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        pooler_config=pooler,
        **asked.get("options", {}),
    )
    if "pairs" in asked:
        scored = model.score(*map(list, zip(*asked["pairs"], strict=True)), use_tqdm=False)
        return [[each.outputs.score] for each in scored]
    # The folder's problem_type tells classify to apply no activation.
    is_plain = task == "classify" or tag is not None
    how = PoolingParams() if is_plain else PoolingParams(use_activation=False)
    texts = [{"prompt_token_ids": ids} for ids in asked["ids"]]
    answers = model.encode(texts, pooling_task=task, pooling_params=how, use_tqdm=False)
    data = [each.outputs.data.float() for each in answers]
    if tag is not None:
        return [each.tolist() for each in data]
    if "reads" in asked:
        return [each[own].tolist() for each, own in zip(data, asked["reads"], strict=True)]
    return [(each if task == "classify" else each[-1]).tolist() for each in data]


if __name__ == "__main__":
    found = []
    for each in json.loads(Path(sys.argv[1]).read_text()):
        found.append(logits(each))
        gc.collect()  # a model that still exists would destroy the next one's process group
    print(json.dumps(found))
