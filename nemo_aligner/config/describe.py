"""Descriptions of settings, suggestions for unknown keys, and facts about the installed package.

- ``list_keys`` and ``render_keys`` list all settings of a schema, for ``--help`` and the docs.
- ``suggest_setting`` finds the setting that an unknown key was meant to be. It knows the names that
  other trainers use.
- ``install_command`` gives the command that installs an extra, ``find_conflict`` detects NVIDIA's
  package of the same name, ``find_settings`` finds the packaged YAML files.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from nemo_aligner import __version__
from nemo_aligner.config.common import HELP, as_yaml

# All settings of a verb with type, default and help text.

_WIDTH = 78
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true | false", str: "text"}


@dataclass(frozen=True)
class Key:
    """The description of one setting.

    Attributes:
        name: full key, such as ``model.optim.lr``.
        default: the default value as YAML.
        type: type annotation of the field.
        kind: the type in words, for users.
        choices: all values as YAML, if there are only a few; else empty.
        help_text: the line of ``--help`` that says what it is.
    """

    name: str
    default: str
    type: Any
    kind: str
    choices: tuple[str, ...]
    help_text: str


@cache
def types_of_fields(schema: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields; their annotations are texts, slow to evaluate."""
    return get_type_hints(schema)


@cache
def list_keys(schema: type) -> tuple[Key, ...]:
    """List every setting of ``schema``, including the settings in nested sections."""
    return tuple(_walk_keys(schema, ""))


