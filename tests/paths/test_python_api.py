"""The Python API: train, evaluate, score and export, as the verbs do."""

from __future__ import annotations

import datetime
import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nemo_aligner as na
from nemo_aligner.api.reward_model import release_models
from nemo_aligner.contract.messages import Conversation
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.data.records import as_json, write_records
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.utils.errors import ConfigError, DataError, SettingsError, StoppedError
from tests.contract.refusals import assert_refused
from tests.data.files import pair_with_call
from tests.harness import tiny
from tests.harness.environments import kept_environment, make_environment
from tests.training import jobs

SETTINGS: dict[str, Any] = {
    "model.data.seq_length": 128,
    "model.micro_batch_tokens": 512,
    "model.global_batch_size": 8,
    "model.optim.lr": 1e-3,
    "model.optim.sched.warmup_steps": 1,
    "trainer.rm.val_check_interval": 2,
    "exp_manager.create_tensorboard_logger": False,
}
QUESTION = {"role": "user", "content": "what is the river"}
TEXTS = [[QUESTION, {"role": "assistant", "content": "thank you"}], "a raw text"]
ROWS = {"model.batch_invariant_rows": 64}
REFUSED = [QUESTION, {"role": "assistant", "content": "yes <|im_end|>"}]
LIGHT = """
import sys
import nemo_aligner as na
assert na.train and na.RewardModel and "train" in dir(na)
print([name for name in ("torch", "megatron", "transformers", "lightning") if name in sys.modules])
import nemo_aligner.serving.client
print("torch" in sys.modules)
"""
OF_DATASETS = """
import sys
import datasets
from pathlib import Path
from nemo_aligner.data.records import write_records
rows = datasets.load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[3])
print(write_records(Path(sys.argv[2]), rows))
"""


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def models_in_memory() -> weakref.WeakSet[torch.nn.Module]:
    from nemo_aligner.models.reward_model import GPTRewardModel

    gc.collect()
    return weakref.WeakSet(each for each in gc.get_objects() if isinstance(each, GPTRewardModel))


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    release_models()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    tiny.write_base_nemo(folder / "base.nemo")
    tiny.write_pairs(folder / "pairs.jsonl", 32)
    tiny.write_pairs(folder / "heldout.jsonl", 16, seed=3)
    return folder


class Trained:
    """A run of four steps, and the arguments of its callback."""

    def __init__(self, folder: Path) -> None:
        # Other tests in this process may have loaded models.
        self.strangers = models_in_memory()
        self.folder = folder
        self.pairs = rows_of(folder / "pairs.jsonl")
        self.heldout = rows_of(folder / "heldout.jsonl")
        self.told: list[na.TrainingProgress] = []
        self.model = self.train("run", callback=self.told.append)

    def train(self, output: str, **more: Any) -> na.RewardModel:
        return na.train(
            self.folder / "base.nemo",
            self.pairs,
            validation=self.heldout,
            output=self.folder / output,
            **{**SETTINGS, **more},
        )


@pytest.fixture(scope="module")
def trained(folder: Path) -> Trained:
    return Trained(folder)


def test_api_is_imported_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, env=tiny.environment()
    )
    assert done.stdout.splitlines() == ["[]", "False"], done.stderr
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = na.trian


@pytest.mark.smoke
def test_train_is_the_verb_on_records_that_lie_in_the_run_folder(trained: Trained) -> None:
    folder, run = trained.folder, trained.folder / "run"
    records = run / "data" / "train" / "records.jsonl"
    assert rows_of(records) == trained.pairs
    facts = json.loads((run / "run_facts.json").read_text())
    assert facts["data"][0]["path"] == str(records)
    given = {
        **SETTINGS,
        "pretrained_checkpoint.restore_from_path": folder / "base.nemo",
        "model.data.data_prefix.train": folder / "pairs.jsonl",
        "model.data.data_prefix.validation": folder / "heldout.jsonl",
        "exp_manager.explicit_log_dir": folder / "by_verb",
    }
    jobs.run([jobs.Job("train", [f"{key}={value}" for key, value in given.items()])])
    by_verb = na.RewardModel.from_pretrained(folder / "by_verb/checkpoints/megatron_gpt.nemo")
    np.testing.assert_array_equal(trained.model.score(TEXTS), by_verb.score(TEXTS))
    logged = rows_of(run / "metrics.jsonl")
    assert [each.step for each in trained.told] == [row["step"] for row in logged]
    assert {each.total_steps for each in trained.told} == {4}
    losses = [each.metrics["train/loss"] for each in trained.told if "train/loss" in each.metrics]
    assert losses == [row["train/loss"] for row in logged if "train/loss" in row]
    assert len(losses) == 4


