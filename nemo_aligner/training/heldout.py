"""Write the rewards of the last validation to files, for ``nemo-aligner report``.

At the end of a run, the last validation is that of the exported model.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
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
from nemo_aligner.data.formats import format_named
from nemo_aligner.data.readers import ReaderConfig, open_file
from nemo_aligner.data.records import PAIR_COLUMNS, Origin, Record, reward_row, row_lines
from nemo_aligner.training.learner import rewards_of_samples
from nemo_aligner.training.side_outputs import RUN_FOLDER, attempt_output
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import AlignerError, short
from nemo_aligner.utils.writing import write_lines

# Maximum number of records that are written per validation set. The number is limited because every
# validation rewrites the file. With samples as long as those of HH-RLHF, the file takes about 6 MB.
MOST_RECORDS = 5000


def delete_earlier_rewards(run: Path, unchanged_sets: Collection[str]) -> None:
    """Delete the rewards that an earlier part of the run wrote on other records or on test sets.

    They are those of an earlier model, and this part of the run may end without replacing them.

    Args:
        unchanged_sets: names of the validation sets that have the same records as earlier.
    """

    def delete() -> None:
        for kind in ("validation", "test"):
            for path in (run / HELDOUT_NAME).glob(f"{kind}-*.jsonl"):
                if path.stem not in unchanged_sets:
                    path.unlink()

    consequence = "the report may show rewards of an earlier model"
    attempt_output(delete, HELDOUT_NAME, "deleting earlier rewards", consequence)


class HeldoutRewards:
    """Writes ``<run>/heldout/<set>.jsonl`` in the format of ``evaluate``'s ``output_rewards`` file.

    If a set has more than ``most_records`` records, it writes a random sample, always the same one.
    A tokenized data set does not keep the text of its records, so the first validation reads it
    from the data files again.
    If a file cannot be written, a message is printed, and no rewards are written any more.
    """

    def __init__(
        self,
        run: Path,
        reader: ReaderConfig,
        contract: ScoringContract,
        most_records: int = MOST_RECORDS,
    ) -> None:
        self._folder = run / HELDOUT_NAME
        self._reader = reader
        self._contract = contract
        self._most_records = most_records
        self._texts: dict[str, dict[int, tuple[Text, ...]]] = {}
        self._is_dropped = False

    def keep(self, dataset: TokenizedDataset, rewards: Tensor) -> None:
        """Write the sampled records of a validation set with their text and rewards.

        Args:
            rewards: rewards ``[S, A]`` of all records of the set, with label means added.
        """
        if not self._is_dropped:
            consequence = "the report will not have the rewards of this and later validations"
            write = partial(self._write, dataset, rewards)
            self._is_dropped = not attempt_output(write, self._folder.name, "writing", consequence)

    def _write(self, dataset: TokenizedDataset, rewards: Tensor) -> None:
        """Write the file of a validation set, with the arguments of ``keep``."""
        if dataset.name not in self._texts:
            sample = _draw_sample(len(dataset), self._most_records)
            self._texts[dataset.name] = self._read_texts(dataset, sample)
        chosen = list(self._texts[dataset.name])
        texts = list(self._texts[dataset.name].values())
        rows: list[dict[str, Any]] = []
        if texts:
            aggregation = self._contract.aggregation
            merged = rewards_of_samples(rewards.cpu(), dataset.records, aggregation)
            is_pairs = dataset.kind is RecordKind.comparison
            describe = self._pairs if is_pairs else self._ratings
            rows = describe(dataset, merged, chosen, texts)
        path = self._folder / f"{dataset.name}.jsonl"
        # Comparisons whose samples are all tied have no pairs.
        if rows:
            write_lines(path, row_lines(rows), RUN_FOLDER)
        else:
            path.unlink(missing_ok=True)

    def _pairs(
        self,
        dataset: TokenizedDataset,
        rewards: Tensor,
        chosen: Sequence[int],
        texts: Sequence[tuple[Text, ...]],
    ) -> list[dict[str, Any]]:
        """Convert the ``chosen`` records to lines of the file, one for each pair of replies.

        A record of three or more ranked replies has several pairs.
        """
        records = dataset.records.select(chosen)
        of_samples = rewards[dataset.records.sample_rows(chosen)].numpy()
        merged = torch.from_numpy(one_reward(of_samples, self._contract.attribute_weights))
        flat = [text for record_texts in texts for text in record_texts]
        pairs = records.pairs()
        pair_rewards = torch.stack(pairs.of(merged.view(-1)), dim=1).tolist()
        sides = torch.stack(pairs.of(torch.arange(len(flat))), dim=1).tolist()
        owners = pairs.of_records(torch.tensor(chosen)).tolist()
        return [
            reward_row(
                dataset.kind,
                dataset.origins[owner],
                dataset.sources[owner],
                dict(zip(PAIR_COLUMNS, values, strict=True)),
                [flat[side] for side in pair],
            )
            for owner, values, pair in zip(owners, pair_rewards, sides, strict=True)
        ]

    def _ratings(
        self,
        dataset: TokenizedDataset,
        rewards: Tensor,
        chosen: Sequence[int],
        texts: Sequence[tuple[Text, ...]],
    ) -> list[dict[str, Any]]:
        """Convert the ``chosen`` records, which are ratings, to one line of the file each."""
        names, columns = self._contract.attributes, dataset.records.labels
        order = [columns.names.index(name) for name in names]
        # A rating of a sample with steps has a row of labels for each step. The last row has the
        # labels of the whole sample.
        rows = dataset.records.label_bounds[1:] - 1
        labels = columns.values[rows][:, order].tolist()
        return [
            reward_row(
                dataset.kind,
                dataset.origins[record],
                dataset.sources[record],
                dict(zip(names, rewards[record].tolist(), strict=True)),
                record_texts,
                labels=dict(zip(names, labels[record], strict=True)),
            )
            for record, record_texts in zip(chosen, texts, strict=True)
        ]

    def _read_texts(
        self, dataset: TokenizedDataset, chosen: Sequence[int]
    ) -> dict[int, tuple[Text, ...]]:
        """Read the texts of the ``chosen`` records from the data files, for the report.

        Returns:
            The texts of each chosen record, by its index. Records whose texts cannot be told from
            those of other records of the same line are left out. If the texts cannot be read, e.g.
            because a file has changed since it was tokenized, there are none. In both cases a
            message is printed, and the run continues without a report of these rewards.
        """
        lines: defaultdict[str, set[int]] = defaultdict(set)
        for index in chosen:
            lines[dataset.origins[index].path].add(dataset.origins[index].line)
        texts_by_origin: dict[Origin, list[tuple[Text, ...]]] = {}
        try:
            for path, numbers in lines.items():
                for record in _read_records_at(path, numbers, self._reader):
                    texts_by_origin.setdefault(record.origin, []).append(record.texts)
            return _pick_texts(dataset, chosen, texts_by_origin)
        except (AlignerError, OSError, KeyError) as error:
            say(
                "the report will have no held-out rewards, because the texts of the validation "
                f"set cannot be read: {short(error)}"
            )
            return {}


def _read_records_at(path: str, numbers: set[int], reader: ReaderConfig) -> Iterator[Record]:
    """Read the records of a file that begin at the lines with these numbers, and parse no others.

    The file may have millions of records, and all ranks wait for it.

    Raises:
        DataError: the file cannot be read.
    """
    rules, blocks = open_file(path, reader)
    size = format_named(rules.format, reader.pair_keys).lines_per_record
    for block in blocks:
        if block.first > max(numbers):
            return
        lines = block.lines(path)
        starts = (start for start in range(0, len(lines), size) if lines[start].number in numbers)
        chosen = [line for start in starts for line in lines[start : start + size]]
        yield from rules.records(chosen, Counter(), [])


def _pick_texts(
    dataset: TokenizedDataset,
    chosen: Sequence[int],
    texts_by_origin: Mapping[Origin, Sequence[tuple[Text, ...]]],
) -> dict[int, tuple[Text, ...]]:
    """Return the texts of the ``chosen`` records by their indices.

    If tokenization dropped some of several records of a line, it is unknown which texts the others
    have. The records of such lines are left out, and a message is printed.

    Raises:
        KeyError: no record comes from the line of a chosen one.
    """
    texts: dict[int, tuple[Text, ...]] = {}
    ambiguous: list[str] = []
    positions = dataset.find_line_positions()[chosen].tolist()
    for index, (number, count) in zip(chosen, positions, strict=True):
        of_line = texts_by_origin[dataset.origins[index]]
        if len(of_line) == count:
            texts[index] = of_line[number]
        else:
            ambiguous.append(
                f"{dataset.origins[index]}: {len(of_line)} records come from this line, but the "
                f"run uses only {count} of them, and it is unknown which"
            )
    if ambiguous:
        say(
            f"the report will lack the rewards of {len(ambiguous)} of {len(chosen)} held-out "
            f"records of {dataset.name}, whose texts are unknown: {ambiguous[0]}"
        )
    return texts


def _draw_sample(count: int, size: int) -> list[int]:
    """Draw ``size`` of the indices 0 to ``count - 1`` at random, with a fixed seed.

    If ``count`` is smaller than ``size``, all indices are returned.
    """
    if count <= size:
        return list(range(count))
    return sorted(random.Random(0).sample(range(count), size))
