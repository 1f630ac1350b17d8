"""Rewards of the last validation for every record, in files that ``nemo-aligner report`` reads."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.run_folder import HELDOUT_NAME
from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.readout import one_reward
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.readers import ReaderConfig, parse_file
from nemo_aligner.data.records import PAIR_COLUMNS, Origin, reward_row, row_lines, write_lines
from nemo_aligner.training.learner import rewards_of_texts
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import AlignerError, DataError

# Some 6 MB at the lengths of HH-RLHF, rewritten by every validation.
MOST_RECORDS = 5000


class HeldoutRewards:
    """Writes ``<run>/heldout/<set>.jsonl``, whose lines are those of evaluate's ``output_rewards``.

    Of a set of more than ``most`` records it is those drawn once by a fixed seed. The texts are
    read again from the data's files, at the first validation.
    """

    def __init__(
        self, run: Path, how: ReaderConfig, contract: ScoringContract, most: int = MOST_RECORDS
    ) -> None:
        self._folder = run / HELDOUT_NAME
        self._how = how
        self._contract = contract
        self._most = most
        self._texts: dict[str, list[tuple[Text, ...]]] = {}

    def keep(self, dataset: TokenizedDataset, rewards: Tensor) -> None:
        """Write the records of a set.

        Args:
            rewards: ``[S, A]`` of every sequence, label means added.
        """
        chosen = _draw(len(dataset), self._most)
        if dataset.name not in self._texts:
            self._texts[dataset.name] = self._read_texts(dataset.origins, chosen)
        texts = self._texts[dataset.name]
        if texts:
            if dataset.steps is not None:
                how = self._contract.aggregation
                rewards = rewards_of_texts(rewards.cpu(), dataset.records, how)
                dataset = replace(dataset, records=dataset.records.of_texts(), steps=None)
            is_pairs = dataset.kind is RecordKind.comparison
            describe = self._pairs if is_pairs else self._ratings
            rows = describe(dataset, rewards.double().cpu(), chosen, texts)
            write_lines(self._folder / f"{dataset.name}.jsonl", row_lines(rows))

    def _pairs(
        self,
        dataset: TokenizedDataset,
        rewards: Tensor,
        chosen: Sequence[int],
        texts: Sequence[tuple[Text, ...]],
    ) -> list[dict[str, Any]]:
        records = dataset.records.select(chosen)
        of_texts = rewards[dataset.records.rows(chosen)].numpy()
        merged = torch.from_numpy(one_reward(of_texts, self._contract.attribute_weights))
        flat = [text for each in texts for text in each]
        pairs = records.pairs()
        found = torch.stack(pairs.of(merged.view(-1)), dim=1).tolist()
        sides = torch.stack(pairs.of(torch.arange(len(flat))), dim=1).tolist()
        owners = pairs.of_records(torch.tensor(chosen)).tolist()
        return [
            reward_row(
                dataset.kind,
                dataset.origins[owner],
                dataset.sources[owner],
                dict(zip(PAIR_COLUMNS, values, strict=True)),
                [flat[side] for side in both],
            )
            for owner, values, both in zip(owners, found, sides, strict=True)
        ]

    def _ratings(
        self,
        dataset: TokenizedDataset,
        rewards: Tensor,
        chosen: Sequence[int],
        texts: Sequence[tuple[Text, ...]],
    ) -> list[dict[str, Any]]:
        names, columns = self._contract.attributes, dataset.records.labels
        order = [columns.names.index(name) for name in names]
        labels = columns.values[:, order].tolist()
        return [
            reward_row(
                dataset.kind,
                dataset.origins[record],
                dataset.sources[record],
                dict(zip(names, rewards[record].tolist(), strict=True)),
                own,
                labels=dict(zip(names, labels[record], strict=True)),
            )
            for record, own in zip(chosen, texts, strict=True)
        ]

    def _read_texts(
        self, origins: Sequence[Origin], chosen: Sequence[int]
    ) -> list[tuple[Text, ...]]:
        """Read the texts of the ``chosen`` of all records; none if their file has changed."""
        texts_by_origin: dict[Origin, list[tuple[Text, ...]]] = {}
        try:
            for path in dict.fromkeys(origins[index].path for index in chosen):
                for record in parse_file(path, self._how).records:
                    texts_by_origin.setdefault(record.origin, []).append(record.texts)
            numbers = _numbers_in_line(origins, chosen, texts_by_origin)
            return [texts_by_origin[origins[index]][numbers[index]] for index in chosen]
        except (AlignerError, OSError, KeyError) as error:
            say(f"held-out rewards are not kept for a report: their texts cannot be read: {error}")
            return []


def _numbers_in_line(
    origins: Sequence[Origin],
    chosen: Sequence[int],
    texts_by_origin: Mapping[Origin, Sequence[tuple[Text, ...]]],
) -> dict[int, int]:
    """Number each of the ``chosen`` records among those that are made of the same line.

    Raises:
        DataError: a record of the line was dropped, and nothing says which.
    """
    lines = {origins[index] for index in chosen}
    indices: dict[Origin, list[int]] = {}
    for index, origin in enumerate(origins):
        if origin in lines:
            indices.setdefault(origin, []).append(index)
    for origin, texts in texts_by_origin.items():
        if origin in lines and len(texts) != len(indices[origin]):
            raise DataError(
                f"{origin}: {len(texts)} records are made of this line, and "
                f"{len(indices[origin])} of them were used. Which ones is not known."
            )
    return {index: number for line in indices.values() for number, index in enumerate(line)}


def _draw(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return sorted(random.Random(0).sample(range(count), most))
