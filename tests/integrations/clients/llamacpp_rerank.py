"""llama.cpp's server scores pairs with a GGUF file.

Run it with xllamacpp on the path, which contains that server. ``python llamacpp_rerank.py GGUF
FILE`` with JSON of queries and documents prints the score of each pair.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import xllamacpp as llama

if __name__ == "__main__":
    settings = llama.CommonParams()
    settings.model.path = sys.argv[1]
    settings.embedding = True
    settings.pooling_type = llama.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    settings.n_ctx = 256
    settings.warmup = False
    settings.cpuparams.n_threads = 1
    # Keys and values in fp32: the defaults change these rewards by up to 0.003.
    settings.cache_type_k = settings.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = llama.Server(settings)
    found = []
    for query, document in json.loads(Path(sys.argv[2]).read_text()):
        answer = server.handle_rerank({"query": query, "documents": [document]})
        answer = json.loads(answer) if isinstance(answer, str) else answer
        found.append(answer["results"][0]["relevance_score"])
    print(json.dumps(found))
