"""Print the token ids that TRL's RewardTrainer makes of data sets; run where TRL is installed.

``trl_ids.py DATA.json WORK TOKENIZER...`` prints a line for each tokenizer: for each of the data
sets in the file, by name, the ids of the chosen and the rejected text of every record.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer


def main(data: str, work: str, *tokenizers: str) -> None:
    for folder in tokenizers:
        print(f"IDS {json.dumps(ids_of(data, work, folder))}")


def ids_of(data: str, work: str, tokenizer_folder: str) -> dict[str, list[Any]]:
    found = {}
    for name, rows in json.loads(Path(data).read_text()).items():
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_labels=1, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        trainer = RewardTrainer(
            model=LlamaForSequenceClassification(config),
            args=RewardConfig(
                output_dir=work, use_cpu=True, bf16=False, report_to=[], max_length=None
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        columns = trainer.train_dataset
        found[name] = [[row["chosen_ids"], row["rejected_ids"]] for row in columns]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