def _walk_keys(schema: type, prefix: str) -> Iterator[Key]:
    hints, defaults = types_of_fields(schema), schema()
    for item in fields(schema):
        kind = hints[item.name]
        if is_dataclass(kind):
            yield from _walk_keys(kind, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            yield Key(
                name=prefix + item.name,
                default=as_yaml(getattr(defaults, item.name)),
                type=kind,
                kind=_describe_type(kind),
                choices=_list_choices(kind),
                help_text=item.metadata[HELP],
            )


def render_keys(schema: type) -> str:
    """Render every setting under its section, with type, default and help text."""
    lines: list[str] = []
    last_section = None
    for key in list_keys(schema):
        section, _, name = key.name.rpartition(".")
        if section != last_section:
            lines += ["", f"{section}:" if section else "settings without a section:"]
            last_section = section
        head = f"  {name}={key.default}  ({key.kind})"
        lines += textwrap.wrap(head, _WIDTH, subsequent_indent=" " * 6, break_long_words=False)
        lines += textwrap.wrap(
            key.help_text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    return "\n".join(lines[1:])


def _split_optional(kind: Any) -> tuple[list[Any], bool]:
    """Return the types of a union except None, and whether the union contains None."""
    parts = get_args(kind)
    if type(None) not in parts:
        return [kind], False
    return [part for part in parts if part is not type(None)], True


def without_null(kind: Any) -> Any:
    """Return the type ``T`` for ``T | None``; other types are returned unchanged."""
    parts, _ = _split_optional(kind)
    return parts[0] if len(parts) == 1 else kind


def _describe_type(kind: Any) -> str:
    (inner, *_), may_be_null = _split_optional(kind)
    if isinstance(inner, type) and issubclass(inner, Enum):
        words = " | ".join(member.value for member in inner)
    elif get_origin(inner) in (list, tuple):
        words = f"[{_TYPE_NAMES[get_args(inner)[0]]}, ...]"
    elif get_origin(inner) is dict:
        words = "key=value"
    else:
        words = _TYPE_NAMES[inner]
    return f"{words} | null" if may_be_null else words


def _list_choices(kind: Any) -> tuple[str, ...]:
    (inner, *_), may_be_null = _split_optional(kind)
    values: list[str] = []
    if isinstance(inner, type) and issubclass(inner, Enum):
        values = [member.value for member in inner]
    elif inner is bool:
        values = ["true", "false"]
    return (*values, "null") if values and may_be_null else tuple(values)


# Suggestions for misspelt keys, and for the names that other trainers give to settings.

# Smallest difflib ratio at which two last names (the parts after the last dot) are similar: they
# differ by one or two letters. At 0.75 "steps" would match "eps", and "base" would match "bias".
_NEAR = 0.8
# Smallest difflib ratio at which full keys of different sections, but with the same last name, are
# similar.
_MOVED = 0.65
# Smallest difflib ratio at which full keys are similar, if no other rule has found a candidate.
_MISSPELT = 0.85
_MICRO_BATCH = "model.micro_batch_tokens"
# For each of our settings its names in Hugging Face's Trainer, TRL, OpenRLHF, NeMo RL, PEFT and
# Megatron. If such a name has sections, only its last part is listed.
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
    "model.data.data_prefix.validation": "val eval_dataset val_files val_data_path",
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
    "rm_model_file": "model model_path reward_model",
    "data.path": "data data_path",
}
PEER_NAMES = {name: key for key, names in _CALLED_BY_PEERS.items() for name in names.split()}
# From the name of another trainer's setting to the words that say how our setting's unit differs.
_PEER_UNITS = {
    **{name: "counts tokens, not records" for name, to in PEER_NAMES.items() if to == _MICRO_BATCH},
    "gradient_accumulation_steps": "counts the records of a step, on all GPUs together",
    "warmup_ratio": "counts steps, not a fraction of them",
    "lr_warmup_ratio": "counts steps, not a fraction of them",
    "adam_beta1": "takes both betas",
    "adam_beta2": "takes both betas",
}
# NeMo RL's train_mb_tokens counts tokens, as our setting does, so their units do not differ.
del _PEER_UNITS["train_mb_tokens"]
_EVERY_STEP = "every step is logged"
# Settings of other trainers that this package does not have, and the reason (may be empty).
_PEERS_ONLY = {
    "logging_steps": _EVERY_STEP,
    "log_interval": _EVERY_STEP,
    "log_every_n_steps": _EVERY_STEP,
    "report_to": "each logger has a switch, as exp_manager.create_wandb_logger=true",
    "beta": "",  # DPO's setting; without this entry Adam's betas would be suggested
}


def suggestion(key: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that ``key`` (``section.name``, or a plain word) misspells, or None.

    A candidate with the same last name (the part after the last dot) comes first, then one with a
    similar last name in the same top-level section.
    """
    candidates = list(candidates)
    return _find_same_name(key, candidates) or _find_near_name(key, candidates)


def suggest_setting(key: str, candidates: Iterable[str]) -> str | None:
    """Return the setting that an unknown ``key`` was probably meant to be, or None.

    The last name of a key is the part after the last dot. The first rule that finds a setting wins:
    the same last name in a similar section, another trainer's name for a setting, a similar last
    name in the same top-level section, the only setting with the same last name, a similar full
    key.
    """
    candidates = list(candidates)
    name = key.rpartition(".")[2]
    if name in _PEERS_ONLY:
        return None
    near = _find_same_name(key, candidates)
    if near is None and PEER_NAMES.get(name) in candidates:
        near = PEER_NAMES[name]
    near = near or _find_near_name(key, candidates)
    if near is None:
        same_name = [
            candidate for candidate in candidates if _last_name(candidate) == name != "name"
        ]
        near_name = [
            candidate
            for candidate in candidates
            if _similarity(name, _last_name(candidate)) >= _NEAR
        ]
        misspelt = difflib.get_close_matches(key, near_name, n=1, cutoff=_MISSPELT)
        near = next(iter(same_name if len(same_name) == 1 else misspelt), None)
    return near


def describe_unknown(key: str, near: str | None) -> str:
    """Return what an error appends to "unknown key KEY".

    This is a suggestion of the setting ``near``. If ``near`` is None, it is the reason why this
    package has no such setting, or an empty text if no reason is known.
    """
    name = _last_name(key)
    if near is None:
        reason = _PEERS_ONLY.get(name)
        return f": {reason}" if reason else ""
    return f"; did you mean {near}{peer_unit(key, near)}?"


def peer_unit(key: str, near: str) -> str:
    """Describe how our setting ``near`` differs in its unit from another trainer's ``key``.

    The result ends a sentence, such as ", which takes both betas". It is empty if the units are
    the same.
    """
    name = _last_name(key)
    differs = name in _PEER_UNITS and PEER_NAMES.get(name) == near
    return f", which {_PEER_UNITS[name]}" if differs else ""


def _last_name(key: str) -> str:
    return key.rpartition(".")[2]


def _find_same_name(key: str, candidates: list[str]) -> str | None:
    section, _, name = key.rpartition(".")
    same_name = [candidate for candidate in candidates if _last_name(candidate) == name]
    keys_in_part = _keys_in_part(section, candidates)
    matches = [candidate for candidate in same_name if candidate in keys_in_part]
    matches += difflib.get_close_matches(key, same_name, cutoff=_MOVED)
    return next(iter(matches), None)


def _find_near_name(key: str, candidates: list[str]) -> str | None:
    section, _, name = key.rpartition(".")
    keys_by_name: dict[str, list[str]] = {}
    for candidate in _keys_in_part(section, candidates):
        keys_by_name.setdefault(_last_name(candidate), []).append(candidate)
    # difflib rates swapped letters ("rnak") too low, so names with the same letters come first.
    swapped = [known_name for known_name in keys_by_name if sorted(known_name) == sorted(name)]
    near_names = swapped or difflib.get_close_matches(name, keys_by_name, cutoff=_NEAR)
    matches = [match for near_name in near_names for match in keys_by_name[near_name]]
    same_section = [match for match in matches if match.rpartition(".")[0] == section]
    return next(iter(same_section or matches), None)


def _keys_in_part(section: str, candidates: list[str]) -> list[str]:
    """Return the candidates that are in the same top-level section as ``section``.

    If ``section`` is empty, return all candidates.
    """
    part = section.partition(".")[0]
    return [
        candidate for candidate in candidates if not section or candidate.startswith(f"{part}.")
    ]


def _similarity(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


# The installed package: its distribution, extras and settings files.
#
# PyPI's ``nemo_aligner`` is NVIDIA's NeMo-Aligner, so our distribution is not named like the import
# package. This part uses only the standard library, because it makes the error messages about
# missing packages.

DISTRIBUTION = "megatron-reward"
_NVIDIAS = "nemo_aligner"
_PACKAGE = Path(__file__).resolve().parent.parent
_SUFFIX = ".yaml"


def checkout() -> Path | None:
    """Return the folder of the git checkout that the package runs from, or None.

    It is None if the package was installed from a wheel.
    """
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "conf").is_dir() else None


def install_command(extra: str = "") -> str:
    """Return the pip command that installs an extra or, if ``extra`` is empty, this package.

    The package is on no package index. So in a git checkout the command installs the checkout; if
    the package came from a wheel, the command lists the packages of the extra.
    """
    root = checkout()
    if root is not None:
        return f"pip install -e '{root}{f'[{extra}]' * bool(extra)}'"
    wheel = f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"
    requirements = _list_requirements(extra) if extra else []
    return f"pip install {' '.join(requirements) or wheel}"


def _list_requirements(extra: str) -> list[str]:
    """List the requirements of an extra, quoted for a shell.

    The list is empty if the package is not installed, because then its metadata is missing.
    """
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []
    # A requirement of an extra has the marker extra == "name" after a semicolon.
    requirements = (line.partition(";") for line in lines)
    marker_pattern = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]""")
    return [
        f"'{requirement.strip()}'"
        for requirement, _, marker in requirements
        if marker_pattern.search(marker)
    ]


def find_conflict() -> str | None:
    """Return an error message if NVIDIA's NeMo-Aligner is installed, too; else None.

    Both packages are imported as ``nemo_aligner``, so they overwrite each other's files.
    """
    try:
        metadata = importlib.metadata.metadata(_NVIDIAS)
    except PackageNotFoundError:
        return None
    if not any("NVIDIA" in metadata[key] for key in ("Author", "Home-page") if key in metadata):
        return None
    return (
        f"NVIDIA's nemo_aligner {metadata['Version']} is installed in the same environment as "
        f"{DISTRIBUTION}. Both provide the import package nemo_aligner, so each overwrites files "
        "of the other. Use a separate environment, or: pip uninstall nemo_aligner, then "
        f"{install_command()} --force-reinstall --no-deps"
    )


def settings_folder() -> Path:
    """Return the folder of the packaged YAML settings.

    If the package came from a wheel, the folder is inside the package; else it is ``conf/`` of the
    git checkout.
    """
    inside = _PACKAGE / "conf"
    return inside if inside.is_dir() else _PACKAGE.parent / "conf"


def settings_names() -> list[str]:
    """List the names of the packaged settings for ``--config``, such as ``recipes/skywork_8b``."""
    folder = settings_folder()
    names = (path.relative_to(folder).with_suffix("") for path in folder.rglob(f"*{_SUFFIX}"))
    return sorted(name.as_posix() for name in names)


def find_settings(name: str | PathLike[str]) -> Path:
    """Return the path of a settings file: ``name`` is a path, or the name of packaged settings.

    If a file with this path exists, it has priority over packaged settings. If there is neither,
    ``name`` is returned as a path, and the caller reports that the file does not exist.
    """
    path = Path(name)
    if not path.is_file() and path.as_posix() in settings_names():
        return settings_folder() / f"{path.as_posix()}{_SUFFIX}"
    return path