def test_evaluation_has_the_figures_of_the_validation_and_prints_as_the_verb(
    trained: Trained, tmp_path: Path
) -> None:
    given = {"output": tmp_path / "e.json", "output_rewards": tmp_path / "e.jsonl"}
    found = trained.model.evaluate(trained.heldout, **given)
    assert isinstance(found, na.Evaluation)
    validated = [
        each.metrics["validation-records/accuracy"]
        for each in trained.told
        if "validation-records/accuracy" in each.metrics
    ]
    assert found.accuracy == found.metrics["accuracy"] == max(validated)
    assert found.interval is not None
    assert found.interval[0] < found.accuracy < found.interval[1]
    assert found.counts == {"read": 16, "kept": 16}
    assert [row["record"] for row in found.rows] == [f"records.jsonl:{n + 1}" for n in range(16)]
    assert "data          records.jsonl\n" in str(found)
    content = json.loads((tmp_path / "e.json").read_text())
    assert (content["data"], content["metrics"]["accuracy"]) == ("records.jsonl", found.accuracy)
    assert rows_of(tmp_path / "e.jsonl") == found.rows
    file = trained.folder / "heldout.jsonl"
    again = trained.model.evaluate(file, **{"data.format": "chat_pairs"})
    assert again.metrics == found.metrics
    assert f"data          {file}" in str(again)
    with pytest.raises(ConfigError, match=r"^precision: wanted one of .*data, task"):
        trained.model.evaluate(trained.heldout, precision="bf16")
    with pytest.raises(ConfigError, match=r"^format: .*; did you mean data\.format\?$"):
        trained.model.evaluate(trained.heldout, format="hh")
    with pytest.raises(DataError, match=r"records\.jsonl:2: got keys 'prompt', 'chosen'"):
        trained.model.evaluate([trained.heldout[0], {"prompt": "a", "chosen": "b"}])


def test_score_refuses_a_text_by_its_number_or_leaves_it_out(trained: Trained) -> None:
    model = trained.model
    rewards = model.score(TEXTS)
    assert (rewards.shape, rewards.dtype) == ((2, 1), np.float32)
    np.testing.assert_array_equal(model.score([TEXTS[1]]), rewards[1:])
    assert model.attributes == tuple(model.contract().attributes) == ("reward",)
    with pytest.raises(DataError, match=r"^text 1: messages\[1\]"):
        model.score([TEXTS[0], REFUSED])
    found = model.score([REFUSED, TEXTS[0]], on_error="nan")
    np.testing.assert_array_equal(found, [[np.nan], rewards[0]])
    assert model.score([]).shape == (0, 1)
    whole = {"messages": TEXTS[0]}
    for one in (TEXTS[0], "a raw text", whole, Conversation(**whole)):  # type: ignore[arg-type]
        for score in (model.score, RewardClient("http://127.0.0.1:1").score):
            with pytest.raises(TypeError, match=r"^texts: got .*one text.*, wanted a list of text"):
                score(one)  # type: ignore[operator]


def test_score_reads_conversations_and_returns_rows_as_the_client(trained: Trained) -> None:
    """``tools`` in a dict, as a JSON string, or in a ``Conversation`` are the same sample."""
    tools = [{"type": "function", "function": {"name": "weather"}}]
    forms: list[Any] = [
        {"messages": TEXTS[0], "tools": tools},
        {"messages": TEXTS[0], "tools": json.dumps(tools)},
        Conversation(TEXTS[0], tools),  # type: ignore[arg-type]
        {"messages": TEXTS[0]},
        TEXTS[0],
    ]
    rewards = trained.model.score(forms[3:])
    assert rewards[0] == rewards[1]
    rows = trained.model.score_rows([REFUSED, *forms])
    assert [*rows.errors] == [0, 1, 2, 3]
    assert rows.errors[0].startswith("messages[1]")
    assert rows.errors[1].startswith("tools: the chat template")
    assert len({rows.errors[row] for row in (1, 2, 3)}) == 1
    np.testing.assert_array_equal(rows.rewards[4:6], rewards)
    assert np.isnan(rows.rewards[:4]).all()
    assert rows.exceeded.tolist() == [False] * 6
    assert rows.contract_hash == trained.model.contract().hash
    assert rows.spread is rows.outputs is None


