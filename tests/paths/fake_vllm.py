"""The part of vLLM's server that benchmarks/serving.py uses, computed by transformers."""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForSequenceClassification


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-m")
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    model = AutoModelForSequenceClassification.from_pretrained(options.model).eval()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert request["use_activation"] is False
            with torch.no_grad():
                reward = model(torch.tensor([request["input"]])).logits[0, 0].item()
            self.answer({"data": [{"probs": [reward]}]})

        def answer(self, content: dict) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
