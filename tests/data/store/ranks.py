"""A rank that opens tokens on the disk: ``ranks.py FILE TOKENIZER FOLDER``, for test_ranks.py."""

from __future__ import annotations

import argparse
import json
import os
import sys

from nemo_aligner.cli.parser import Parser
from nemo_aligner.cli.running import run_verb
from nemo_aligner.data.loader import TrainLoader
from nemo_aligner.data.store import folder, index
from nemo_aligner.data.training_data import build_training_data
from nemo_aligner.parallel.collectives import gather_objects
from nemo_aligner.parallel.launch import launch
from nemo_aligner.text.tokenizer import load_tokenizer
from tests.contracts import Contracts


def run(options: argparse.Namespace) -> int:
    made: list[str] = []

    def make(path: str, *rest: object) -> index.FileIndex:
        made.append(path)
        return index.make_index(path, *rest)  # type: ignore[arg-type]

    folder.make_index = make  # type: ignore[assignment]
    tokenizer = load_tokenizer(options.tokenizer)
    contracts = Contracts(tokenizer)
    kept = {"index_dir": options.folder} if options.folder else {"keep_index": False}
    config = contracts.config(None, **kept)
    config.data.data_prefix.train = [options.file]
    with launch():
        data = build_training_data(config, contracts(), tokenizer)
        loader = TrainLoader(data.train, 4, 400, 1, int(os.environ["RANK"]), 2)
        plan = loader.plan(0)
        tokens = [pack.tokens.tolist() for pack in plan.packs]
        found = gather_objects((len(made), data.train.digest, plan.record_ids, tokens))
    if os.environ["RANK"] == "0":
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    parser = Parser("ranks", __doc__)
    for name in ("file", "tokenizer", "folder"):
        parser.add_argument(name)
    sys.exit(run_verb(run, parser.parse(sys.argv[1:])))