def test_score_rows_tell_how_certain_they_are(trained: Trained, tmp_path: Path) -> None:
    """For a head with several outputs per attribute, in process and over HTTP."""
    ratings = rows_of(tiny.write_ratings(tmp_path / "rated.jsonl", 16, ("help",)))
    rated = {
        "model.reward_model_type": "regression",
        "model.regression.attributes": ["help"],
        "model.objective": "quantiles",
    }
    base, output = trained.folder / "base.nemo", tmp_path / "run"
    model = na.train(base, ratings, output=output, **{**SETTINGS, **rated})
    rows = model.score_rows([REFUSED, *TEXTS])
    assert rows.spread is not None
    assert rows.outputs is not None
    assert rows.outputs.shape[0] == 3
    assert np.isnan(rows.spread[0]).all()
    assert np.isfinite(rows.spread[1:]).all()


def test_export_is_scored_as_a_model_of_transformers_beside_the_archive(
    trained: Trained, tmp_path: Path
) -> None:
    summary = trained.model.export(tmp_path / "hf")
    assert "checked: " in str(summary)
    with na.RewardModel.from_pretrained(hf_model=tmp_path / "hf") as theirs:
        np.testing.assert_allclose(theirs.score(TEXTS), trained.model.score(TEXTS), atol=1e-5)
        assert len(models_in_memory()) == 1, "the archive's model is unloaded"
        with pytest.raises(DataError, match=r"^text 1: messages\[1\]"):
            theirs.score([TEXTS[0], REFUSED])
        with pytest.raises(ConfigError, match="hf_model"):
            theirs.export(tmp_path / "again")
    with pytest.raises(ConfigError, match="got none, wanted exactly one"):
        na.RewardModel.from_pretrained()


def test_model_is_loaded_again_from_another_working_directory(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(trained.folder)
    with na.RewardModel.from_pretrained("run/checkpoints/megatron_gpt.nemo") as model:
        rewards = model.score(TEXTS)
        release_models()
        monkeypatch.chdir(tmp_path)
        np.testing.assert_array_equal(model.score(TEXTS), rewards)


def test_second_training_in_a_process_leaves_nothing_of_the_first(trained: Trained) -> None:
    hook = sys.excepthook
    before = trained.model.score(TEXTS)
    again = trained.train("again")
    np.testing.assert_array_equal(again.score(TEXTS), before)
    np.testing.assert_array_equal(trained.model.score(TEXTS), before)
    release_models()
    assert list(models_in_memory() - trained.strangers) == []
    assert sys.excepthook is hook
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_saves_and_the_same_call_goes_on(trained: Trained) -> None:
    def interrupt(progress: na.TrainingProgress) -> None:
        if progress.step == 2 and "train/loss" in progress.metrics:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="by Ctrl-C after step 2, which is saved"):
        trained.train("interrupted", callback=interrupt)
    went_on: list[int] = []
    model = trained.train("interrupted", callback=lambda progress: went_on.append(progress.step))
    assert {3, 4} <= set(went_on)
    assert 1 not in went_on
    np.testing.assert_array_equal(model.score(TEXTS), trained.model.score(TEXTS))
    with pytest.raises(ConfigError, match=r"train/records\.jsonl: .* began with other records"):
        na.train(
            trained.folder / "base.nemo",
            trained.pairs[1:],
            output=trained.folder / "interrupted",
            **SETTINGS,
        )
    assert rows_of(trained.folder / "interrupted/data/train/records.jsonl") == trained.pairs


def test_error_of_a_callback_and_the_time_limit_end_a_run(trained: Trained) -> None:
    def fail(progress: na.TrainingProgress) -> None:
        raise ZeroDivisionError("of the callback")

    with pytest.raises(ZeroDivisionError, match="of the callback"):
        trained.train("failed", callback=fail)
    limit = {"trainer.max_time": "00:00:00:01"}
    with pytest.raises(StoppedError, match=r"by the time limit .* is saved: the same call resumes"):
        trained.train("stopped", callback=lambda _: time.sleep(0.6), **limit)


