"""Describe settings (key, type, default, help), suggest near misses, and say what the package
brings.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from nemo_aligner import __version__
from nemo_aligner.config.common import ABOUT, as_yaml

# Settings: keys, types, defaults, purposes.

_WIDTH = 78
_WORDS = {int: "a whole number", float: "a number", bool: "true | false", str: "text"}


@dataclass(frozen=True)
class Key:
    """One setting.

    Attributes:
        name: with its sections, as in ``model.optim.lr``.
        default: as it is written in YAML.
        type: of its values.
        kind: their type in words.
        choices: its values, where there are few.
        about: what it is for.
    """

    name: str
    default: str
    type: Any
    kind: str
    choices: tuple[str, ...]
    about: str


def list_keys(schema: type, prefix: str = "") -> Iterator[Key]:
    """List every key of ``schema``; sections are not keys."""
    hints, defaults = get_type_hints(schema), schema()
    for item in fields(schema):
        kind = hints[item.name]
        if is_dataclass(kind):
            yield from list_keys(kind, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            yield Key(
                name=prefix + item.name,
                default=as_yaml(getattr(defaults, item.name)),
                type=kind,
                kind=_describe(kind),
                choices=_choices(kind),
                about=item.metadata[ABOUT],
            )


def render_keys(schema: type) -> str:
    """Render every key under its section, with type, default and purpose."""
    lines: list[str] = []
    last = None
    for key in list_keys(schema):
        section, _, name = key.name.rpartition(".")
        if section != last:
            lines += ["", f"{section}:" if section else "settings without a section:"]
            last = section
        head = f"  {name}={key.default}  ({key.kind})"
        lines += textwrap.wrap(head, _WIDTH, subsequent_indent=" " * 6, break_long_words=False)
        lines += textwrap.wrap(key.about, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines[1:])


def _without_null(kind: Any) -> tuple[list[Any], bool]:
    parts = get_args(kind)
    if type(None) not in parts:
        return [kind], False
    return [part for part in parts if part is not type(None)], True


def _describe(kind: Any) -> str:
    (inner, *_), may_be_null = _without_null(kind)
    if isinstance(inner, type) and issubclass(inner, Enum):
        words = " | ".join(each.value for each in inner)
    elif get_origin(inner) in (list, tuple):
        words = f"[{_WORDS[get_args(inner)[0]]}, ...]"
    elif get_origin(inner) is dict:
        words = "key=value"
    else:
        words = _WORDS[inner]
    return f"{words} | null" if may_be_null else words


def _choices(kind: Any) -> tuple[str, ...]:
    (inner, *_), may_be_null = _without_null(kind)
    values: list[str] = []
    if isinstance(inner, type) and issubclass(inner, Enum):
        values = [each.value for each in inner]
    elif inner is bool:
        values = ["true", "false"]
    return (*values, "null") if values and may_be_null else tuple(values)


# Suggestions for misspelt names, and for the names that other trainers give to settings.

# Least difflib ratios. Names: a letter or two apart; at 0.75 "steps" is near "eps", "base" "bias".
_NEAR = 0.8
# Whole keys with the same last name.
_MOVED = 0.65
# Whole keys, where nothing else is near.
_MISSPELT = 0.85
_MICRO_BATCH = "model.micro_batch_tokens"
# What Hugging Face's Trainer, TRL, OpenRLHF, NeMo RL, PEFT and Megatron call a setting; of a name
# with sections the last part.
_CALLED_BY_PEERS = {
    "trainer.rm.max_steps": "steps num_steps max_num_steps train_iters",
    "model.optim.lr": "learning_rate",
    "model.optim.weight_decay": "weight_decay l2",
    "model.optim.betas": "adam_beta1 adam_beta2 adam_betas",
    "model.optim.eps": "adam_epsilon",
    "model.optim.sched.name": "lr_scheduler_type lr_scheduler",
    "model.optim.sched.warmup_steps": "lr_warmup_iters warmup warmup_ratio lr_warmup_ratio",
    "trainer.rm.gradient_clip_val": "max_grad_norm max_norm clip_grad",
    "trainer.rm.max_epochs": "num_train_epochs max_num_epochs num_epochs epochs",
    "trainer.rm.val_check_interval": "eval_steps val_period eval_interval",
    "trainer.rm.save_interval": "save_steps save_period",
    "model.global_batch_size": (
        "batch_size train_batch_size train_global_batch_size gradient_accumulation_steps"
    ),
    _MICRO_BATCH: (
        "per_device_train_batch_size micro_train_batch_size train_micro_batch_size "
        "micro_batch_size train_mb_tokens"
    ),
    "model.lora.rank": "r dim lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "target_modules lora_target_modules",
    "model.data.seq_length": (
        "max_length max_len max_seq_len max_seq_length max_total_sequence_length"
    ),
    "model.data.template": "chat_template chat_template_path",
    "model.activations_checkpoint_granularity": (
        "gradient_checkpointing activation_checkpointing recompute_granularity"
    ),
    "model.activations_offload": "activation_offloading enable_activation_offloading",
    "pretrained_checkpoint.restore_from_path": "model_name_or_path model_name pretrain",
    "model.data.data_prefix.train": "dataset dataset_name train_files train_data_path",
    "model.data.data_prefix.validation": "eval_dataset val_files val_data_path",
    "exp_manager.explicit_log_dir": "output_dir save_path checkpoint_dir",
    "exp_manager.resume_if_exists": "resume_from_checkpoint",
    "model.objective": "loss loss_type",
    "exp_manager.checkpoint_callback_params.monitor": "metric_for_best_model",
    "exp_manager.checkpoint_callback_params.save_top_k": "save_total_limit keep_top_k",
    "model.tensor_model_parallel_size": "tp tensor_parallel_size",
    "model.pipeline_model_parallel_size": "pp pipeline_parallel_size",
    "model.expert_model_parallel_size": "ep expert_parallel_size",
    "model.context_parallel_size": "cp ring_attn_size",
    "trainer.precision": "dtype torch_dtype bf16 fp16",
}
PEER_NAMES = {name: key for key, names in _CALLED_BY_PEERS.items() for name in names.split()}
# How the value of the key here differs from the value of the peer's.
_PEER_UNITS = {
    **{name: "counts tokens, not records" for name, to in PEER_NAMES.items() if to == _MICRO_BATCH},
    "gradient_accumulation_steps": "counts the records of a step, on all GPUs together",
    "warmup_ratio": "counts steps, not a fraction of them",
    "lr_warmup_ratio": "counts steps, not a fraction of them",
    "adam_beta1": "takes both betas",
    "adam_beta2": "takes both betas",
}
del _PEER_UNITS["train_mb_tokens"]  # NeMo RL's counts tokens, too
_EVERY_STEP = "every step is logged"
# Names that others have, and nothing here has: why, or "".
_PEERS_ONLY = {
    "logging_steps": _EVERY_STEP,
    "log_interval": _EVERY_STEP,
    "log_every_n_steps": _EVERY_STEP,
    "report_to": "each logger has a switch, as exp_manager.create_wandb_logger=true",
    "beta": "",  # DPO's, and not one of Adam's betas
}


def suggestion(key: str, known: Iterable[str]) -> str | None:
    """Find the key of ``known`` that ``key`` (``section.name``, or a plain word) misspells.

    A key with the same last name comes first, then one with nearly the same last name in the same
    part of the settings (up to the first dot).
    """
    known = list(known)
    return _same_name(key, known) or _near_name(key, known)


def suggest_setting(key: str, known: Iterable[str]) -> str | None:
    """Find the setting of ``known`` that ``key`` stands for.

    The same name nearby comes first, then another trainer's name for it, a near name in the same
    part of the settings, the one key of the same name anywhere, and last a whole key that is near.
    """
    known = list(known)
    name = key.rpartition(".")[2]
    if name in _PEERS_ONLY:
        return None
    near = _same_name(key, known)
    if near is None and PEER_NAMES.get(name) in known:
        near = PEER_NAMES[name]
    near = near or _near_name(key, known)
    if near is None:
        same_name = [each for each in known if each.rpartition(".")[2] == name and name != "name"]
        near_name = [each for each in known if _ratio(name, each.rpartition(".")[2]) >= _NEAR]
        misspelt = difflib.get_close_matches(key, near_name, n=1, cutoff=_MISSPELT)
        near = next(iter(same_name if len(same_name) == 1 else misspelt), None)
    return near


def describe_unknown(key: str, near: str | None) -> str:
    """End an error about the unknown ``key`` with the setting ``near`` it, or with why none is."""
    name = key.rpartition(".")[2]
    if near is None:
        reason = _PEERS_ONLY.get(name)
        return f": {reason}" if reason else ""
    return f"; did you mean {near}{peer_unit(key, near)}?"


def peer_unit(key: str, near: str) -> str:
    """Say how the unit of ``near`` differs from that of another trainer's ``key``; "" if not."""
    name = key.rpartition(".")[2]
    differs = name in _PEER_UNITS and PEER_NAMES.get(name) == near
    return f", which {_PEER_UNITS[name]}" if differs else ""


