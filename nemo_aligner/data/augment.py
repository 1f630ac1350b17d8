"""Make pairs whose chosen reply answers the prompt and whose rejected reply answers another prompt.

They teach a reward model that a reply has to fit its prompt. ``nemo-aligner data augment`` writes
them.
"""

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
from nemo_aligner.data.records import Comparison, prompt_key
from nemo_aligner.utils.errors import DataError
from nemo_aligner.utils.writing import check_outputs, write_lines

SOURCE = "non-contextual"


@dataclass(frozen=True)
class Augment:
    """Settings of ``augment_file``, which makes pairs from the pairs of a file.

    Attributes:
        share: number of new pairs per pair of the file, for example 0.3.
        seed: seed of the draws.
        reading: rules by which the file is read; tied pairs are kept, as verdicts do not matter.
    """

    share: float = 0.3
    seed: int = 1
    reading: ReaderConfig = field(default_factory=ReaderConfig)


def augment_file(source: Path, output: Path, settings: Augment) -> str:
    """Write the new pairs of a file, in the format chat_pairs; return a report.

    Each new pair is a prompt with one of its replies, chosen, and a reply to another prompt,
    rejected: the non-contextual triplets of Liu et al. 2024, "RRM: Robust reward model training
    mitigates reward hacking", arXiv:2409.13156, section 3. Each reply is drawn from both replies of
    its pair, chosen and rejected, so that length and style do not hint at the label. The same file,
    share and seed give the same lines. ``output`` gets only the new pairs, not those of ``source``.

    Raises:
        ConfigError: ``output`` is ``source``.
        DataError: the file cannot be read, or its conversations have less than two prompts.
    """
    check_outputs({"output": output}, {"the file to augment": source})
    file = read_records(source, replace(settings.reading, kind=RecordKind.comparison, ties=True))
    # The fields of chat_pairs cannot hold tools and documents, which are part of a prompt.
    plain = [
        record for record in file.records if all(isinstance(text, list) for text in record.texts)
    ]
    keys = [prompt_key(record) for record in plain]
    if len(set(keys)) < 2:
        raise DataError(
            f"{source}: it has {len(set(keys))} prompts of conversations without tools or "
            "documents, and replies can only be exchanged between at least 2. Raw texts are not "
            "counted, because they do not show where the reply begins"
        )
    count, rng = round(settings.share * len(plain)), random.Random(settings.seed)
    pairs = _draw_pairs(plain, keys, count, rng)
    lines = [json.dumps(pair, ensure_ascii=False) for pair in pairs]
    dropped = len(file.records) - len(plain)
    without = f", without {dropped} of tools, documents or raw text" if dropped else ""
    if file.malformed:
        without += f"; {len(file.malformed)} more are malformed"
    return (
        f"{source}: {file.format}, {len(file.records)} records{without}\n"
        f"{len(lines)} pairs with a reply of another prompt -> {write_lines(output, lines)}"
    )


def _draw_pairs(
    records: Sequence[Comparison], keys: Sequence[str], count: int, rng: random.Random
) -> list[dict[str, Any]]:
    pairs: list[dict[str, Any]] = []
    while len(pairs) < count:
        # Use every record equally often, or once more than others: draw without replacement until
        # all records are used, then again.
        for index in rng.sample(range(len(records)), min(len(records), count - len(pairs))):
            donor = rng.randrange(len(records))
            while keys[donor] == keys[index]:
                donor = rng.randrange(len(records))
            pairs.append(_draw_pair(records[index], records[donor], rng))
    return pairs


def _draw_pair(record: Comparison, donor: Comparison, rng: random.Random) -> dict[str, Any]:
    """Draw a chosen reply of ``record``, and a rejected one of ``donor``, to another prompt."""
    *prompt, chosen = messages_of(rng.choice(record.texts))
    *_, rejected = messages_of(rng.choice(donor.texts))
    return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected], "source": SOURCE}
