"""Subcommands for data: ``fetch``, ``inspect``, ``split``, ``augment``, ``label`` and ``demo``."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_aligner.cli.parser import (
    Parser,
    above_0,
    add_processes,
    fraction,
    names,
    positive,
    start_ranks,
    starts_ranks,
    whole,
)
from nemo_aligner.config.common import Contradicting, Malformed, Overlong, RecordKind
from nemo_aligner.config.evaluation import SourceConfig
from nemo_aligner.config.model import DEFAULT_SEQ_LENGTH, DataConfig, ScoredPosition
from nemo_aligner.utils.errors import ConfigError

if TYPE_CHECKING:
    from nemo_aligner.contract.contract import ScoringContract
    from nemo_aligner.contract.tokenizer import Tokenizer
    from nemo_aligner.data.readers import PromptWrapping, ReaderConfig

_SETTING = re.compile(r"\w+(\.\w+)*=.*")


def data_file(text: str) -> str:
    """Argparse type for the name of a file; rejects a setting ``key=value``."""
    if _SETTING.fullmatch(text) and not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"got the setting {text}, wanted a file: this verb has options instead of settings, "
            "such as --format NAME or --prompt-key FIELD"
        )
    return text


def add_format(parser: Parser, *, of_ratings: bool = True, drops_records: bool = True) -> None:
    """Add the options for reading a data file.

    Args:
        of_ratings: add the options for labels of rated replies.
        drops_records: add ``--contradicting``; if False, contradicting pairs are kept.
    """
    parser.add_argument(
        "--format", default="auto", metavar="NAME", help="as model.data.format (default: auto)"
    )
    for flag in ("--prompt-key", "--chosen-key", "--rejected-key"):
        setting = flag[2:].replace("-", "_")
        parser.add_argument(flag, metavar="FIELD", help=f"as model.data.{setting}")
    parser.set_defaults(
        contradicting=Contradicting.keep.value,
        malformed=DataConfig.malformed.value,
        max_malformed=DataConfig.max_malformed,
    )
    if drops_records:
        parser.add_argument(
            "--contradicting", choices=[rule.value for rule in Contradicting],
            default=DataConfig.contradicting.value,
            help="as model.data.contradicting (default: %(default)s)",
        )  # fmt: skip
    if not of_ratings:
        parser.set_defaults(attributes=(), loss_mask_val=None, neutral_label=None)
        return
    parser.add_argument(
        "--attributes", type=names, default=(), metavar="A,B", help="label columns of ratings"
    )
    parser.add_argument(
        "--loss-mask-val", type=float, default=-100.0, metavar="NUMBER",
        help="number that marks a missing label (default: -100)",
    )  # fmt: skip
    parser.add_argument(
        "--neutral-label", type=_parse_number_or_null, default=DataConfig.neutral_label,
        metavar="NUMBER", help="as model.data.neutral_label, or null (default: %(default)g)",
    )  # fmt: skip


def _add_malformed(parser: Parser) -> None:
    """Add the options for malformed records, after those of ``add_format``."""
    parser.add_argument(
        "--malformed", choices=[rule.value for rule in Malformed],
        default=DataConfig.malformed.value, help="as model.data.malformed (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-malformed", type=float, default=DataConfig.max_malformed, metavar="FRACTION",
        help="as model.data.max_malformed (default: %(default)s)",
    )  # fmt: skip


def read_format(options: argparse.Namespace, **fields: Any) -> ReaderConfig:
    """Build a ``ReaderConfig`` from the options for reading a file and from further ``fields``."""
    from nemo_aligner.data.clean import MalformedRule
    from nemo_aligner.data.formats.base import PairKeys
    from nemo_aligner.data.readers import ReaderConfig

    return ReaderConfig(
        format=options.format,
        pair_keys=PairKeys.of(options.prompt_key, options.chosen_key, options.rejected_key),
        attributes=options.attributes,
        loss_mask_val=options.loss_mask_val,
        neutral=options.neutral_label,
        rule=MalformedRule(Malformed(options.malformed), options.max_malformed, section=""),
        contradicting=Contradicting(options.contradicting),
        **fields,
    )


def _parse_number_or_null(text: str) -> float | None:
    return None if text == "null" else float(text)


_FETCH = """\
Download a data set from the Hugging Face hub to a file of JSON lines.

  nemo-aligner data fetch nvidia/HelpSteer2 --output helpsteer2.jsonl
  nemo-aligner data fetch Anthropic/hh-rlhf --split test --output heldout.jsonl

