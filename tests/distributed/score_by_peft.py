"""``score_by_peft.py ADAPTER PAIRS``: score chosen replies with peft, as the model card shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def main(adapter: str, pairs: str) -> None:
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    model = AutoModelForSequenceClassification.from_pretrained(
        config["base_model_name_or_path"], num_labels=1, dtype=torch.float32
    )
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model = PeftModel.from_pretrained(model, adapter).eval()
    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    texts = [
        tokenizer.apply_chat_template(
            [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["chosen"]},
            ],
            tokenize=False,
        )
        for row in rows
    ]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    print(json.dumps(logits[:, 0].tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])
