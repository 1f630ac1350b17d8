"""An evaluation that has just been made, as a thing to report on."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_aligner.config.common import RecordKind
from nemo_aligner.evaluation.compare import verdicts_of
from nemo_aligner.evaluation.evaluate import EvaluationReport
from nemo_aligner.evaluation.html.judged import HeldoutSet, JudgedPairs, JudgedRatings
from nemo_aligner.evaluation.html.reported import Reported
from nemo_aligner.evaluation.report import reward_rows
from nemo_aligner.evaluation.run_task import TaskReport, task_rows, verdict_rows
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.training.facts import describe_contract, find_versions


def of_report(
    name: str, report: EvaluationReport, about: Mapping[str, str], contract: ScoringContract | None
) -> Reported:
    """An evaluation on a file of pairs or ratings."""
    rows = list(reward_rows(report))
    is_rating = report.kind is RecordKind.rating
    judged: HeldoutSet = JudgedRatings.of(rows) if is_rating else JudgedPairs(verdicts_of(rows))
    return Reported(
        name=name,
        kind="evaluation",
        judged={name: judged},
        metrics=report.metrics,
        facts=_facts(about, report.counts, contract),
    )


def of_task(
    name: str, report: TaskReport, about: Mapping[str, str], contract: ScoringContract | None
) -> Reported:
    """A benchmark. One without right and wrong replies has its figures alone."""
    has_sides = all(0 < each.item.num_right < len(each.rewards) for each in report.judged)
    verdicts = verdicts_of(verdict_rows(report)) if has_sides else []
    return Reported(
        name=name,
        kind=f"benchmark {report.task}",
        judged={name: JudgedPairs(verdicts)} if verdicts else {},
        rows=task_rows(report),
        facts=_facts(about, report.left_out, contract),
    )


def _facts(
    about: Mapping[str, str], counts: Mapping[str, int], contract: ScoringContract | None
) -> dict[str, object]:
    return {
        **about,
        **({} if contract is None else describe_contract(contract)),
        "counts": dict(counts),
        "versions": find_versions(),
        "described": [f"checkpoint: {about['checkpoint']}"],
    }
