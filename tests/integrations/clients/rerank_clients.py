"""The rerank clients of LiteLLM, Cohere, LlamaIndex and OpenAI against a gateway.

``python rerank_clients.py URL QUERY DOCUMENT ...`` prints, for each client, the scores in the
documents' order, and the names of the models that OpenAI's client lists.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

import cohere
import openai
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

KEY = "no-secret"


def in_order(ranks: Iterable[tuple[int, float]], count: int) -> list[float]:
    scores = dict(ranks)
    return [scores[index] for index in range(count)]


def by_litellm(url: str, query: str, documents: list[str]) -> dict[str, list[float]]:
    """Query with those of LiteLLM's providers that accept the address of a custom server."""
    # Set before the import, which would otherwise fetch prices from the network.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.suppress_debug_info = True
    found = {}
    for provider in ("hosted_vllm", "jina_ai", "cohere", "huggingface"):
        answer = litellm.rerank(
            model=f"{provider}/reward_model",
            query=query,
            documents=documents,
            top_n=len(documents),
            api_base=url,
            api_key=KEY,
        )
        ranks = ((rank["index"], rank["relevance_score"]) for rank in answer.results)
        found[f"litellm {provider}"] = in_order(ranks, len(documents))
    return found


def by_cohere(url: str, query: str, documents: list[str]) -> dict[str, list[float]]:
    found = {}
    for client in (cohere.Client, cohere.ClientV2):
        asking: Any = client(api_key=KEY, base_url=url)
        answer = asking.rerank(model="reward_model", query=query, documents=documents)
        ranks = ((rank.index, rank.relevance_score) for rank in answer.results)
        found[f"cohere {client.__name__}"] = in_order(ranks, len(documents))
    return found


def by_llama_index(url: str, query: str, documents: list[str]) -> dict[str, list[float]]:
    count = len(documents)
    rerankers = {
        "cohere": CohereRerank(top_n=count, model="any", api_key=KEY, base_url=url),
        "jina": JinaRerank(top_n=count, model="any", api_key=KEY, base_url=f"{url}/v1"),
        "tei": TextEmbeddingInference(top_n=count, base_url=url),
    }
    found = {}
    for name, reranker in rerankers.items():
        nodes = [
            NodeWithScore(node=TextNode(id_=str(index), text=text))
            for index, text in enumerate(documents)
        ]
        ranked = reranker.postprocess_nodes(nodes, QueryBundle(query))
        ranks = ((int(each.node.node_id), float(each.score or 0)) for each in ranked)
        found[f"llama-index {name}"] = in_order(ranks, count)
    return found


def by_openai(url: str, query: str, documents: list[str]) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    bodies: dict[str, dict[str, Any]] = {
        "/score": {"text_1": query, "text_2": documents},
        "/rerank": {"query": query, "documents": documents},
    }
    scored, ranked = (
        client.post(path, body=body, cast_to=dict[str, Any]) for path, body in bodies.items()
    )
    ranks = ((rank["index"], rank["relevance_score"]) for rank in ranked["results"])
    return {
        "openai /score": [each["score"] for each in scored["data"]],
        "openai /rerank": in_order(ranks, len(documents)),
        "models": [model.id for model in client.models.list()],
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    address, asked, *replies = sys.argv[1:]
    found: dict[str, Any] = {}
    for ask in (by_litellm, by_cohere, by_llama_index, by_openai):
        found |= ask(address, asked, replies)
    print(json.dumps(found))
