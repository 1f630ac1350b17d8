"""The examples of docs/extending.md run from outside the package, as that page says."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.model import DataConfig, DataPrefixConfig, ModelConfig
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.formats import FORMATS
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.data.training_data import build_training_data
from nemo_aligner.evaluation.evaluate import evaluate_file
from nemo_aligner.evaluation.sources import RewardSource
from nemo_aligner.metrics import table
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.utils.errors import DataError
from tests.data.files import write
from tests.harness import tiny
from tests.harness.contracts import Contracts

PAGE = (tiny.ROOT / "docs" / "extending.md").read_text()
FILES = {
    match[1]: match[2]
    for match in re.finditer(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, flags=re.DOTALL)
}

Import = Callable[[str], ModuleType]


@pytest.fixture
def import_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Write an example of the page to a folder outside the package, and import it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(name: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(FILES[name])
        return importlib.import_module(name)

    yield load
    for name in FILES:
        sys.modules.pop(name, None)


def test_a_loss_learns_from_the_columns_that_it_names(
    import_example: Import, contracts: Contracts, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    import_example("my_objectives")
    rows = [
        {"prompt": "who", "chosen": "the cat", "rejected": f"a dog {n}", "label_margin": n}
        for n in range(1, 4)
    ]
    path = write(tmp_path / "pairs.jsonl", *rows)
    config = ModelConfig(
        objective="my_objectives:MarginHinge",
        objective_kwargs={"scale": 0.5},
        data=DataConfig(data_prefix=DataPrefixConfig(train=[str(path)])),
    )
    data = build_training_data(config, contracts(), tokenizer)
    assert data.train.records.labels.names == ("label_margin",)
    rewards = torch.tensor([[1.0], [0.0]] * 3)
    total, count = data.objective.loss(rewards, data.train.records)
    assert (float(total), int(count)) == (0.5, 3)
    # Missing labels contribute nothing.
    objective = sys.modules["my_objectives"].MarginHinge()
    labels = LabelColumns.of(["label_margin"], torch.tensor([[2.0], [torch.nan]]))
    outputs = torch.zeros(4, 1, requires_grad=True)
    total, _ = objective.loss(outputs, Records.of([0, 1], [2, 2], labels))
    total.backward()
    assert total.item() == 2.0
    assert torch.isfinite(outputs.grad).all()
    path.write_text(json.dumps({key: rows[0][key] for key in ("prompt", "chosen", "rejected")}))
    with pytest.raises(DataError, match=r"pairs.jsonl:1: missing key 'label_margin'"):
        build_training_data(config, contracts(), tokenizer)


def test_a_format_is_found_by_its_keys(
    import_example: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = import_example("my_formats").FORMAT
    monkeypatch.setitem(FORMATS, example.name, example)
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(example.sample[0]))
    file = read_records(path, ReaderConfig(RecordKind.comparison))
    assert (file.format, file.records[0].texts[0][-1]["content"]) == ("a_or_b", "4")
    named = read_records(path, ReaderConfig(format="my_formats:FORMAT"))
    assert named.records == file.records
    path.write_text(json.dumps({**example.sample[0], "better": "c"}))
    with pytest.raises(DataError, match=r"pairs.jsonl:1: better: got 'c', wanted"):
        read_records(path, ReaderConfig(RecordKind.comparison))


def test_a_metric_is_measured_with_the_others(
    import_example: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "PAIRS", list(table.PAIRS))
    import_example("my_metrics")
    pairs = PairRewards.of(torch.tensor([[3.0, 0.0], [1.0, 0.5]]))
    assert table.measure_pairs(pairs, in_step=True)["clear_accuracy"] == 0.5


def test_a_protocol_is_served_with_the_others(
    import_example: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    from nemo_aligner.serving.front import app as front_app
    from tests.serving.fake_server import total
    from tests.serving.gateway_calls import FakeClient, call, gateway_front

    route = import_example("my_protocol").ROUTE
    monkeypatch.setattr(front_app, "ROUTES", [*front_app.ROUTES, route])
    app = gateway_front(FakeClient())
    assert call(app, "/one", {"text": "ab"}).json == {"reward": total("ab") / 2}
    refused = call(app, "/one", {"text": ""})
    assert (refused.status, refused.json) == (400, {"wrong": "row 0: the text is empty"})
    assert "ScoreOneRequest" in call(app, "/openapi.json").json["components"]["schemas"]


def test_every_sample_fits_exactly_one_format() -> None:
    for data_format in FORMATS.values():
        for value in data_format.sample:
            assert [candidate for candidate in FORMATS.values() if candidate.is_certain(value)] == [
                data_format
            ]


def test_the_model_family_of_the_page_is_the_one_that_is_tested() -> None:
    """``tests/checkpoint/hf/families/test_outside.py`` converts it both ways."""
    tested = (tiny.ROOT / "tests/checkpoint/hf/families/toy_llama.py").read_text()
    assert tested.strip() in PAGE


def test_a_scorer_is_evaluated(import_example: Import, tmp_path: Path) -> None:
    pairs = [
        {"prompt": "who", "chosen": "the cat sings", "rejected": "nobody"},
        {"prompt": "why", "chosen": "no", "rejected": "I do not know"},
    ]
    path = write(tmp_path / "pairs.jsonl", *pairs)
    source = RewardSource.of(import_example("my_scorer").WordCount())
    report = evaluate_file(source, path)
    assert report.predictions.rewards.tolist() == [[3, 1], [1, 4]]
    assert report.accuracy == 0.5
