"""Verbs for checkpoints: ``convert``, ``import``, ``export``, ``merge`` and ``cache``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from nemo_aligner.api.reward_model import export_archive
from nemo_aligner.cli.parser import Parser, names, positive
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.contract.steps import STEPPED

_CONVERT = """\
Convert a Hugging Face model or a .gguf file into a .nemo archive.

  nemo-aligner convert --input path/to/hf_folder --output base.nemo

A model with a reward head becomes a reward model, any other model a base to train one from.
"""


def convert_parser() -> Parser:
    """Build the parser of ``nemo-aligner convert``."""
    parser = Parser("convert", _CONVERT)
    parser.add_argument(
        "--input", required=True, metavar="CHECKPOINT",
        help="a folder with config.json, a .gguf file, or a name on the hub (org/name)",
    )  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=".nemo to write")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="default: as stored; fp32 for a quantized file"
    )
    parser.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N",
        help="pad with query groups of zeros until N divides their number; outputs do not change",
    )  # fmt: skip
    parser.add_argument(
        "--head", metavar="NAME",
        help="reward head to convert, by its name in docs/heads.md; none: only the body, as "
        "a base model; default: the only head of the model",
    )  # fmt: skip
    rules = parser.add_argument_group("options for a reward model")
    rules.add_argument(
        "--template", help="its chat template, as model.data.template; default: the tokenizer's"
    )
    rules.add_argument(
        "--seq-length", type=positive, metavar="N",
        help="longest sample in tokens; default: the model's limit, but at most 4096",
    )  # fmt: skip
    rules.add_argument(
        "--attributes", type=names, metavar="A,B", help="names of its outputs; default: id2label"
    )
    rules.add_argument(
        "--step-separator", metavar="TEXT",
        help="string after each step of a reply, for a model that scores steps; default: "
        "<extra_0> for a process reward model",
    )  # fmt: skip
    rules.add_argument(
        "--reads", choices=STEPPED,
        help="where the reward of each turn or step is read, as model.head.reads; default: "
        "step_marks if there is a separator",
    )  # fmt: skip
    rules.add_argument(
        "--reward-token", metavar="TEXT|ID",
        help="token that is appended to each sample and at which the reward is read; default: "
        "reward_token_id in config.json",
    )  # fmt: skip
    return parser


def run_convert(options: argparse.Namespace) -> int:
    """Convert a Hugging Face model to a ``.nemo`` archive, and print a summary."""
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
    from nemo_aligner.config.common import Precision
    from nemo_aligner.config.dtypes import torch_dtype
    from nemo_aligner.utils.console import say

    dtype = None if options.dtype is None else torch_dtype(Precision(options.dtype))
    summary = convert_hf_to_nemo(
        options.input,
        options.output,
        dtype,
        options.tensor_parallel,
        options.head,
        template=options.template,
        seq_length=options.seq_length,
        attributes=options.attributes,
        step_separator=options.step_separator,
        reads=None if options.reads is None else ScoredPosition(options.reads),
        reward_token=options.reward_token,
    )
    say(str(summary))
    return 0


_IMPORT = """\
Write a checkpoint of NeMo, NeMo-Aligner or Megatron as a .nemo archive of this package.

nemo-aligner import --input CHECKPOINT --output base.nemo --tokenizer FOLDER
nemo-aligner import --input rm.nemo --output ours.nemo --template tokenizer
"""


def import_parser() -> Parser:
    """Build the parser of ``nemo-aligner import``."""
    parser = Parser("import", _IMPORT)
    parser.add_argument(
        "--input", required=True, type=Path, metavar="CHECKPOINT",
        help="a .nemo file, or a folder of NeMo 2, Megatron-LM or Megatron-Bridge",
    )  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=".nemo to write")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="folder with a tokenizer.json, or a name on the hub; "
        "default: the checkpoint's own",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, metavar="YAML",
        help="model_config.yaml; default: the checkpoint's own",
    )  # fmt: skip
    rules = parser.add_argument_group("options for a reward model")
    rules.add_argument(
        "--template",
        help="chat template: 'tokenizer', a built-in name, a file, or 'none' for raw texts",
    )
    rules.add_argument(
        "--attributes", type=names, default=(), metavar="A,B",
        help="names of its outputs, if there are several",
    )  # fmt: skip
    rules.add_argument(
        "--keep-scaling", action="store_true",
        help="apply the RoPE and embedding scaling that NeMo-Aligner's reward models ignore",
    )  # fmt: skip
    return parser


def run_import(options: argparse.Namespace) -> int:
    """Write a checkpoint of NeMo or Megatron as our ``.nemo`` archive, and print a summary."""
    from nemo_aligner.checkpoint.importing import import_checkpoint
    from nemo_aligner.utils.console import say

    summary = import_checkpoint(
        options.input,
        options.output,
        tokenizer=options.tokenizer,
        config=options.config,
        template=options.template,
        attributes=options.attributes,
        keep_scaling=options.keep_scaling,
    )
    say(str(summary))
    return 0


_EXPORT = """\
Export a reward model's .nemo as a Hugging Face folder, and check that it scores the same.