This needs the extra hub and a network; training then needs neither.
"""


def fetch_parser() -> Parser:
    """Build the parser of ``nemo-aligner data fetch``."""
    parser = Parser("data fetch", _FETCH)
    parser.add_argument(
        "name", metavar="NAME", help="owner/name on the hub, or a local folder with a data set"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument(
        "--split", default="train", metavar="SPLIT", help="split of the data set (default: train)"
    )
    parser.add_argument(
        "--subset", metavar="SUBSET", help="configuration of the data set, if it has several"
    )
    parser.add_argument(
        "--revision", metavar="REVISION", help="branch, tag or commit (default: the newest)"
    )
    return parser


def run_fetch(options: argparse.Namespace) -> int:
    """Download a data set of the hub into a file, and print the number of rows."""
    from nemo_aligner.data.hub import fetch

    count = fetch(options.name, options.output, options.split, options.subset, options.revision)
    print(f"{count} rows of {options.name}, {options.split} -> {options.output}")
    return 0


_INSPECT = """\
Show preference data as training will see it, without a model.

  nemo-aligner data inspect pairs.jsonl --tokenizer base.nemo

Prints a table per file: records, dropped records and reasons, ties, duplicates, lengths, how often
the longer reply is the chosen one. --train names the training files; their prompts should not occur
in the other files. With --tokenizer, lengths are in tokens, and --show N prints the first N records
exactly as they are tokenized, with special tokens in brackets or, on a terminal, in reverse video.
For labels of turns or steps, --reads says at which token each reward is read. If a file cannot be
read or has malformed records, the others are still shown, and the exit code is 1.
"""


_PROMPT_FLAGS = {
    "--system-prompt-file": "FILE",
    "--prompt-file": "FILE",
    "--input-template": "TEXT",
}
# Options of the scoring contract that is built for a tokenizer without one. Their default is None,
# which tells that they are not given.
_CONTRACT_FLAGS = (
    "--template", "--seq-length", "--overlong", "--reads", "--step-separator",
    "--principle-template",
)  # fmt: skip


def inspect_parser() -> Parser:
    """Build the parser of ``nemo-aligner data inspect``."""
    parser = Parser("data inspect", _INSPECT)
    parser.add_argument("files", nargs="+", type=data_file, metavar="FILE", help="files to inspect")
    parser.add_argument(
        "--train", nargs="+", type=data_file, default=[], metavar="FILE", help="training files"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH",
        help="a .nemo file (of a reward model also its scoring contract is used), a folder with "
        "tokenizer.json, a .gguf file, or a model's name on the hub",
    )  # fmt: skip
    parser.add_argument(
        "--show", type=whole, default=2, metavar="N", help="records to print (default: 2)"
    )
    add_format(parser)
    for flag, value in _PROMPT_FLAGS.items():
        setting = flag[2:].replace("-", "_")
        parser.add_argument(flag, metavar=value, help=f"as model.data.{setting}")
    parser.add_argument("--template", metavar="NAME", help="as model.data.template")
    parser.add_argument(
        "--seq-length", type=positive, metavar="N",
        help=f"as model.data.seq_length (default: {DEFAULT_SEQ_LENGTH})",
    )  # fmt: skip
    parser.add_argument(
        "--overlong", choices=[rule.value for rule in Overlong],
        help="as model.data.overlong (default: drop)",
    )  # fmt: skip
    parser.add_argument(
        "--reads", choices=[rule.value for rule in ScoredPosition], metavar="POSITION",
        help="as model.head.reads (default: last_token)",
    )  # fmt: skip
    parser.add_argument("--step-separator", metavar="TEXT", help="as model.data.step_separator")
    parser.add_argument(
        "--principle-template", metavar="TEXT", help="as model.data.principle_template"
    )
    return parser


def run_inspect(options: argparse.Namespace) -> int:
    """Print a table and the first records of each file; return 1 if a file is invalid, else 0."""
    from nemo_aligner.data.hub import local_files
    from nemo_aligner.data.inspect import Inspection, inspect_files

    inspection = Inspection(
        rules=_read_rules(options),
        show=options.show,
        reading=read_format(options, prompts=_read_prompts(options)),
        marks=("\033[7m", "\033[0m") if sys.stdout.isatty() else ("[", "]"),
    )
    all_good = True
    for part in inspect_files(local_files(options.files), local_files(options.train), inspection):
        print(part.text)
        all_good &= part.is_good
    return 0 if all_good else 1


def _read_rules(options: argparse.Namespace) -> tuple[Tokenizer, ScoringContract] | None:
    """Load tokenizer and scoring contract, or build the contract from the options; print its hash.

    None without ``--tokenizer``.

    Raises:
        ConfigError: an option of the contract is given, but no contract is built from it.
    """
    names = {flag: flag[2:].replace("-", "_") for flag in _CONTRACT_FLAGS}
    flags = ", ".join(flag for flag, name in names.items() if getattr(options, name) is not None)
    if options.tokenizer is None:
        if flags:
            raise ConfigError(
                f"{flags}: no effect without --tokenizer, as no sample is tokenized. Add "
                f"--tokenizer, or omit {flags}"
            )
        return None
    from nemo_aligner.checkpoint.nemo.reward_model import read_or_build_text_rules

    data = DataConfig(
        format=options.format,
        seq_length=options.seq_length,
        overlong=None if options.overlong is None else Overlong(options.overlong),
        template=options.template,
        step_separator=options.step_separator,
        principle_template=options.principle_template,
    )
    reads = ScoredPosition(options.reads or ScoredPosition.last_token)
    tokenizer, contract, is_built = read_or_build_text_rules(
        options.tokenizer, data, options.attributes, reads
    )
    if flags and not is_built:
        raise ConfigError(
            f"{flags}: {options.tokenizer} is a reward model, whose scoring contract is used. Omit "
            f"{flags}, or pass the tokenizer of a base model"
        )
    # A trained model has another hash, because the hash also covers precision, objective and label
    # means.
    origin = " of these options (not yet of a training run)" if is_built else ""
    print(f"scoring contract{origin}: {contract.hash}")
    return tokenizer, contract


def _read_prompts(options: argparse.Namespace) -> PromptWrapping | None:
    from nemo_aligner.data.readers import PromptWrapping

    data = DataConfig(
        system_prompt_file=options.system_prompt_file,
        prompt_file=options.prompt_file,
        input_template=options.input_template,
    )
    return PromptWrapping.of(data, section="")


_SPLIT = """\
Split a file of preference data by prompt: train.jsonl and heldout.jsonl.

  nemo-aligner data split pairs.jsonl --output data --heldout 0.1

