"""All data of a training run: what to train on, what to validate on, and what the labels mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.data.dataset import TokenizedDataset, check_indexes, join_indexes
from nemo_aligner.data.formats.base import PairKeys
from nemo_aligner.data.malformed import MalformedRule
from nemo_aligner.data.overlap import check_overlap
from nemo_aligner.data.packing import largest_record
from nemo_aligner.data.reading import Reading
from nemo_aligner.data.store.index import IndexRules
from nemo_aligner.data.store.prepare import IndexPlace, open_indexes
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.objectives import build_objective
from nemo_aligner.objectives.base import Objective
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TrainingData:
    """All data of a run, the contract that its labels complete, and what is to be learned."""

    train: TokenizedDataset
    validation: list[TokenizedDataset]
    contract: ScoringContract
    objective: Objective

    def table(self) -> str:
        """The start-up table of every dataset."""
        return "\n".join(dataset.table() for dataset in (self.train, *self.validation))

    def with_validation_limited(self, count: int | None, seed: int) -> TrainingData:
        """At most ``count`` records of every validation set, drawn once; None leaves them whole."""
        if count is None:
            return self
        return replace(self, validation=[each.draw(count, seed) for each in self.validation])


def build_training_data(
    config: ModelConfig,
    contract: ScoringContract,
    tokenizer: Tokenizer,
    *,
    measure_label_means: bool = True,
) -> TrainingData:
    """Open the tokens of ``model.data.data_prefix``, and centre labels on the contract's means.

    These are the training set's, unless ``measure_label_means`` is false. Every rank calls it.

    Raises:
        ConfigError: no training file, a record too large for ``model.micro_batch_tokens``, or see
            ``build_objective`` and ``open_indexes``.
        DataError: see ``open_indexes``, ``check_indexes``, ``join_indexes`` and ``check_overlap``.
    """
    prefix = config.data.data_prefix
    if not prefix.train:
        raise ConfigError("model.data.data_prefix.train: got no file, wanted at least one")
    objective = build_objective(config, contract.attributes)
    how = _reading(config, objective)
    indexes = open_indexes(
        [*prefix.train, *prefix.validation],
        IndexRules(how, contract, tokenizer),
        IndexPlace(config.data.index_dir, config.data.keep_index),
    )
    check_indexes(indexes, how.rule)
    split = len(prefix.train)
    train = join_indexes(indexes[:split], "train")
    validation = [
        _mark_overlap(join_indexes([index], name), train, config.data.allow_prompt_overlap)
        for index, name in zip(indexes[split:], _names(prefix.validation), strict=True)
    ]
    for dataset in (train, *validation):
        _check_labels(dataset, objective.lowest_label)
        _check_fits(dataset, config.micro_batch_tokens)
    if objective.record_kind is not RecordKind.rating:
        return TrainingData(train, validation, contract, objective)
    if measure_label_means:
        contract = contract.with_label_means(_measured_means(train, contract.attributes))
    means = dict(zip(contract.attributes, contract.label_means, strict=True))
    centred = [dataset.centred_on(means) for dataset in validation]
    return TrainingData(train.centred_on(means), centred, contract, objective)


def _reading(config: ModelConfig, objective: Objective) -> Reading:
    is_rating = objective.record_kind is RecordKind.rating
    return Reading(
        kind=objective.record_kind,
        format=config.data.format,
        attributes=objective.columns if is_rating else (),
        loss_mask_val=config.regression.loss_mask_val,
        pair_columns=() if is_rating else objective.columns,
        pair_keys=PairKeys.of(
            config.data.prompt_key, config.data.chosen_key, config.data.rejected_key
        ),
        ties=objective.learns_from_ties,
        rule=MalformedRule(config.data.malformed, config.data.max_malformed),
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


def _check_labels(dataset: TokenizedDataset, lowest: float | None) -> None:
    labels = dataset.records.labels
    below = [] if lowest is None else (labels.values < lowest).nonzero().tolist()
    if below:
        record, column = below[0]
        raise DataError(
            f"{dataset.origins[record]}: {labels.names[column]}: got "
            f"{float(labels.values[record, column]):g}, wanted {lowest:g} or more, as "
            f"model.objective needs it ({len(below)} labels of {dataset.name} are below)"
        )


def _names(paths: Sequence[str]) -> list[str]:
    """``validation-<name>``: the files' names without endings, numbered where two are alike."""
    stems = [Path(path).name.split(".")[0] for path in paths]
    return [
        f"validation-{stem}" if stems.count(stem) == 1 else f"validation-{stem}_{number}"
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
