"""Look at preference data as training will see it, without a model.

inspect_data.py FILE... [--tokenizer base.nemo] [--train FILE...]

One table per file: records, what is dropped and why, ties, duplicates, lengths, how often the
longer reply is the chosen one. ``--train`` names the training files, whose prompts none of the
others should have. ``--tokenizer`` is a .nemo file (a reward model's brings its scoring contract)
or a folder with tokenizer.json: with it lengths are tokens, and ``--show N`` prints the first N
records exactly as they are tokenized, special tokens in brackets or, on a terminal, in reverse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_aligner.data.reading import RecordFile
    from nemo_aligner.data.records import Record
    from nemo_aligner.data.report import FileReport
    from nemo_aligner.text.contract import ScoringContract
    from nemo_aligner.text.tokenizer import Tokenizer


def inspect(arguments: argparse.Namespace) -> None:
    from nemo_aligner.data.overlap import check_overlap

    tokenizer, contract = None, None
    if arguments.tokenizer is not None:
        tokenizer, contract = text_rules(arguments)
        print(f"scoring contract: {contract.hash}")
    training = [report_on(path, arguments, contract, tokenizer)[1] for path in arguments.train]
    for report in training:
        print(report.table())
    for path in arguments.files:
        file, report = report_on(path, arguments, contract, tokenizer)
        if training:
            shared = check_overlap(report, training, allowed=True)
            report = replace(report, prompts_in_training=shared)
        print(report.table())
        for record in file.records[: arguments.show]:
            show(record, contract, tokenizer)


def text_rules(arguments: argparse.Namespace) -> tuple[Tokenizer, ScoringContract]:
    """The tokenizer, and the contract that it is used by."""
    from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
    from nemo_aligner.config.common import Overlong, Precision, RewardModelType
    from nemo_aligner.config.data import DataConfig, RegressionConfig
    from nemo_aligner.config.model import ModelConfig
    from nemo_aligner.text.contract import build_contract
    from nemo_aligner.text.tokenizer import load_tokenizer

    path, contract = arguments.tokenizer, None
    if (path / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(path)
    else:
        tokenizer, contract = read_text_rules(path)
    if contract is not None:
        return tokenizer, contract
    data = DataConfig(
        seq_length=arguments.seq_length,
        overlong=Overlong(arguments.overlong),
        template=arguments.template,
    )
    config = ModelConfig(data=data)
    if arguments.attributes:
        config = ModelConfig(
            reward_model_type=RewardModelType.regression,
            regression=RegressionConfig(arguments.attributes),
            data=data,
        )
    return tokenizer, build_contract(config, tokenizer, Precision.fp32)


def report_on(
    path: str,
    arguments: argparse.Namespace,
    contract: ScoringContract | None,
    tokenizer: Tokenizer | None,
) -> tuple[RecordFile, FileReport]:
    from nemo_aligner.data.reading import read_records

    attributes = arguments.attributes
    if contract is not None and contract.reward_model_type == "regression":
        attributes = contract.attributes
    file = read_records(path, None, arguments.format, attributes, arguments.loss_mask_val)
    name = "train" if path in arguments.train else "file"
    if contract is None or tokenizer is None:
        return file, report_in_characters(file, name)
    from nemo_aligner.data.dataset import tokenize_files

    return file, tokenize_files([file], contract, tokenizer, name).reports[0]


def report_in_characters(file: RecordFile, name: str) -> FileReport:
    """What can be told without a tokenizer."""
    from collections import Counter

    import torch

    from nemo_aligner.batch import LabelColumns
    from nemo_aligner.data.overlap import first_prompts
    from nemo_aligner.data.report import FileReport
    from nemo_aligner.text.messages import prompt_of, reply_of

    texts = [text for record in file.records for text in record.texts]
    replies = torch.tensor([len(reply_of(text)) for text in texts])
    prompts = [sum(len(turn["content"]) for turn in prompt_of(text)) for text in texts]
    return FileReport(
        name=name,
        path=file.path,
        kind=file.kind,
        format=file.format,
        counts=file.counts,
        lengths=replies + torch.tensor(prompts),
        reply_lengths=replies,
        sources=Counter(record.source for record in file.records),
        labels=LabelColumns.none(len(file.records)),
        prompts=first_prompts(file.records),
        unit="characters",
    )


def show(record: Record, contract: ScoringContract | None, tokenizer: Tokenizer | None) -> None:
    from nemo_aligner.data.records import Comparison
    from nemo_aligner.errors import DataError

    print(f"\n{record.origin}" + (f" ({record.source})" if record.source else ""))
    if isinstance(record, Comparison):
        names: tuple[str, ...] = ("chosen", "rejected")
    else:
        labels = ("none" if label is None else f"{label:g}" for label in record.labels)
        names = (f"labels {' '.join(labels)}" if record.labels else "rated",)
    for name, text in zip(names, record.texts, strict=True):
        if contract is None or tokenizer is None:
            turns = (
                [text] if isinstance(text, str) else [f"{t['role']}: {t['content']}" for t in text]
            )
            print(f"-- {name}", *turns, sep="\n")
            continue
        try:
            encoded = contract.encode(tokenizer, text)
        except DataError as error:
            print(f"-- {name}: not used: {error}")
            continue
        cut = ", cut on the left" if encoded.truncated else ""
        print(f"-- {name}: {len(encoded.token_ids)} tokens{cut}")
        print(mark_specials(encoded.token_ids, tokenizer))


def mark_specials(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of the tokens, special ones set apart; the last one is where the reward is read."""
    left, right = ("\033[7m", "\033[0m") if sys.stdout.isatty() else ("[", "]")
    parts: list[str] = []
    plain: list[int] = []
    for token_id in token_ids:
        if token_id not in tokenizer.special_ids:
            plain.append(token_id)
            continue
        parts += [
            tokenizer.decode(plain) if plain else "",
            left,
            tokenizer.decode([token_id]),
            right,
        ]
        plain = []
    text = "".join(parts) + (tokenizer.decode(plain) if plain else "")
    last = tokenizer.decode(token_ids[-1:])
    return f"{text}\n   scored at the last token: {token_ids[-1]} {last!r}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--train", nargs="+", default=[], metavar="FILE", help="training files")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="a .nemo file, or a folder")
    parser.add_argument("--show", type=int, default=2, metavar="N", help="records (default 2)")
    parser.add_argument("--format", default="auto", help="a name of nemo_aligner/data/formats.py")
    parser.add_argument(
        "--attributes", type=lambda text: text.split(","), default=[], help="of ratings: a,b,..."
    )
    parser.add_argument("--loss-mask-val", type=float, default=-100.0, help="a missing label")
    parser.add_argument("--template", help="as model.data.template")
    parser.add_argument("--seq-length", type=int, default=1024, help="as model.data.seq_length")
    parser.add_argument(
        "--overlong", choices=["drop", "truncate_left", "error"], default="drop",
        help="as model.data.overlong",
    )  # fmt: skip
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parse(argv)
    from nemo_aligner.errors import AlignerError

    try:
        inspect(arguments)
    except AlignerError as error:
        sys.exit(f"inspect_data.py: {error}")


if __name__ == "__main__":
    main()