Reads every format for training, and copies lines unchanged. All records of a prompt go to the same
side. Ties are kept, as some objectives learn from them; other records that training would drop are
dropped and counted. It also prints how accurate the rule "the longer reply is better" is on the
held-out records: with --tokenizer lengths are in tokens, else in characters.
"""


def split_parser() -> Parser:
    """Build the parser of ``nemo-aligner data split``."""
    parser = Parser("data split", _SPLIT)
    parser.add_argument("input", type=Path, metavar="FILE", help="file to split")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="folder to write"
    )
    parser.add_argument(
        "--heldout", type=fraction, default=0.2, metavar="FRACTION",
        help="fraction of the records to hold out (default: 0.2)",
    )  # fmt: skip
    parser.add_argument(
        "--by", choices=["prompt", "first_prompt"], default="prompt",
        help="keep records together that have the same prompt, or the same first user turn "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--similar", type=fraction, metavar="FRACTION",
        help="also keep near duplicates together: prompts whose sets of three consecutive words "
        "have at least this Jaccard similarity (needs the extra `dedup`; default: only prompts "
        "that are equal up to case and white space)",
    )  # fmt: skip
    parser.add_argument(
        "--kind",
        choices=[kind.value for kind in RecordKind],
        help="kind of the records (default: detected from the file)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="random seed (default: 1)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH",
        help="a .nemo file, a folder with tokenizer.json, a .gguf file, or a model's name on the "
        "hub",
    )  # fmt: skip
    add_format(parser)
    _add_malformed(parser)
    return parser


def run_split(options: argparse.Namespace) -> int:
    """Write the training file and the held-out file, and print a summary."""
    from nemo_aligner.data.hub import local_file
    from nemo_aligner.data.split import Split, split_file

    tokenizer = None
    if options.tokenizer is not None:
        # Imported here, because it imports megatron-core, which takes seconds.
        from nemo_aligner.checkpoint.nemo.reward_model import read_tokenizer

        tokenizer = read_tokenizer(options.tokenizer)
    kind = None if options.kind is None else RecordKind(options.kind)
    reading = read_format(options, kind=kind)
    split = Split(options.heldout, options.seed, options.by, options.similar, reading, tokenizer)
    print(split_file(Path(local_file(str(options.input))), options.output, split))
    return 0


_AUGMENT = """\
Make more pairs from a file: the reply to a prompt is preferred to a reply to another prompt.

  nemo-aligner data augment train.jsonl --output augmented.jsonl

