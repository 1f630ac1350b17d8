"""More pairs from the same data: a prompt's own reply against one that was given to another."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import messages_of
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.data.records import Comparison, prompt_key, write_lines
from nemo_aligner.utils.errors import ConfigError, DataError

SOURCE = "non-contextual"


@dataclass(frozen=True)
class Augment:
    """Rules of an augmentation.

    Attributes:
        share: new pairs for each pair of the file.
        reading: rules by which the file is read; ties are kept.
    """

    share: float = 0.3
    seed: int = 1
    reading: ReaderConfig = field(default_factory=ReaderConfig)


def augment_file(source: Path, output: Path, how: Augment) -> str:
    """Write new pairs, in chat_pairs format, and not those of ``source``; return a report.

    Each is a prompt with one of its replies, chosen, and a reply of another prompt, rejected: the
    non-contextual triplets of Liu et al. 2024, "RRM: Robust reward model training mitigates reward
    hacking", arXiv:2409.13156, section 3. Which reply of either pair is taken is a coin's, so that
    length and style, which a reply has at any prompt, say nothing about the label. The same file,
    share and seed give the same lines.

    Raises:
        ConfigError: ``output`` is the file itself.
        DataError: the file cannot be read, its texts are raw or it has a single prompt.
    """
    if source.resolve() == output.resolve():
        raise ConfigError(f"output: got {output}, the file to augment; wanted another")
    file = read_records(source, replace(how.reading, kind=RecordKind.comparison, ties=True))
    # Tools and documents are part of a prompt, and have no place in pairs of plain fields.
    plain = [each for each in file.records if all(isinstance(text, list) for text in each.texts)]
    keys = [prompt_key(record) for record in plain]
    if len(set(keys)) < 2:
        raise DataError(
            f"{source}: got {len(set(keys))} prompts of plain conversations, wanted at least 2: "
            "a raw text does not say where its reply begins"
        )
    lines = [
        json.dumps(pair, ensure_ascii=False)
        for pair in _pairs(plain, keys, round(how.share * len(plain)), random.Random(how.seed))
    ]
    left = len(file.records) - len(plain)
    without = f", without {left} of tools, documents or raw text" if left else ""
    return (
        f"{source}: {file.format}, {len(file.records)} records{without}\n"
        f"{len(lines)} pairs with a reply of another prompt -> {write_lines(output, lines)}"
    )


def _pairs(
    records: Sequence[Comparison], keys: Sequence[str], count: int, rng: random.Random
) -> list[dict[str, Any]]:
    pairs: list[dict[str, Any]] = []
    while len(pairs) < count:
        # As often each as the others, give or take one.
        for own in rng.sample(range(len(records)), min(len(records), count - len(pairs))):
            other = rng.randrange(len(records))
            while keys[other] == keys[own]:
                other = rng.randrange(len(records))
            pairs.append(_pair(records[own], records[other], rng))
    return pairs


def _pair(own: Comparison, other: Comparison, rng: random.Random) -> dict[str, Any]:
    *prompt, chosen = messages_of(rng.choice(own.texts))
    *_, rejected = messages_of(rng.choice(other.texts))
    return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected], "source": SOURCE}
