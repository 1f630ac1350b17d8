"""A rank that opens tokens on the disk, for test_token_cache.py.

``ranks.py TOKENIZER FOLDER FILE ...`` opens one file after the other, and says of each what its
ranks have. With ``--die`` it is killed when half of an index is written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from nemo_aligner.cli.main import run_verb
from nemo_aligner.cli.parser import Parser
from nemo_aligner.contract.tokenizer import load_tokenizer
from nemo_aligner.data import token_cache, token_index
from nemo_aligner.data.token_index import ArraysInFolder
from nemo_aligner.data.training_data import TrainLoader, build_training_data
from nemo_aligner.distributed.collectives import gather_objects
from nemo_aligner.distributed.launch import launch
from tests.harness.contracts import Contracts


def die_at_half(place: Path) -> None:
    add = token_index._Writer.add

    def die(*block: object) -> None:
        add(*block)  # type: ignore[arg-type]
        print(json.dumps([part.name for part in place.iterdir()]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    token_index._Writer.add = die  # type: ignore[assignment,method-assign]


def run(options: argparse.Namespace) -> int:
    made: list[str] = []
    make_index = token_cache.make_index

    def make(path: str, rules: Any, arrays: Any, *rest: Any) -> token_index.FileIndex:
        if isinstance(arrays, ArraysInFolder):
            made.append(path)
        return make_index(path, rules, arrays, *rest)

    token_cache.make_index = make  # type: ignore[assignment]
    if options.die:
        die_at_half(Path(options.folder))
    tokenizer = load_tokenizer(options.tokenizer)
    contracts = Contracts(tokenizer)
    config = contracts.config(None, index_dir=options.folder)
    rank = int(os.environ.get("RANK", "0"))
    with launch():
        for file in options.files:
            made.clear()
            config.data.data_prefix.train = [file]
            data = build_training_data(config, contracts(), tokenizer)
            plan = TrainLoader(data.train, 4, 400, 1, rank, 2).plan(0)
            tokens = [pack.tokens.tolist() for pack in plan.packs]
            found = gather_objects((len(made), data.train.digest, plan.record_ids, tokens))
            if rank == 0:
                print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    parser = Parser("ranks", __doc__)
    parser.add_argument("--die", action="store_true")
    for name in ("tokenizer", "folder"):
        parser.add_argument(name)
    parser.add_argument("files", nargs="+")
    sys.exit(run_verb(run, parser.parse(sys.argv[1:])))
