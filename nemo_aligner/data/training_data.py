"""Data of a training run: what to train, validate and test on, and which records a step takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import with_aggregate
from nemo_aligner.contract.readout import Readout
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.dataset import TokenizedDataset, check_indexes, join_indexes, weighted_order
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
    """All data of a run, the contract that its labels complete, and what is to be learned."""

    train: TokenizedDataset
    validation: list[TokenizedDataset]
    contract: ScoringContract
    objective: Objective
    test: Sequence[TokenizedDataset] = ()

    @property
    def datasets(self) -> list[TokenizedDataset]:
        """All data sets, the training data first."""
        return [self.train, *self.validation, *self.test]

    def table(self) -> str:
        """The start-up table of every dataset."""
        return "\n".join(dataset.table() for dataset in self.datasets)

    def with_validation_limited(self, count: int | None, seed: int) -> TrainingData:
        """Limit every validation set to ``count`` records, drawn once; None leaves them whole."""
        if count is None:
            return self
        return replace(self, validation=[each.draw(count, seed) for each in self.validation])


def build_training_data(
    config: ModelConfig,
    contract: ScoringContract,
    tokenizer: Tokenizer,
    *,
    measure_label_means: bool = True,
    rotation_by_length: Callable[[int], int] | None = None,
) -> TrainingData:
    """Open the tokens of ``model.data.data_prefix``, and centre labels on the contract's means.

    These are the training set's, unless ``measure_label_means`` is false. Every rank calls it.
    ``rotation_by_length`` is the model's (of ``ModelShape``) if texts are not all rotated alike.

    Raises:
        ConfigError: no training file, a record too large for ``model.micro_batch_tokens``, or see
            ``build_objective`` and ``open_indexes``.
        DataError: see ``open_indexes``, ``check_indexes``, ``join_indexes`` and ``check_overlap``.
    """
    prefix = config.data.data_prefix
    if not prefix.train:
        raise ConfigError("model.data.data_prefix.train: got no file, wanted at least one")
    objective = build_objective(config, contract.attributes, contract.attribute_weights)
    _check_reads(contract, objective)
    contract = with_aggregate(contract, objective.aggregate)
    how = how_to_read(config, objective)
    indexes = open_indexes(
        prefix.all_files,
        IndexRules(how, contract, tokenizer),
        IndexPlace(config.data.index_dir, config.data.keep_index),
    )
    check_indexes(indexes, how.rule)
    split = len(prefix.train)
    train = join_indexes(indexes[:split], "train")
    names = [*_names("validation", prefix.validation), *_names("test", prefix.test)]
    heldout = [
        _mark_overlap(join_indexes([index], name), train, config.data.allow_prompt_overlap)
        for index, name in zip(indexes[split:], names, strict=True)
    ]
    # Where a long text is rotated otherwise (LongRoPE), its states differ from the first token on.
    if rotation_by_length is not None:
        train, *heldout = (each.sharing_by(rotation_by_length) for each in (train, *heldout))
    # Bins and quantiles may be set by the labels, which are known only now.
    objective = _fitted(objective, train, contract)
    contract = contract.with_readout(objective.readout)
    for dataset in (train, *heldout):
        _check_labels(dataset, objective)
        _check_fits(dataset, config.micro_batch_tokens)
    is_rated = objective.record_kind is RecordKind.rating
    if is_rated and objective.centres_labels:
        if measure_label_means:
            contract = contract.with_label_means(_measured_means(train, contract.attributes))
        means = dict(zip(contract.attributes, contract.label_means, strict=True))
        train, heldout = train.centred_on(means), [each.centred_on(means) for each in heldout]
    elif is_rated and any(contract.label_means):
        # Of the model to start from, whose labels were centred; these are learned as they are.
        contract = contract.with_label_means([0.0] * len(contract.attributes))
    validation, test = heldout[: len(prefix.validation)], heldout[len(prefix.validation) :]
    return TrainingData(train, validation, contract, objective, test)


def _check_reads(contract: ScoringContract, objective: Objective) -> None:
    """Refuse an objective that cannot learn from what the head reads."""
    reads = contract.scored_position
    if contract.has_steps and objective.takes_comparisons:
        raise ConfigError(
            f"model.head.reads: got {reads}, wanted last_token or reply_mean: model.objective "
            "learns from pairs and ratings at once, and has no rule for rewards of steps"
        )
    if contract.has_steps and objective.aggregate is None:
        raise ConfigError(
            f"model.head.reads: got {reads}, wanted last_token or reply_mean: model.objective has "
            "one reward for each text; model.objective=bradley_terry makes one of all of them"
        )


def how_to_read(config: ModelConfig, objective: Objective) -> ReaderConfig:
    """Rules by which the files of ``model.data.data_prefix`` become records."""
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


def _measured_means(train: TokenizedDataset, attributes: Sequence[str]) -> tuple[float, ...]:
    # An objective may read more columns than there are attributes.
    labels = train.records.labels
    by_name = dict(zip(labels.names, labels.measured_means(), strict=True))
    means = tuple(by_name[name] for name in attributes)
    for name, mean in zip(attributes, means, strict=True):
        if math.isnan(mean):
            files = [report.path for report in train.reports]
            raise DataError(f"{files}: no record has a label of {name}")
    return means


def _fitted(objective: Objective, train: TokenizedDataset, contract: ScoringContract) -> Objective:
    """The objective with what it takes from the data, and the head that training starts from."""
    kept = contract.output_readout
    try:
        objective = objective.fit_to_labels(train.records.labels, kept)
    except ValueError as error:
        files = [report.path for report in train.reports]
        raise ConfigError(f"model.objective_kwargs: {error} in {files}") from error
    if kept is not None and objective.readout != kept:
        raise ConfigError(
            f"model.objective: got one with {_described(objective.readout)} for each "
            f"attribute, and the reward model to start from has {_described(kept)}; wanted the "
            "same, or pretrained_checkpoint.new_head=true"
        )
    return objective


def _described(readout: Readout | None) -> str:
    return "one output" if readout is None else f"{readout.kind} {readout.numbers}"


def _check_labels(dataset: TokenizedDataset, objective: Objective) -> None:
    labels = dataset.records.labels
    low, high = label_limits(objective, labels.names).unbind(dim=1)
    outside = ((labels.values < low) | (labels.values > high)).nonzero().tolist()
    if outside:
        record, column = outside[0]
        least, most = float(low[column]), float(high[column])
        wanted = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
        raise DataError(
            f"{dataset.label_origins[record]}: {labels.names[column]}: got "
            f"{float(labels.values[record, column]):g}, wanted {wanted}, as "
            f"model.objective needs it ({len(outside)} labels of {dataset.name} are not)"
        )


def _names(part: str, paths: Sequence[str]) -> list[str]:
    """``<part>-<name>``: the files' names without endings, numbered where two are alike."""
    stems = [Path(path).name.split(".")[0] for path in paths]
    return [
        f"{part}-{stem}" if stems.count(stem) == 1 else f"{part}-{stem}_{number}"
        for number, stem in enumerate(stems, start=1)
    ]


