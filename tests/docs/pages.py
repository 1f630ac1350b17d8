"""The pages of the documentation, their code blocks, and the commands in these."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.harness.launching import ROOT

PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.md")]
    if path.is_file()
)
PROGRAMS = re.compile(
    r"(?:\w+=\S+ )*(?:nemo-aligner|bash|curl|docker|export|for|git|kubectl|pip|python[\d.]*|sbatch|"
    r"source|srun|torchrun|\S+/pip) "
)
# How a command can begin, and the verb to which the remaining words belong.
STARTS = {
    "nemo-aligner": [],
    "scripts/slurm/train_reward_model.sbatch": ["train"],
    "scripts/slurm/train_on_one_node.sbatch": ["train"],
    "scripts/slurm/train_seeds.sbatch": ["train"],
    "scripts/quickstart.sh": ["quickstart"],
    "examples/train_reward_model.py": ["train"],
    "examples/evaluate_reward_model.py": ["evaluate"],
    "examples/serve_reward_model.py": ["serve"],
    "examples/serve_ppo_critic.py": ["serve-critic"],
    "examples/score.py": ["score"],
}


def name_of(page: Path) -> str:
    """A page's path for people, such as ``docs/migration/trl.md``."""
    return page.relative_to(ROOT).as_posix()


def pieces(page: Path) -> list[str]:
    """A page split at fences: every other piece is code, whose first line may name its language."""
    return re.split(r"^```", page.read_text(), flags=re.MULTILINE)


def every_block(page: Path) -> list[tuple[str, str]]:
    """Language and text of every code block."""
    parts = (piece.partition("\n") for piece in pieces(page)[1::2])
    return [(language, text) for language, _, text in parts]


def blocks(page: Path, language: str) -> list[str]:
    """The text of every code block in a language."""
    return [text for block_language, text in every_block(page) if block_language == language]


def commands(page: Path) -> list[list[str]]:
    """The verb and arguments of every command in a page's code blocks."""
    parsed = []
    for _, text in every_block(page):
        for line in text.replace("\\\n", " ").splitlines():
            if any(start in line for start in STARTS) and not line.startswith("usage:"):
                words = shlex.split(line.partition("|")[0].strip(), comments=True)
                for index, word in enumerate(words):
                    if word in STARTS:
                        parsed.append([*STARTS[word], *words[index + 1 :]])
    return parsed


def shell_commands(text: str) -> list[str]:
    """Every command of a shell block, with its continuation lines."""
    commands: list[str] = []
    loop = False
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if loop:
            commands[-1] += f"\n{line}"
        elif PROGRAMS.match(line):
            commands.append(line)
        loop = (loop or line.startswith("for ")) and line != "done"
    return commands


def split_verb(words: list[str]) -> tuple[str, list[str]]:
    """The verb, of one word or two, and its arguments."""
    count = 2 if words[0] == "data" else 1
    return " ".join(words[:count]), words[count:]