def test_settings_are_checked_as_the_verbs(trained: Trained, tmp_path: Path) -> None:
    base = trained.folder / "base.nemo"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model.optim.lrr": 1}, "unknown key model.optim.lrr; did you mean model.optim.lr?"),
        ({"model.optim.lr": "much"}, "model.optim.lr: got 'much', wanted"),
        ({"model": {"seeds": 1}}, "unknown key model.seeds; did you mean model.seed?"),
        ({"exp_manager.explicit_log_dir": "x"}, "exp_manager.explicit_log_dir: got it twice"),
        ({"model.data.data_prefix.train": "x"}, "model.data.data_prefix.train: got it twice"),
        ({"records": {"a": []}}, "records: got a mapping from a to data sets, wanted"),
        ({"validation": {"chat": "x/a.b.jsonl"}}, "x/a.b.jsonl would be named validation-a/..."),
        ({"test": {"a": "a.jsonl", "b": ["b.jsonl", "c.jsonl"]}}, "c.jsonl would be named test-c/"),
        ({"test": {"v1.0": trained.pairs}}, "test: got the name 'v1.0', but the metrics of v"),
        ({"records": None}, "model.data.data_prefix.train: it is not set"),
        ({"config": "train_reward_modle"}, "did you mean train_reward_model, which the package"),
    ]
    for changes, said in wrong:
        given = {"records": trained.pairs, "output": tmp_path / "run", **changes}
        with pytest.raises(ConfigError) as caught:
            na.train(base, given.pop("records"), **given)
        assert said in str(caught.value), changes
    with pytest.raises(SettingsError, match=r"^pretrained_checkpoint\.restore_from_path: it is"):
        na.train(None, trained.pairs, output=tmp_path / "run")
    with pytest.raises(DataError, match=r"train/records\.jsonl:2: got keys 'prompt', 'chosen'"):
        na.train(base, [trained.pairs[0], {"prompt": "a", "chosen": "b"}], output=tmp_path / "new")


def test_settings_that_do_nothing_are_noted_once_as_by_the_verbs(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    na.RewardModel({"hf_model": "a", "model.tensor_model_parallel_size": 2})
    note = "note: model.tensor_model_parallel_size does nothing\n  with hf_model=a\n"
    assert capsys.readouterr().out == note
    model = na.RewardModel({**trained.model._settings, "model.batch_invariant": False} | ROWS)
    noted = capsys.readouterr().out
    assert (
        noted
        == "note: model.batch_invariant_rows does nothing\n  with model.batch_invariant=false\n"
    )
    model.evaluate(trained.heldout, **{"data.max_malformed": 0.5})
    said = capsys.readouterr().out
    assert "note: data.max_malformed does nothing\n  with data.malformed=error\n" in said
    assert said.count("note: ") == 1


class Frame:
    """The part of a pandas DataFrame that the API uses."""

    columns = ("prompt",)

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2


def test_training_data_that_is_no_list_of_paths_or_of_records_is_refused(tmp_path: Path) -> None:
    """A set has another order in each process, so the run could not be resumed."""
    from nemo_aligner.api.training import _write_as_files

    pair = Frame().to_dict("records")[0]
    refused: list[tuple[object, str]] = [
        ({Path("a"), Path("b")}, r"^validation: got a set, whose order changes .* Pass a list"),
        ({"a": frozenset("a")}, r"^validation: a: got a set, whose order"),
        (io.StringIO(json.dumps(pair)), r"^validation: got an open file\. Pass its path"),
        (["a", pair], r"^validation: got \{'prompt': 'a', .* as item 2, wanted a path"),
    ]
    assert_refused(lambda data: _write_as_files(data, tmp_path, "validation"), refused, ConfigError)


def test_records_of_every_kind_become_lines(tmp_path: Path) -> None:
    from nemo_aligner.api.training import _write_as_files

    (written,) = _write_as_files(Frame(), tmp_path, "train")
    assert len(rows_of(Path(written))) == 2
    pair = Frame().to_dict("records")[0]
    sets = {"safe": (row for row in [pair]), "chat": "chat.jsonl"}
    files = _write_as_files(sets, tmp_path, "validation")
    assert files == [str(tmp_path / "data/validation/safe.jsonl"), "chat.jsonl"]
    assert _write_as_files([Path("a"), "b"], tmp_path, "test") == ["a", "b"]
    # Iterators are read once; of a mapping, also where the names are compared with those of files.
    assert _write_as_files(map(Path, "ab"), tmp_path, "train") == ["a", "b"]
    globbed = {"a": (Path(name) for name in ["a.jsonl"]), "rows": iter([pair, pair])}
    files = _write_as_files(globbed, tmp_path, "validation")
    assert files == ["a.jsonl", str(tmp_path / "data/validation/rows.jsonl")]
    assert rows_of(Path(files[1])) == [pair, pair]
    record = {"n": np.int64(3), "x": np.float32(0.5), "l": np.arange(2), "nan": float("nan")}
    assert json.loads(as_json(record)) == {"n": 3, "x": 0.5, "l": [0, 1], "nan": None}
    assert json.loads(as_json({"d": datetime.date(2026, 1, 2)})) == {"d": "2026-01-02"}
    assert json.loads(as_json({"half": "\ud800"})) == {"half": "\ud800"}
    path = tmp_path / "kept.jsonl"
    assert write_records(path, Frame()) == 2  # type: ignore[arg-type]
    assert write_records(path, [pair]) == 1
    before = path.stat().st_mtime_ns
    assert write_records(path, iter([pair]), may_replace=False) == 1
    assert path.stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"^record 2: got 'b', wanted a dict"):
        write_records(path, [pair, "b"])  # type: ignore[list-item]
    refused: list[tuple[object, str]] = [
        (
            {"chosen": b"because"},
            r"^record 1: chosen: got bytes b'because', which JSON cannot hold",
        ),
        ({"chosen": [{"role": "assistant", "content": {1}}]}, r"chosen\[0\].content: got set {1}"),
        ({"chosen": np.array([b"a"])}, r"chosen\[0\]: got bytes b'a', which"),
        ({b"chosen": "a"}, r"^record 1: top level: got the key b'chosen', wanted a string"),
        ({"chosen": object()}, r"chosen: got object <object .*leave this column out"),
    ]
    assert_refused(lambda row: write_records(path, [row]), refused, DataError)
    assert rows_of(path) == [pair]
    with pytest.raises(DataError, match=r"^record 2: it is not a JSON object: .*4300 digits"):
        write_records(path, [pair, {**pair, "score": 10**5000}])
    assert [each.name for each in tmp_path.iterdir() if "partial" in each.name] == []