def _check_fits(dataset: TokenizedDataset, micro_batch_tokens: int) -> None:
    largest, size = largest_record(dataset)
    if size > micro_batch_tokens:
        raise ConfigError(
            f"model.micro_batch_tokens: got {micro_batch_tokens}, wanted at least "
            f"{size}, the tokens of {dataset.origins[largest]} "
            f"({len(dataset.lengths(largest))} sequences)"
        )


# The records of a step: a function of the step alone, which is all a resumed run needs.
#
# The records form one endless stream, epoch after epoch, every epoch in an order of its own that
# follows from ``(seed, epoch)`` and the weights of files, if there are any. Step k
# (from 0) takes records ``k * global_batch_size`` up to the next multiple: every batch is full, and
# one may hold the end of an epoch and the start of the next.


@dataclass(frozen=True)
class StepPlan:
    """Records of one training step, and the rank that computes each.

    Attributes:
        record_ids: records of the global batch, in order; the same at any layout.
        owners: data parallel rank that computes each of them; every rank has some.
        packs: packs of this rank, whose number may differ between ranks. Their rows are those of
            the global batch's rewards.
    """

    record_ids: list[int]
    owners: list[int]
    packs: list[PackedBatch]


class TrainLoader:
    """The plan of every step, with ranks as even as ``packing.record_cost`` tells.

    The step to come is packed while the present one is computed.
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
                "record for every data-parallel rank"
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
        """Full batches in ``max_epochs`` epochs, at most ``max_steps``.

        Raises:
            ConfigError: not even one batch is full.
        """
        records = max_epochs * len(self._dataset)
        steps = records // self._global_batch_size
        if steps == 0:
            raise ConfigError(
                f"model.global_batch_size: got {self._global_batch_size}, wanted at most "
                f"{records}, the records of trainer.rm.max_epochs={max_epochs}"
            )
        return steps if max_steps is None else min(steps, max_steps)

    def global_batch(self, step: int) -> list[int]:
        """The records of ``step`` over all ranks; the same on every rank and at any layout."""
        first = step * self._global_batch_size
        return [self._order.record(first + place) for place in range(self._global_batch_size)]

    def plan(self, step: int) -> StepPlan:
        """This rank's view of ``step``, counted from 0."""
        ahead, self._ahead = self._ahead, None
        plan = ahead[1].result() if ahead and ahead[0] == step else self._plan(step)
        self._ahead = step + 1, self._packer.submit(self._plan, step + 1)
        return plan

    def imbalance(self, steps: range) -> Imbalance:
        """Measure how far the work of ``steps`` is from even."""
        ranks, packs = [], []
        for step in steps:
            batch = self.global_batch(step)
            rank_shares = self._rank_shares(batch)
            work = [sum(self._cost(batch[index]) for index in indices) for indices in rank_shares]
            ranks.append(_largest_to_mean(work))
            for indices in rank_shares:
                of_rank = self._pack(batch, indices)
                work = [sum(map(self._cost, pack.records.ids.tolist())) for pack in of_rank]
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
        """For every rank, the indices into ``batch`` of the records that it computes."""
        return share_out([self._cost(record) for record in batch], self._dp_size)

    def _pack(self, batch: Sequence[int], indices: Sequence[int]) -> list[PackedBatch]:
        bounds = self._dataset.records.select(batch).bounds.tolist()
        return pack_records(
            self._dataset,
            [batch[index] for index in indices],
            self._micro_batch_tokens,
            self._query_key_cost,
            [bounds[index] for index in indices],
        )

    def _cost(self, record: int) -> float:
        return record_cost(self._dataset, record, self._query_key_cost)


@dataclass(frozen=True)
class Imbalance:
    """The largest part of a step over the mean one, on average over steps; 1 is even.

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
    """This rank's packs of every record once; empty on a rank beyond the last record.

    Their rows are those of the data set's rewards.
    """
    costs = [record_cost(dataset, record, query_key_cost) for record in range(len(dataset))]
    mine = share_out(costs, dp_size)[dp_rank]
    bounds = dataset.records.bounds.tolist()
    first_rows = [bounds[record] for record in mine]
    return pack_records(dataset, mine, micro_batch_tokens, query_key_cost, first_rows)