def _same_name(key: str, known: list[str]) -> str | None:
    section, _, name = key.rpartition(".")
    same_name = [each for each in known if each.rpartition(".")[2] == name]
    moved = [each for each in same_name if each in _in_part(section, known)]
    moved += difflib.get_close_matches(key, same_name, cutoff=_MOVED)
    return next(iter(moved), None)


def _near_name(key: str, known: list[str]) -> str | None:
    section, _, name = key.rpartition(".")
    by_name: dict[str, list[str]] = {}
    for each in _in_part(section, known):
        by_name.setdefault(each.rpartition(".")[2], []).append(each)
    # Swapped letters make a short name as far from its own as from others.
    swapped = [each for each in by_name if sorted(each) == sorted(name)]
    near = swapped or difflib.get_close_matches(name, by_name, cutoff=_NEAR)
    candidates = [each for found in near for each in by_name[found]]
    own = [each for each in candidates if each.rpartition(".")[0] == section]
    return next(iter(own or candidates), None)


def _in_part(section: str, known: list[str]) -> list[str]:
    part = section.partition(".")[0]
    return [each for each in known if not section or each.startswith(f"{part}.")]


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


# The installed package: its distribution, extras and settings files.
#
# PyPI's ``nemo_aligner`` is NVIDIA's NeMo-Aligner, so the distribution has another name than the
# import package. This part imports only the standard library, because it words the errors about
# missing packages.