nemo-aligner export --input megatron_gpt.nemo --output hf_folder
"""

# Decimal units, as for max_shard_size of transformers' save_pretrained.
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def export_parser() -> Parser:
    """Build the parser of ``nemo-aligner export``."""
    parser = Parser("export", _EXPORT)
    parser.add_argument(
        "--input", required=True, type=Path, metavar="FILE", help="a reward model's .nemo"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FOLDER",
        help="folder to write, or a .gguf file for llama.cpp",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of the body; default: as stored"
    )
    parser.add_argument(
        "--merge", action="store_true",
        help="combine the attributes into one output, by the weights of the scoring contract",
    )  # fmt: skip
    parser.add_argument(
        "--head", metavar="NAME",
        help="name of a linear head's tensor: score (default), score.bias for vLLM, with the "
        "constant of a reward as bias, or v_head.summary for TRL and LLaMA-Factory",
    )  # fmt: skip
    parser.add_argument(
        "--adapter-of", metavar="MODEL",
        help="write LoRA as an adapter for peft instead of merging it into the weights; MODEL is "
        "its base model: a folder (then the result is checked) or a name",
    )  # fmt: skip
    parser.add_argument(
        "--max-shard-size", type=_parse_bytes, metavar="SIZE",
        help="largest safetensors file (default: 5GB)",
    )  # fmt: skip
    parser.add_argument(
        "--base-license", default="unknown", metavar="NAME",
        help="the base model's licence, for the model card",
    )  # fmt: skip
    parser.add_argument(
        "--push", metavar="NAME",
        help="also upload the result to the Hugging Face hub, as the model ORGANIZATION/NAME, with "
        "the login of `hf auth login`",
    )  # fmt: skip
    return parser


def run_export(options: argparse.Namespace) -> int:
    """Export a reward model as a Hugging Face folder, check its scores, and print the result."""
    from nemo_aligner.checkpoint.hf.push import check_push, push
    from nemo_aligner.utils.console import say

    if options.push is not None:
        check_push(options.push)
    say(
        str(
            export_archive(
                options.input,
                options.output,
                dtype=options.dtype,
                merge=options.merge,
                head=options.head,
                adapter_of=options.adapter_of,
                max_shard_bytes=options.max_shard_size,
                base_license=options.base_license,
                hub_name=options.push,
            )
        )
    )
    if options.push is not None:
        print(push(options.output, options.push))
    return 0


def _parse_bytes(text: str) -> int:
    """Argparse type for a size such as ``5GB``; returns the number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]B)", text.upper())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if size == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted for example 5GB or 500MB")
    return size


_MERGE = """\
Merge reward models of one kind into one, by a weighted sum of their weights.

nemo-aligner merge --input a.nemo b.nemo c.nemo --output mean.nemo
nemo-aligner merge --input a.nemo b.nemo --weights 0.7,0.3 --output ab.nemo
nemo-aligner merge --input a.nemo b.nemo --extrapolate 0.5 --output c.nemo
"""


def merge_parser() -> Parser:
    """Build the parser of ``nemo-aligner merge``."""
    parser = Parser("merge", _MERGE)
    parser.add_argument(
        "--input", required=True, nargs="+", metavar="NEMO",
        help="reward models with the same scoring contract",
    )  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=".nemo to write")
    methods = parser.add_mutually_exclusive_group()
    methods.add_argument(
        "--weights", type=_parse_numbers, metavar="W,W",
        help="weight of each input; default: all equal",
    )  # fmt: skip
    methods.add_argument(
        "--extrapolate", type=float, metavar="ALPHA",
        help="two inputs: second + ALPHA * (second - first) (ExPO); 0.3 to 0.5 is usual",
    )  # fmt: skip
    return parser


def run_merge(options: argparse.Namespace) -> int:
    """Merge archives into one, and print a summary."""
    from nemo_aligner.checkpoint.merge import extrapolate, merge_checkpoints
    from nemo_aligner.utils.console import say
    from nemo_aligner.utils.errors import ConfigError

    inputs, weights = options.input, options.weights
    if options.extrapolate is not None:
        if len(inputs) != 2:
            raise ConfigError(
                f"--extrapolate: got {len(inputs)} inputs, wanted two: where training began (the "
                "base), and where it ended"
            )
        base, trained = inputs
        say(extrapolate(base, trained, options.extrapolate, options.output))
        return 0
    if weights is None:
        weights = [1 / len(inputs)] * len(inputs)
    say(merge_checkpoints(inputs, weights, options.output))
    return 0


def _parse_numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


_CACHE = """\
List or remove the files of the cache: converted models, data sets of the hub, compiled kernels.

nemo-aligner cache

nemo-aligner cache --clear 'Qwen3*'

The cache is the folder NEMO_ALIGNER_CACHE, by default ~/.cache/nemo_aligner. A removed file is made
again when it is needed. Remove no model from which a server or a run is just starting.
"""


def cache_parser() -> Parser:
    """Build the parser of ``nemo-aligner cache``."""
    parser = Parser("cache", _CACHE)
    parser.add_argument(
        "--clear", nargs="*", metavar="NAME",
        help="remove the files of these names, in which * stands for any characters, and the token "
        "caches of these data sets; without a name, remove all",
    )  # fmt: skip
    return parser


def run_cache(options: argparse.Namespace) -> int:
    """Print the files of the cache with sizes and ages, or remove some of them."""
    from nemo_aligner.utils.cache import describe_cached, list_cached, remove_cached

    entries = list_cached(options.clear or ())
    described = describe_cached(entries)
    if options.clear is not None:
        remove_cached(entries)
        described = f"removed:\n{described}"
    print(described)
    return 0
