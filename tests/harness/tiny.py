"""Tiny real models, tokenizers and data for tests, and functions that run commands on them."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness.environments import write_bytecode
from tests.harness.launching import PREPARED, ROOT, launch_script
from tests.harness.template import BOS, CHATML, EOS

write_bytecode()
# The environment at the start of the test run; libraries and launches in this process change it.
GIVEN = dict(os.environ)
TEXT = (
    "the a cat dog bird tree house river stone blue red green warm cold quick slow runs sleeps "
    "sings eats what is where who why how good bad yes no please thank you sorry one two "
    "three four five"
)
WORDS = TEXT.split()
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

# The smallest model that megatron-core builds, as a model_config.
SMALLEST = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "make_vocab_size_divisible_by": 16,
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with ChatML's special tokens, trained on WORDS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token="<|endoftext|>",
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)


def write_hf_checkpoint(folder: Path, **changes: object) -> None:
    """A random LlamaForCausalLM in safetensors, with weights large enough to tell layouts apart."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "initializer_range": 0.1, **changes}))
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_hf_reward_model(folder: Path, labels: int = 1, **changes: object) -> None:
    """A random LlamaForSequenceClassification with ``labels`` outputs and random norms."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(1)
    settings = {**SHAPE, "initializer_range": 0.1, "num_labels": labels, "pad_token_id": 0}
    # Otherwise transformers treats several outputs as classes.
    settings["problem_type"] = "regression"
    model = LlamaForSequenceClassification(LlamaConfig(**{**settings, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_base_nemo(path: Path, **changes: object) -> Path:
    """A base ``.nemo`` made by the converter from a tiny Hugging Face checkpoint."""
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    source = path.with_suffix(".hf")
    write_hf_checkpoint(source, **changes)
    convert_hf_to_nemo(source, path)
    return path


def write_reward_nemo(path: Path, reads: str = "last_token", **data: Any) -> Path:
    """Write a reward model's ``.nemo`` with two attributes, random norms and label means.

    ``data`` are fields of its DataConfig, ``reads`` is the head's scored position.
    """
    import torch

    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, save_reward_model
    from nemo_aligner.config.common import Precision, RewardModelType
    from nemo_aligner.config.model import (
        DataConfig,
        HeadConfig,
        ModelConfig,
        RegressionConfig,
        ScoredPosition,
    )
    from nemo_aligner.contract.from_settings import build_contract
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import destroy_layout, initialize_layout

    settings = ModelConfig(
        reward_model_type=RewardModelType.regression,
        regression=RegressionConfig(attributes=["helpfulness", "verbosity"]),
        head=HeadConfig(reads=ScoredPosition(reads)),
        data=DataConfig(**data),
    )
    base = write_base_nemo(path.with_suffix(".base"))
    with launch():
        layout = initialize_layout()
        loaded = load_pretrained(base, layout, num_attributes=2, precision=Precision.fp32)
        for name, parameter in loaded.model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        torch.nn.init.normal_(loaded.model.rm_head.weight, std=0.05)
        contract = build_contract(settings, loaded.tokenizer, Precision.fp32)
        contract = contract.with_label_means([1.5, 2.5])
        save_reward_model(path, loaded.model, loaded.config, loaded.tokenizer, contract)
        destroy_layout()
    return path


def chat(question: str, reply: str) -> list[dict[str, str]]:
    """A question and its reply, as messages."""
    turns = (("user", question), ("assistant", reply))
    return [{"role": role, "content": content} for role, content in turns]


def ranked(question: str, *replies: tuple[int, str]) -> dict[str, Any]:
    """A record of ranked replies, as NeMo RL writes them; a lower rank is better."""
    completions = [
        {"rank": rank, "completion": [{"role": "assistant", "content": text}]}
        for rank, text in replies
    ]
    return {"context": [{"role": "user", "content": question}], "completions": completions}


def sentence(rng: random.Random, low: int = 2, high: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def write_pairs(path: Path, count: int, seed: int = 0) -> Path:
    """Chat pairs whose chosen reply thanks and whose rejected reply does not."""
    rng = random.Random(seed)
    with path.open("w") as lines:
        for index in range(count):
            pair = {
                "prompt": f"{sentence(rng)} {index}",
                "chosen": f"thank you {sentence(rng)}",
                "rejected": sentence(rng),
            }
            lines.write(json.dumps(pair) + "\n")
    return path


def write_ratings(path: Path, count: int, attributes: tuple[str, ...], seed: int = 0) -> Path:
    """Rated replies; every fifth label is missing."""
    rng = random.Random(seed)
    with path.open("w") as lines:
        for index in range(count):
            labels = {
                name: None if (index + column) % 5 == 0 else rng.randint(0, 4)
                for column, name in enumerate(attributes)
            }
            row = {"prompt": f"{sentence(rng)} {index}", "response": sentence(rng), **labels}
            lines.write(json.dumps(row) + "\n")
    return path


def training(
    base: Path, folder: Path, train: Path | Sequence[Path], validation: Path | Sequence[Path] = ()
) -> list[str]:
    """Settings of a short training run in ``folder``; settings appended to them override them."""

    def listed(files: Path | Sequence[Path]) -> str:
        return ",".join(map(str, [files] if isinstance(files, Path) else files))

    return [
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix.train=[{listed(train)}]",
        f"model.data.data_prefix.validation=[{listed(validation)}]",
        "model.data.allow_prompt_overlap=true",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "model.data.seq_length=128",
        "model.micro_batch_tokens=160",
        "model.global_batch_size=8",
        "model.optim.lr=1e-3",
        "model.optim.sched.warmup_steps=2",
        "trainer.rm.max_epochs=10",
    ]


def logged(run: Path) -> dict[str, dict[int, float]]:
    """The metrics that a run logged, by name and step; a null is ``math.nan``.

    Only times may be logged twice in a step: a run that stops may publish two checkpoints in it.
    """
    metrics: dict[str, dict[int, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        for name, value in row.items():
            of_name = metrics.setdefault(name, {})
            assert step not in of_name or is_of_time(name), (name, step)
            of_name[step] = math.nan if value is None else value
    return metrics


def is_of_time(name: str) -> bool:
    return name.startswith("timing/") or "per_second" in name


def numbers(run: Path) -> dict[tuple[str, int], float]:
    """The metrics that a run logged by (name, step), without times."""
    return {
        (name, step): value
        for name, values in logged(run).items()
        if not is_of_time(name)
        for step, value in values.items()
    }


def environment(**more: str) -> dict[str, str]:
    """Environment variables of a script on a machine without a GPU, updated by ``more``."""
    # The caller's PYTHONPATH stays in effect: it may name folders with more packages.
    path = os.pathsep.join(filter(None, (str(ROOT), GIVEN.get("PYTHONPATH"))))
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return {**GIVEN, **ours, **more}


# Prepared processes start in the environment of most scripts, whichever script comes first.
PREPARED.fits(environment())


def temporary_files_in(folder: Path) -> dict[str, str]:
    """Environment variables that send temporary files to ``folder``.

    The cache of torch's compiler, which megatron-core 0.19 imports, goes next to it.
    """
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder.with_suffix(".kernels"))}


def run_script(
    script: str,
    *arguments: str,
    processes: int = 1,
    timeout: float = 300.0,
    check: bool = True,
    env: dict[str, str] | None = None,
    fresh: bool = False,
    folder: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run a script on ``processes`` ranks and return its output and exit code.

    With ``check`` it must succeed. With ``fresh`` python or torchrun starts it, as a user would
    (see launching.py). ``folder`` is the working directory.
    """
    command = [str(ROOT / script), *arguments]
    done = launch_script(command, environment(**(env or {})), processes, timeout, fresh, folder)
    if check and done.returncode != 0:
        raise AssertionError(
            f"{script} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        )
    return done


def run_verb(verb: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``nemo-aligner VERB ARGUMENTS``; ``options`` are those of ``run_script``."""
    return run_script("nemo_aligner/__main__.py", *verb.split(), *arguments, **options)
