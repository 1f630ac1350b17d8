"""What the last validation made of every record, in files that ``nemo-aligner report`` reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.run_folder import HELDOUT_NAME
from nemo_aligner.config.common import RecordKind
from nemo_aligner.console import say
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.reading import Reading, parse_file
from nemo_aligner.data.records import Origin
from nemo_aligner.data.reward_rows import PAIR_COLUMNS, reward_row, row_lines
from nemo_aligner.data.write import replace_lines
from nemo_aligner.errors import AlignerError
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.messages import Text
from nemo_aligner.text.one_reward import one_reward

# Of HH's lengths some 6 MB, which every validation writes anew.
MOST_RECORDS = 5000


class HeldoutRewards:
    """Writes ``<run>/heldout/<set>.jsonl``, whose lines are those of evaluate's ``output_rewards``.

    Of a set of more than ``most`` records it is those drawn once by a fixed seed. The texts are
    read again from the data's files, at the first validation.
    """

    def __init__(
        self, run: Path, how: Reading, contract: ScoringContract, most: int = MOST_RECORDS
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
            self._texts[dataset.name] = self._read_texts([dataset.origins[i] for i in chosen])
        texts = self._texts[dataset.name]
        if texts:
            is_pairs = dataset.kind is RecordKind.comparison
            describe = self._pairs if is_pairs else self._ratings
            rows = describe(dataset, rewards.double().cpu(), chosen, texts)
            replace_lines(self._folder / f"{dataset.name}.jsonl", row_lines(rows))

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

    def _read_texts(self, origins: Sequence[Origin]) -> list[tuple[Text, ...]]:
        """Of every record its texts; none where a file is no longer what was tokenized."""
        known: dict[Origin, tuple[Text, ...]] = {}
        try:
            for path in dict.fromkeys(origin.path for origin in origins):
                known |= {each.origin: each.texts for each in parse_file(path, self._how).records}
            return [known[origin] for origin in origins]
        except (AlignerError, OSError, KeyError) as error:
            say(f"held-out rewards are not kept for a report: the texts are not there: {error}")
            return []


def _draw(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return sorted(random.Random(0).sample(range(count), most))