Only the new pairs are written; train on both files. The same file, share and seed give the same
pairs. Use it on training files, after `data split` has made the held-out file.
"""


def augment_parser() -> Parser:
    """Build the parser of ``nemo-aligner data augment``."""
    parser = Parser("data augment", _AUGMENT)
    parser.add_argument("input", type=Path, metavar="FILE", help="file of pairs")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument(
        "--share", type=above_0, default=0.3, metavar="NUMBER",
        help="number of new pairs for each pair of the file (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="random seed (default: 1)")
    add_format(parser, of_ratings=False)
    _add_malformed(parser)
    return parser


def run_augment(options: argparse.Namespace) -> int:
    """Write the augmented pairs to a file, and print a summary."""
    from nemo_aligner.data.augment import Augment, augment_file

    augment = Augment(options.share, options.seed, read_format(options))
    print(augment_file(options.input, options.output, augment))
    return 0


_DEMO = """\
Make a demo set whose labels anyone can verify, of pairs or of steps: train.jsonl, heldout.jsonl.
"""


def demo_parser() -> Parser:
    """Build the parser of ``nemo-aligner data demo``."""
    parser = Parser("data demo", _DEMO)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="folder to write"
    )
    parser.add_argument(
        "--kind", choices=("pairs", "steps"), default="pairs",
        help="preference pairs, or chains of sums with a label for each step (default: pairs)",
    )  # fmt: skip
    parser.add_argument(
        "--pairs", type=positive, default=2400, metavar="N",
        help="number of pairs or chains (default: 2400)",
    )  # fmt: skip
    parser.add_argument(
        "--heldout", type=fraction, default=0.1, metavar="FRACTION",
        help="fraction of the records to hold out (default: 0.1)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="random seed (default: 1)")
    return parser


def run_demo(options: argparse.Namespace) -> int:
    """Write the demo set (train.jsonl and heldout.jsonl), and print a summary."""
    from nemo_aligner.data.demo import write_demo, write_step_demo

    write = write_demo if options.kind == "pairs" else write_step_demo
    print(write(options.output, options.pairs, options.heldout, options.seed))
    return 0


_LABEL = """\
Add the rewards of one or more reward models to the records of a file, as soft labels.

  nemo-aligner data label pairs.jsonl --model teacher.nemo --output soft.jsonl
  nemo-aligner data label pairs.jsonl --output soft.jsonl \\
      --model a.nemo --model b.nemo

