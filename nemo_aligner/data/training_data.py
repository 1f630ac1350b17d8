"""Data of a training run: its data sets (``TrainingData``) and packs by step (``TrainLoader``).

``training/prepare.py`` calls ``build_training_data``, which joins the token indexes of the files to
data sets, adds label means and readout to the scoring contract, and checks that labels fit the
objective and lengths fit the micro-batches. ``training/learner.py`` gets the packs of a step from
``TrainLoader``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.model import DataPrefixConfig, ModelConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import with_aggregate
from nemo_aligner.contract.readout import Readout
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.dataset import TokenizedDataset, check_indexes, join_indexes, weighted_order
from nemo_aligner.data.formats.teacher import CHOSEN_PROBABILITY, TEACHER_REWARDS
from nemo_aligner.data.packing import largest_record, pack_records, record_cost, share_out
from nemo_aligner.data.readers import ReaderConfig
from nemo_aligner.data.report import check_overlap
from nemo_aligner.data.token_cache import IndexPlace, open_indexes
from nemo_aligner.data.token_index import IndexRules
from nemo_aligner.losses import build_objective
from nemo_aligner.losses.base import Objective, label_limits
from nemo_aligner.utils.errors import ConfigError, DataError


@dataclass(frozen=True)
class TrainingData:
    """The data sets of a run, its scoring contract, and its objective.

    Attributes:
        train: training data of all files.
        validation: one data set for each validation file.
        contract: scoring contract with the means of the training labels, and with the readout that
            the objective needs.
        objective: the loss, with all settings that follow from the training labels.
        test: one data set for each test file.
    """

    train: TokenizedDataset
    validation: list[TokenizedDataset]
    contract: ScoringContract
    objective: Objective
    test: Sequence[TokenizedDataset] = ()

    @property
    def datasets(self) -> list[TokenizedDataset]:
        """All data sets, the training data first."""
        return [self.train, *self.validation, *self.test]

    @property
    def paths(self) -> list[str]:
        """The path of every file, in the order of ``DataPrefixConfig.all_files``."""
        return [report.path for dataset in self.datasets for report in dataset.reports]

    def names_given(self, prefix: DataPrefixConfig) -> dict[str, str]:
        """Map the path of every file to its name in the settings, such as a data set of the hub."""
        return dict(zip(self.paths, prefix.all_files, strict=True))

    def table(self) -> str:
        """Render the full table of each file, its records and their lengths, for a dry run."""
        return "\n".join(dataset.table() for dataset in self.datasets)

    def overview(self) -> str:
        """Render the few rows about each file that a run prints when it starts."""
        return "\n".join(dataset.overview() for dataset in self.datasets)

    def with_validation_limited(self, count: int | None, seed: int) -> TrainingData:
        """Limit each validation set to ``count`` records, drawn with ``seed``; None keeps all."""
        if count is None:
            return self
        validation = [dataset.draw(count, seed) for dataset in self.validation]
        return replace(self, validation=validation)


def build_training_data(
    config: ModelConfig,
    contract: ScoringContract,
    tokenizer: Tokenizer,
    *,
    measure_label_means: bool = True,
    length_dependent_rope: Callable[[int], int] | None = None,
) -> TrainingData:
    """Tokenize the files of ``model.data.data_prefix``, or open their token caches, on all ranks.

    Args:
        contract: determines the tokens; the result has a copy with this run's readout and means.
        measure_label_means: centre labels on the training set's means, not on the contract's.
        length_dependent_rope: method of ``ModelShape``; None if RoPE ignores a sample's length.

    Raises:
        ConfigError: there is no training file, a record is too large for
            ``model.micro_batch_tokens``, a setting of the objective is wrong, or the token caches
            cannot be written.
        DataError: a file cannot be used, or shares prompts with training although it must not.
    """
    prefix = config.data.data_prefix
    if not prefix.train:
        raise ConfigError("model.data.data_prefix.train: no file to train on. Name at least one")
    objective = build_objective(
        config, contract.attributes, contract.attribute_weights, contract.has_steps
    )
    _check_reads(contract, objective)
    contract = with_aggregate(contract, objective.aggregate)
    reading = how_to_read(config, objective)
    indexes = open_indexes(
        prefix.all_files,
        IndexRules(reading, contract, tokenizer),
        IndexPlace(config.data.index_dir, config.data.keep_index),
    )
    check_indexes(indexes, reading.rule)
    split = len(prefix.train)
    train = join_indexes(indexes[:split], "train")
    names = [*name_sets("validation", prefix.validation), *name_sets("test", prefix.test)]
    heldout = [
        _mark_overlap(join_indexes([index], name), train, config.data.allow_prompt_overlap)
        for index, name in zip(indexes[split:], names, strict=True)
    ]
    if length_dependent_rope is not None:
        train, *heldout = (data.sharing_by(length_dependent_rope) for data in (train, *heldout))
    # Settings such as the values of bins may depend on the training labels, which are known now.
    objective = _fit_objective(objective, train, contract)
    contract = contract.with_readout(objective.readout)
    _check_soft_labels(train, objective)
    for dataset in (train, *heldout):
        _check_labels(dataset, objective)
        _check_fits(dataset, config.micro_batch_tokens)
    contract = _choose_label_means(contract, objective, train, measure_label_means)
    if any(contract.label_means):
        means = dict(zip(contract.attributes, contract.label_means, strict=True))
        train, *heldout = (data.centred_on(means) for data in (train, *heldout))
    validation, test = heldout[: len(prefix.validation)], heldout[len(prefix.validation) :]
    return TrainingData(train, validation, contract, objective, test)


def _check_reads(contract: ScoringContract, objective: Objective) -> None:
    """Raise ConfigError if the model scores turns or steps, but the objective cannot learn that."""
    reads = contract.scored_position
    if contract.has_steps and objective.takes_comparisons:
        raise ConfigError(
            f"model.head.reads: {reads} is not supported by this model.objective, which learns "
            "from pairs and ratings at once and has no rule for rewards of steps. Use last_token "
            "or reply_mean"
        )
    if contract.has_steps and objective.aggregate is None:
        raise ConfigError(
            f"model.head.reads: {reads} is not supported by this model.objective, which needs one "
            "reward for each sample. Use last_token or reply_mean, or "
            "model.objective=bradley_terry, which aggregates the rewards of steps"
        )


def how_to_read(config: ModelConfig, objective: Objective) -> ReaderConfig:
    """Build the rules by which files are read: kind of records, label columns, ties and more.

    They follow from the settings and from what the objective needs.
    """
    is_rating = objective.record_kind is RecordKind.rating
    return ReaderConfig.of(
        config.data,
        "model.data",
        kind=None if objective.takes_comparisons else objective.record_kind,
        attributes=objective.columns if is_rating else (),
        loss_mask_val=config.regression.loss_mask_val,
        pair_columns=() if is_rating else objective.columns,
        ties=objective.learns_from_ties,
    )


def _mark_overlap(
    dataset: TokenizedDataset, train: TokenizedDataset, allowed: bool
) -> TokenizedDataset:
    reports = [
        replace(report, prompts_in_training=check_overlap(report, train.reports, allowed))
        for report in dataset.reports
    ]
    return replace(dataset, reports=reports)


def _choose_label_means(
    contract: ScoringContract, objective: Objective, train: TokenizedDataset, measure: bool
) -> ScoringContract:
    if objective.record_kind is RecordKind.comparison:
        # Pairs do not determine the level of rewards, so the model keeps the label means of the
        # reward model that training starts from.
        return contract
    if not objective.centres_labels:
        # The rewards are labels that are not centred, so label means of the model that training
        # starts from do not apply.
        return contract.with_label_means([0.0] * len(contract.attributes))
    if not measure:
        return contract
    return contract.with_label_means(_measure_means(train, contract.attributes))


def _measure_means(train: TokenizedDataset, attributes: Sequence[str]) -> tuple[float, ...]:
    # Select the means by name, because an objective may read more columns than the attributes.
    labels = train.records.labels
    by_name = dict(zip(labels.names, labels.measured_means(), strict=True))
    means = tuple(by_name[name] for name in attributes)
    for name, mean in zip(attributes, means, strict=True):
        if math.isnan(mean):
            files = [report.path for report in train.reports]
            raise DataError(
                f"{files}: no record has a label of {name}. Add such labels, or remove the "
                "attribute from model.regression.attributes"
            )
    return means


def _fit_objective(
    objective: Objective, train: TokenizedDataset, contract: ScoringContract
) -> Objective:
    """Return the objective with the settings that follow from the training labels.

    If training starts from a reward model with its head, the head may decide some of them, such as
    the values of bins.

    Raises:
        ConfigError: the labels do not determine a setting, or the objective needs other outputs
            than the reward model that training starts from has.
    """
    head_readout = contract.output_readout
    try:
        objective = objective.fit_to_labels(train.records.labels, head_readout)
    except ValueError as error:
        files = [report.path for report in train.reports]
        raise ConfigError(f"model.objective_kwargs: {error} in {files}") from error
    if head_readout is not None and objective.readout != head_readout:
        raise ConfigError(
            f"model.objective: it needs {_describe_readout(objective.readout)} for each attribute, "
            f"but the reward model to start from has {_describe_readout(head_readout)}. Choose an "
            "objective with the same outputs, or set pretrained_checkpoint.new_head=true"
        )
    return objective


def _describe_readout(readout: Readout | None) -> str:
    return "one output" if readout is None else f"{readout.kind} {readout.numbers}"


def _check_soft_labels(train: TokenizedDataset, objective: Objective) -> None:
    if train.records.teacher_rewards is None or objective.learns_soft_labels:
        return
    paths = [report.path for report in train.reports if report.summary.soft_labels is not None]
    raise ConfigError(
        f"model.objective: {type(objective).__name__} does not learn soft labels, but records of "
        f"{', '.join(paths)} have {TEACHER_REWARDS!r} or {CHOSEN_PROBABILITY!r}. Choose "
        "bradley_terry, plackett_luce or head_ensemble, or remove these fields from the records"
    )


def _check_labels(dataset: TokenizedDataset, objective: Objective) -> None:
    labels = dataset.records.labels
    low, high = label_limits(objective, labels.names).unbind(dim=1)
    outside = ((labels.values < low) | (labels.values > high)).nonzero().tolist()
    if outside:
        row, column = outside[0]
        lowest, highest = float(low[column]), float(high[column])
        limits = f"{lowest:g} or more" if highest == math.inf else f"{lowest:g} to {highest:g}"
        raise DataError(
            f"{dataset.label_origins[row]}: {labels.names[column]}: the label "
            f"{float(labels.values[row, column]):g} is out of range: model.objective needs labels "
            f"of {limits}. Rescale the labels, or choose another objective ({len(outside)} labels "
            f"of {dataset.name} are out of range)"
        )


def name_sets(part: str, paths: Sequence[str]) -> list[str]:
    """Name the data sets of files: ``<part>-<file name without endings>``.

    Files with equal names get numbers: ``<part>-<name>_<n>``, where n counts the files from 1. If
    such a name equals that of another file, both get a further number.
    """
    names = [f"{part}-{Path(path).name.split('.')[0]}" for path in paths]
    while len(set(names)) < len(names):
        names = [
            name if names.count(name) == 1 else f"{name}_{number}"
            for number, name in enumerate(names, start=1)
        ]
    return names


def _check_fits(dataset: TokenizedDataset, micro_batch_tokens: int) -> None:
    largest, size = largest_record(dataset)
    if size > micro_batch_tokens:
        raise ConfigError(
            f"model.micro_batch_tokens: got {micro_batch_tokens}, wanted at least {size}, the "
            f"tokens of the {len(dataset.lengths(largest))} samples of "
            f"{dataset.origins[largest]}. Raise it, or lower model.data.seq_length"
        )


# The records of a step depend only on the number of the step. A resumed run needs no other state.
#
# The records form one endless stream, epoch after epoch. The order of an epoch follows from
# ``(seed, epoch)`` and the weights of the files, if there are any. Step k, counted from 0, takes
# the records from ``k * global_batch_size`` up to the next multiple: every batch is full, and may
# contain the end of an epoch and the start of the next.


@dataclass(frozen=True)
class StepPlan:
    """Records of one training step, and the rank that computes each.

    Attributes:
        record_ids: records of the global batch, in order; the same with any parallel layout.
        owners: data parallel rank that computes each record; every rank has at least one record.
        packs: packs of this rank. Their number may differ between ranks, and their ``rows`` are
            positions among the rewards of the global batch.
    """

    record_ids: list[int]
    owners: list[int]
    packs: list[PackedBatch]


class TrainLoader:
    """Plans the records and packs of every training step.

    The records of a step are split so that all data parallel ranks have about the same work, which
    ``packing.record_cost`` estimates. A thread packs the next step while the current one is
    computed.
    """

    def __init__(
        self,
        dataset: TokenizedDataset,
        global_batch_size: int,
        micro_batch_tokens: int,
        seed: int,
        dp_rank: int,
        dp_size: int,
        query_key_cost: float = 0.0,
        weights: Sequence[float] = (),
    ) -> None:
        if global_batch_size < dp_size:
            raise ConfigError(
                f"model.global_batch_size: got {global_batch_size}, wanted at least {dp_size}, one "
                "record for each data parallel rank"
            )
        self._dataset = dataset
        self._global_batch_size = global_batch_size
        self._micro_batch_tokens = micro_batch_tokens
        sizes = dataset.file_sizes if weights else (len(dataset),)
        self._order = weighted_order(sizes, seed, weights)
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._query_key_cost = query_key_cost
        self._packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="packs")
        self._ahead: tuple[int, Future[StepPlan]] | None = None

    def total_steps(self, max_epochs: int, max_steps: int | None = None) -> int:
        """Count the full batches in ``max_epochs`` epochs, at most ``max_steps``.

        Raises:
            ConfigError: there is no full batch.
        """
        records = max_epochs * len(self._dataset)
        steps = records // self._global_batch_size
        if steps == 0:
            raise ConfigError(
                f"model.global_batch_size: got {self._global_batch_size}, wanted at most "
                f"{records}, the number of records in trainer.rm.max_epochs={max_epochs}"
            )
        return steps if max_steps is None else min(steps, max_steps)

    def global_batch(self, step: int) -> list[int]:
        """Return the indices of the records of ``step``, counted from 0, over all ranks.

        They are the same with any parallel layout.
        """
        first = step * self._global_batch_size
        return [self._order.record(first + place) for place in range(self._global_batch_size)]

    def plan(self, step: int) -> StepPlan:
        """Return the plan of ``step``, counted from 0, with the packs of this rank."""
        ahead, self._ahead = self._ahead, None
        plan = ahead[1].result() if ahead and ahead[0] == step else self._plan(step)
        self._ahead = step + 1, self._packer.submit(self._plan, step + 1)
        return plan

    def imbalance(self, steps: range) -> Imbalance:
        """Measure how unevenly the estimated work of ``steps`` is split over ranks and packs."""
        ranks, packs = [], []
        for step in steps:
            batch = self.global_batch(step)
            rank_shares = self._rank_shares(batch)
            work = [
                sum(self._get_cost(batch[index]) for index in indices) for indices in rank_shares
            ]
            ranks.append(_largest_to_mean(work))
            for indices in rank_shares:
                rank_packs = self._pack(batch, indices)
                work = [sum(map(self._get_cost, pack.records.ids.tolist())) for pack in rank_packs]
                packs.append(_largest_to_mean(work))
        return Imbalance(fmean(ranks), fmean(packs))

    def _plan(self, step: int) -> StepPlan:
        batch = self.global_batch(step)
        rank_shares = self._rank_shares(batch)
        owner_of = {index: rank for rank, indices in enumerate(rank_shares) for index in indices}
        return StepPlan(
            record_ids=batch,
            owners=[owner_of[index] for index in range(len(batch))],
            packs=self._pack(batch, rank_shares[self._dp_rank]),
        )

    def _rank_shares(self, batch: Sequence[int]) -> list[list[int]]:
        """Split the records of a step over the data parallel ranks, with about equal work.

        Returns:
            For every rank, the indices into ``batch`` of its records.
        """
        return share_out([self._get_cost(record) for record in batch], self._dp_size)

    def _pack(self, batch: Sequence[int], indices: Sequence[int]) -> list[PackedBatch]:
        bounds = self._dataset.records.select(batch).record_bounds.tolist()
        return pack_records(
            self._dataset,
            [batch[index] for index in indices],
            self._micro_batch_tokens,
            self._query_key_cost,
            [bounds[index] for index in indices],
        )

    def _get_cost(self, record: int) -> float:
        return record_cost(self._dataset, record, self._query_key_cost)


@dataclass(frozen=True)
class Imbalance:
    """How unevenly work is split: the largest part divided by the mean part, averaged over steps.

    A value of 1 means perfect balance.

    Attributes:
        ranks: imbalance of a step's work over the data parallel ranks.
        micro_batches: imbalance of a rank's work over its micro-batches.
    """

    ranks: float
    micro_batches: float


def _largest_to_mean(work: Sequence[float]) -> float:
    return max(work) / fmean(work)


def validation_batches(
    dataset: TokenizedDataset,
    micro_batch_tokens: int,
    dp_rank: int,
    dp_size: int,
    query_key_cost: float = 0.0,
) -> list[PackedBatch]:
    """Pack the records of a data set that the data parallel rank ``dp_rank`` evaluates.

    The ranks split the records, so that each record is evaluated exactly once. The ``rows`` of the
    packs are positions among the rewards of the whole data set, by which the results of all ranks
    are merged. A rank gets no pack if there are more ranks than records and it has none.
    """
    costs = [record_cost(dataset, record, query_key_cost) for record in range(len(dataset))]
    local_records = share_out(costs, dp_size)[dp_rank]
    bounds = dataset.records.record_bounds.tolist()
    first_rows = [bounds[record] for record in local_records]
    return pack_records(dataset, local_records, micro_batch_tokens, query_key_cost, first_rows)
