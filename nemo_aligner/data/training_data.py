"""All data of a training run: what to train, validate and test on, and what the labels mean."""

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
from nemo_aligner.data.prompts import PromptWrapping
from nemo_aligner.data.reading import Reading
from nemo_aligner.data.store.index import IndexRules
from nemo_aligner.data.store.prepare import IndexPlace, open_indexes
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.objectives import build_objective
from nemo_aligner.objectives.base import Objective, fitted, label_limits, readout_of
from nemo_aligner.readout import Readout
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.tokenizer import Tokenizer


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
        """All of them, the training data first."""
        return [self.train, *self.validation, *self.test]

    def table(self) -> str:
        """The start-up table of every dataset."""
        return "\n".join(dataset.table() for dataset in self.datasets)

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
    objective = build_objective(config, contract.attributes, contract.attribute_weights)
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
    objective = _fitted(objective, train, contract)
    contract = contract.with_readout(readout_of(objective))
    for dataset in (train, *heldout):
        _check_labels(dataset, objective)
        _check_fits(dataset, config.micro_batch_tokens)
    is_centred = getattr(objective, "centres_labels", True)
    if objective.record_kind is RecordKind.rating and is_centred:
        if measure_label_means:
            contract = contract.with_label_means(_measured_means(train, contract.attributes))
        means = dict(zip(contract.attributes, contract.label_means, strict=True))
        train, heldout = train.centred_on(means), [each.centred_on(means) for each in heldout]
    validation, test = heldout[: len(prefix.validation)], heldout[len(prefix.validation) :]
    return TrainingData(train, validation, contract, objective, test)


def how_to_read(config: ModelConfig, objective: Objective) -> Reading:
    """By which rules the files of ``model.data.data_prefix`` become records."""
    is_rating = objective.record_kind is RecordKind.rating
    return Reading(
        kind=None if getattr(objective, "takes_comparisons", False) else objective.record_kind,
        format=config.data.format,
        attributes=objective.columns if is_rating else (),
        loss_mask_val=config.regression.loss_mask_val,
        pair_columns=() if is_rating else objective.columns,
        pair_keys=PairKeys.of(
            config.data.prompt_key, config.data.chosen_key, config.data.rejected_key
        ),
        prompts=PromptWrapping.of(config.data, "model.data"),
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


def _fitted(objective: Objective, train: TokenizedDataset, contract: ScoringContract) -> Objective:
    """The objective with what it takes from the data, and the head that training starts from."""
    kept = contract.output_readout
    try:
        objective = fitted(objective, train.records.labels, kept)
    except ValueError as error:
        files = [report.path for report in train.reports]
        raise ConfigError(f"model.objective_kwargs: {error} in {files}") from error
    if kept is not None and readout_of(objective) != kept:
        raise ConfigError(
            f"model.objective: got one with {_described(readout_of(objective))} for each "
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
            f"{dataset.origins[record]}: {labels.names[column]}: got "
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