Reads every format of comparisons, and also {"prompt": ..., "responses": [...]} without ranks. All
fields stay; the new ones are teacher_rewards, the mean over the models for each reply, teacher, and
for pairs and several models teacher_spread, the standard deviation of the margin. Training on the
output learns the teachers' probabilities. The same command continues a run that was stopped; only
servers without a model fingerprint, such as vLLM, score all records again.
"""


def label_parser() -> Parser:
    """Build the parser of ``nemo-aligner data label``."""
    parser = Parser("data label", _LABEL)
    parser.add_argument("input", type=data_file, metavar="FILE", help="file to label")
    parser.add_argument(
        "--model", action="append", required=True, metavar="MODEL",
        help="a .nemo file, a Hugging Face folder or name, or the URL of a server; may be repeated",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument(
        "--keep-confident", type=_parse_confidence, metavar="P",
        help="write only pairs of which the models give one reply a probability of at least P, "
        "0.5 to 1; with several models, their mean margin less its standard deviation counts",
    )  # fmt: skip
    parser.add_argument(
        "--pseudo-labels", action="store_true",
        help="also rank the replies by the models: the better one becomes chosen",
    )  # fmt: skip
    add_format(parser, of_ratings=False)
    _add_malformed(parser)
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="default: that of the contract"
    )
    parser.add_argument(
        "--micro-batch-tokens", type=positive, default=8192, metavar="N",
        help="as model.micro_batch_tokens (default: %(default)s)",
    )  # fmt: skip
    for flag, name in (("--tensor-parallel", "tensor"), ("--pipeline-parallel", "pipeline")):
        parser.add_argument(
            flag, type=positive, default=1, metavar="N",
            help=f"as model.{name}_model_parallel_size (default: 1)",
        )  # fmt: skip
    add_processes(parser)
    parser.add_argument(
        "--token-variable", metavar="NAME",
        help="environment variable with the bearer token of the servers",
    )  # fmt: skip
    parser.add_argument(
        "--attribute-weights", type=_parse_weights, default={}, metavar="NAME=NUMBER,...",
        help="all servers with /classify or /get_reward: names and weights of the rewards "
        "(default: one reward)",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", metavar="FOLDER",
        help="servers with /get_reward: tokenizer folder with the chat template",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=above_0, default=SourceConfig.timeout_s, metavar="SECONDS",
        help="seconds until a request to a server times out (default: %(default)g)",
    )  # fmt: skip
    return parser


def _parse_weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for item in text.split(","):
        name, _, number = (part.strip() for part in item.partition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or name in weights or not math.isfinite(weight):
            raise argparse.ArgumentTypeError(
                f"got {item!r}, wanted NAME=NUMBER, and each name once"
            )
        weights[name] = weight
    return weights


def _parse_confidence(text: str) -> float:
    value = float(text)
    if not 0.5 <= value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number from 0.5 to below 1")
    return value


def run_label(options: argparse.Namespace) -> int:
    """Label the records of a file, and print a summary."""
    from nemo_aligner.config.common import Precision
    from nemo_aligner.config.evaluation import EvaluateConfig
    from nemo_aligner.config.model import ScorerModelConfig

    if starts_ranks(options):
        return start_ranks("data label", options)
    from nemo_aligner.evaluation.label import Labelling, label_file

    model = ScorerModelConfig(
        micro_batch_tokens=options.micro_batch_tokens,
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
    )
    label_file(
        Labelling(
            source=options.input,
            output=options.output,
            teachers=tuple(options.model),
            config=EvaluateConfig(
                precision=None if options.precision is None else Precision(options.precision),
                model=model,
                source=SourceConfig(
                    attribute_weights=options.attribute_weights,
                    tokenizer=options.tokenizer,
                    token_variable=options.token_variable,
                    timeout_s=options.timeout,
                ),
            ),
            reading=read_format(options),
            keep_confident=options.keep_confident,
            pseudo_labels=options.pseudo_labels,
        )
    )
    return 0
