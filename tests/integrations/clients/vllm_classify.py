"""vLLM's own request and response classes of ``/classify`` query a gateway.

It needs a Python with vLLM. ``python vllm_classify.py URL CASES`` with JSON of ``input`` or
``messages`` posts each case as vLLM's class writes it, parses the answer with vLLM's class, and
prints rewards, bodies, and the fields of an answer.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

from vllm.entrypoints.pooling.classify.protocol import (
    ClassificationChatRequest,
    ClassificationCompletionRequest,
    ClassificationResponse,
)


def ask(url: str, case: dict[str, Any]) -> dict[str, Any]:
    kind = ClassificationChatRequest if "messages" in case else ClassificationCompletionRequest
    body = kind(model="reward_model", use_activation=False, **case).model_dump(mode="json")
    data = json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        read = ClassificationResponse.model_validate_json(answer.read())
    return {"body": body, "rewards": [each.probs for each in read.data]}


def fields() -> dict[str, list[str]]:
    """List the required fields of an answer, and required and optional ones of its data."""
    schema = ClassificationResponse.model_json_schema()
    item = schema["$defs"]["ClassificationData"]
    return {
        "required": sorted(schema["required"]),
        "required_of_data": sorted(item["required"]),
        "known_of_data": sorted(item["properties"]),
    }


if __name__ == "__main__":
    found = [ask(sys.argv[1], case) for case in json.loads(sys.argv[2])]
    bodies = [{k: v for k, v in each["body"].items() if k != "request_id"} for each in found]
    recorded = {"bodies": bodies, "answer": fields()}
    print(json.dumps({"rewards": [each["rewards"] for each in found], "recorded": recorded}))