def test_records_of_conversations_are_what_their_messages_say(tmp_path: Path) -> None:
    asked, told = {"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}
    other = {**told, "content": "no"}
    tools = [{"type": "function", "function": {"name": "look"}}]
    cases: list[tuple[dict[str, Any], tuple[Any, Any]]] = [
        (
            {"chosen": Conversation([asked, told]), "rejected": Conversation([asked, other])},
            ([asked, told], [asked, other]),
        ),
        (
            {"prompt": Conversation([asked], tools), "chosen": [told], "rejected": "no"},
            (Conversation([asked, told], tools), Conversation([asked, other], tools)),
        ),
        (
            {key: Conversation([asked, reply], tools) for key, reply in
             (("chosen", told), ("rejected", other))},
            (Conversation([asked, told], tools), Conversation([asked, other], tools)),
        ),
    ]  # fmt: skip
    path = tmp_path / "pairs.jsonl"
    for record, texts in cases:
        write_records(path, [record])
        assert read_records(path, ReaderConfig()).records[0].texts == texts


def test_records_of_datasets_become_the_lines_that_they_were(tmp_path: Path) -> None:
    wanted = ("datasets>=4,<5", "numpy<2", "pyarrow<26")

    def make(folder: Path) -> None:
        make_environment(folder, *wanted)

    python = kept_environment("hub", wanted, make) / "bin" / "python"
    source = tmp_path / "pairs.jsonl"
    pairs = [pair_with_call(city="Bonn"), pair_with_call(query="cats")]
    source.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    given = [source, tmp_path / "written.jsonl", tmp_path / "cache"]
    done = subprocess.run(
        [str(python), "-c", OF_DATASETS, *map(str, given)],
        capture_output=True,
        text=True,
        env=tiny.environment(HF_HUB_OFFLINE="1"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert rows_of(tmp_path / "written.jsonl") == rows_of(source)


def test_script_on_two_ranks_gives_the_results_of_one(trained: Trained) -> None:
    """Its ranks are forks; those of test_local_ranks.py launch twice with a launcher's store."""
    given = (str(trained.folder), json.dumps(SETTINGS))
    done = tiny.run_script("tests/paths/python_api_on_two_ranks.py", *given, processes=2)
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0]["records"] == 32
    np.testing.assert_allclose(found[0]["rewards"], trained.model.score(TEXTS), atol=1e-5)
    assert found[0]["accuracy"] == trained.model.evaluate(trained.heldout).accuracy
    assert "a conversion: got 2 processes, wanted one" in found[0]["export"]
