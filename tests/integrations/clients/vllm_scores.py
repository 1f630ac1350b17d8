"""vLLM scores token ids by exported folders.

Run in a Python with vLLM. ``python vllm_scores.py FILE`` with JSON of a list of ``folder``, ``ids``
and ``task`` prints the logits of each folder: those of a text, or of its last token where the task
is ``token_classify``. With ``reads``, places in each text, they are a row for each of these, and
with ``step_tag_id`` a row for each such token, as vLLM's STEP pooling finds them, by its softmax.
With ``pairs`` of texts they are vLLM's scores of these. ``options`` are the engine's.
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
    # The folder's problem_type says for classify that there is no activation.
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
        gc.collect()  # a model that is still there would end the next one's process group
    print(json.dumps(found))
