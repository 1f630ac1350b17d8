"""Metrics of turns and steps in float64: how many are judged right, and the first wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.metrics.ranking import nanmean

# A label of this or more calls a step right.
_RIGHT = 0.5
# Steps from this one on are one position.
LAST_POSITION = 10


@dataclass(frozen=True)
class StepVerdicts:
    """Verdicts on the steps of N texts, S in all, from one attribute to the next.

    Attributes:
        judged: ``[S, A]`` bool, judged right.
        probability: ``[S, A]`` float64 of right: the reward, or its sigmoid if it is log-odds.
        labels: ``[S, A]`` float64, NaN where there is none.
        right: ``[S, A]`` bool, right by the labels.
        present: ``[S, A]`` bool, where there is a label.
        sizes: N steps of the texts.
        attributes: A names.
    """

    judged: Tensor
    probability: Tensor
    labels: Tensor
    right: Tensor
    present: Tensor
    sizes: Sequence[int]
    attributes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        rewards: Tensor,
        labels: Tensor,
        sizes: Sequence[int],
        attributes: tuple[str, ...],
        right_from: float,
    ) -> StepVerdicts | None:
        """Judge rewards ``[S, A]``; None if labels ``[S, A]`` are not all from 0 to 1.

        Rewards that are right from 0 on are log-odds.
        """
        rewards, labels = rewards.double().cpu(), labels.double().cpu()
        present = ~torch.isnan(labels)
        if bool(((labels < 0) | (labels > 1)).any()):
            return None
        judged, right = rewards >= right_from, labels >= _RIGHT
        probability = rewards.sigmoid() if right_from == 0 else rewards
        return cls(judged, probability, labels, right, present, sizes, attributes)


def step_accuracy(verdicts: StepVerdicts) -> float:
    """Share of labelled steps that are judged as they are labelled, mean over the attributes."""
    agree = verdicts.judged == verdicts.right
    columns = zip(agree.unbind(1), verdicts.present.unbind(1), strict=True)
    return nanmean(float(found[known].double().mean()) for found, known in columns)


def first_error_accuracy(verdicts: StepVerdicts) -> float:
    """Share of texts in which the first step judged wrong is the first one labelled wrong.

    Or none is in both. Of the texts whose steps all have labels up to the first wrong one.
    """
    return nanmean(_share(_first_errors(verdicts, column)) for column in _columns(verdicts))


def first_error_f1(verdicts: StepVerdicts) -> float:
    """Harmonic mean of ``first_error_accuracy`` in texts with an error and in those without.

    As ProcessBench has it (Zheng et al. 2024, arXiv:2412.06559, section 4).
    """
    found = []
    for column in _columns(verdicts):
        pairs = _first_errors(verdicts, column)
        wrong = _share([pair for pair in pairs if pair[1] >= 0])
        right = _share([pair for pair in pairs if pair[1] < 0])
        found.append(harmonic_mean(wrong, right))
    return nanmean(found)


def calibration_by_position(verdicts: StepVerdicts) -> dict[str, float]:
    """Of the first step of all texts, the second and so on: how probable right is, and how often.

    ``<n>/labels`` counts its labels; ``<n>/label`` is their mean, ``<n>/probability`` that of the
    same steps, and ``<n>/accuracy`` the share judged as it is labelled. The last is from 10 on.
    """
    places = torch.cat([torch.arange(1, size + 1) for size in verdicts.sizes])
    agree = (verdicts.judged == verdicts.right).double()
    found: dict[str, float] = {}
    for place in range(1, LAST_POSITION + 1):
        at = places >= place if place == LAST_POSITION else places == place
        known = verdicts.present & at[:, None]
        if known.any():
            found |= {
                f"{place}/labels": float(known.sum()),
                f"{place}/label": float(verdicts.labels[known].mean()),
                f"{place}/probability": float(verdicts.probability[known].mean()),
                f"{place}/accuracy": float(agree[known].mean()),
            }
    return found


def harmonic_mean(first: float, second: float) -> float:
    """0 if both are; NaN if either is."""
    both = first + second
    return 2 * first * second / both if both else both


def _columns(verdicts: StepVerdicts) -> range:
    return range(len(verdicts.attributes))


def _share(pairs: Sequence[tuple[int, int]]) -> float:
    if not pairs:
        return float("nan")
    return sum(got == wanted for got, wanted in pairs) / len(pairs)


def _first_errors(verdicts: StepVerdicts, column: int) -> list[tuple[int, int]]:
    """First step judged wrong and first one labelled wrong, -1 for none, of each text."""
    found = []
    parts = (
        each[:, column].split(list(verdicts.sizes))
        for each in (verdicts.judged, verdicts.right, verdicts.present)
    )
    for judged, right, present in zip(*parts, strict=True):
        wanted = first_error((right | ~present).tolist())
        known = present if wanted < 0 else present[: wanted + 1]
        if bool(known.all()):
            found.append((first_error(judged.tolist()), wanted))
    return found


def first_error(right: Sequence[bool]) -> int:
    """The first step that is not right, from 0; -1 if all are."""
    return next((number for number, is_right in enumerate(right) if not is_right), -1)