DISTRIBUTION = "megatron-reward"
_NVIDIAS = "nemo_aligner"
_PACKAGE = Path(__file__).resolve().parent.parent
_ENDING = ".yaml"


def checkout() -> Path | None:
    """The repository that this process runs the package from; None when it is out of a wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "conf").is_dir() else None


def install_command(extra: str = "") -> str:
    """Return the pip command that installs an extra, or for "" this package and its requirements.

    The package is on no index: the command installs from the checkout or, if the package came from
    a wheel, names the packages of the extra.
    """
    root = checkout()
    if root is not None:
        return f"pip install -e '{root}{f'[{extra}]' * bool(extra)}'"
    wheel = f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"
    brought = _requirements_of(extra) if extra else []
    return f"pip install {' '.join(brought) or wheel}"


def _requirements_of(extra: str) -> list[str]:
    """List requirements quoted for a shell; none without the package's metadata."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []
    # Of an extra is what has the marker extra == "name" behind the semicolon.
    split = (line.partition(";") for line in lines)
    of_extra = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]""")
    return [f"'{what.strip()}'" for what, _, marker in split if of_extra.search(marker)]


def find_conflict() -> str | None:
    """Return the problem if NVIDIA's NeMo-Aligner is installed beside this package, else None."""
    try:
        found = importlib.metadata.metadata(_NVIDIAS)
    except PackageNotFoundError:
        return None
    if not any("NVIDIA" in found[key] for key in ("Author", "Home-page") if key in found):
        return None
    return (
        f"NVIDIA's nemo_aligner {found['Version']} is installed beside {DISTRIBUTION}, and both "
        "bring the import package nemo_aligner: each overwrites files of the other. Use an "
        f"environment of its own, or: pip uninstall nemo_aligner, then {install_command()} "
        "--force-reinstall --no-deps"
    )


def settings_folder() -> Path:
    """Return the folder of YAML settings: inside the package in a wheel, else ``conf/``."""
    inside = _PACKAGE / "conf"
    return inside if inside.is_dir() else _PACKAGE.parent / "conf"


def settings_names() -> list[str]:
    """List the names that ``--config`` takes beside paths, as ``recipes/skywork_8b``."""
    folder = settings_folder()
    found = (path.relative_to(folder).with_suffix("") for path in folder.rglob(f"*{_ENDING}"))
    return sorted(path.as_posix() for path in found)


def find_settings(given: str | PathLike[str]) -> Path:
    """Find a settings file by its path or, if there is none, by a name in the package."""
    path = Path(given)
    if not path.is_file() and path.as_posix() in settings_names():
        return settings_folder() / f"{path.as_posix()}{_ENDING}"
    return path
