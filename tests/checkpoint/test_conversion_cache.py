"""Models of Hugging Face wherever an archive is taken: converted once, with the archive's bits."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import nemo_aligner as na
from nemo_aligner.api.reward_model import release_models
from nemo_aligner.checkpoint import conversion_cache, custom_families
from nemo_aligner.checkpoint.hf import families
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.nemo.fingerprint import read_fingerprint
from nemo_aligner.checkpoint.nemo.reward_model import read_tokenizer
from nemo_aligner.cli.main import main
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.utils.cache import VARIABLE
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from tests.checkpoint.hf.families.test_outside import write_reward_model as write_toy_llama
from tests.checkpoint.hf.gguf_writing import write_gguf
from tests.data.files import rows_of
from tests.data.hubs import FakeHub
from tests.harness import families as tiny_families
from tests.harness import tiny
from tests.harness.launching import start_script
from tests.serving.servers import running

TEXTS = [tiny.chat("what is the river", "thank you"), "a raw text"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``rm`` and ``base`` of Qwen3, their archives, pairs, and an empty cache."""
    folder = tmp_path_factory.mktemp("models")
    tiny_families.write_reward_model(folder / "rm", "qwen3", torch.float32)
    tiny_families.write_hf_checkpoint(folder / "base", "qwen3")
    for name in ("rm", "base"):
        convert_hf_to_nemo(folder / name, folder / f"{name}.nemo")
    tiny.write_pairs(folder / "pairs.jsonl", 16)
    return folder


@pytest.fixture(autouse=True)
def cache(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache, which the tests of this module share."""
    monkeypatch.setenv(VARIABLE, str(models / "cache"))
    yield models / "cache/models"
    release_models()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let conversions be forks of a prepared process: a new process takes 5 s of CPU time.

    Those of a folder's reward model, of several processes and of a user's family are new ones.
    """

    def run(command: list[str], env: dict[str, str], **unused: Any) -> Any:
        python, _, package, verb, *arguments = command
        assert (python, package) == (sys.executable, "nemo_aligner")
        ours = {key: value for key, value in env.items() if key.startswith("NEMO_ALIGNER_")}
        return tiny.run_verb(verb, *arguments, env=ours, check=False)

    monkeypatch.setattr(conversion_cache, "subprocess", SimpleNamespace(run=run))


def score(path: str | Path) -> np.ndarray:
    with na.RewardModel.from_pretrained(path) as model:
        return model.score(TEXTS)


def evaluate(path: Path, data: str | Path) -> Any:
    with na.RewardModel.from_pretrained(path) as model:
        return model.evaluate(data).rows


def test_reward_model_of_a_folder_has_the_bits_of_its_archive(
    models: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = score(models / "rm.nemo")
    for _ in range(2):
        np.testing.assert_array_equal(score(models / "rm"), expected)
    (archive,) = cache.glob("rm-*")
    shown = capsys.readouterr().out
    assert shown.count("converting it to an archive") == 1
    assert shown.count(f"{models}/rm: in the cache as {archive} (") == 1
    assert read_fingerprint(models / "rm") == read_fingerprint(models / "rm.nemo")
    data = models / "pairs.jsonl"
    assert evaluate(models / "rm", data) == evaluate(models / "rm.nemo", data)
    assert [path.name for path in cache.iterdir()] == [archive.name]


def test_server_of_a_folder_gives_the_rewards_of_its_archive(models: Path, tmp_path: Path) -> None:
    settings = (f"rm_model_file={models / 'rm'}", "server.host=127.0.0.1", "server.port=0")
    program = ("nemo_aligner/__main__.py", "serve")
    variables = {VARIABLE: os.environ[VARIABLE]}
    with (
        running(tmp_path, *program, *settings, variables=variables) as server,
        RewardClient(server.url) as client,
    ):
        np.testing.assert_array_equal(client.score(TEXTS), score(models / "rm.nemo"))


@pytest.mark.usefixtures("forked")
def test_training_from_a_folder_equals_training_from_its_archive(
    models: Path, cache: Path, tmp_path: Path
) -> None:
    losses = []
    settings = {
        "model.data.seq_length": 128,
        "model.micro_batch_tokens": 512,
        "model.global_batch_size": 8,
        "trainer.rm.max_steps": 2,
        "exp_manager.create_tensorboard_logger": False,
    }
    for number, base in enumerate(("base", "base.nemo")):
        output = tmp_path / str(number)
        na.train(models / base, models / "pairs.jsonl", output=output, **settings)
        losses.append(tiny.logged(output)["train/loss"])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert len(list(cache.glob("base-*"))) == 1


@pytest.mark.usefixtures("forked")
def test_base_model_gives_no_rewards(models: Path) -> None:
    for base in ("base", "base.nemo"):
        with pytest.raises(CheckpointError, match=f"{base}: it is a base model without a reward"):
            score(models / base)


def test_processes_that_start_at_once_make_one_archive(models: Path, tmp_path: Path) -> None:
    evaluation = [
        str(tiny.ROOT / "nemo_aligner/__main__.py"), "evaluate",
        f"rm_model_file={models / 'rm'}", f"data.path={models}/pairs.jsonl",
    ]  # fmt: skip
    output, variables = tmp_path / "output", tiny.environment(**{VARIABLE: str(tmp_path)})
    started = start_script(evaluation, variables, [{}, {}], output)
    assert [process.wait(timeout=200) for process in started] == [0, 0], output.read_text()
    assert output.read_text().count("converting it to an archive") == 1
    assert len(list((tmp_path / "models").iterdir())) == 1


def test_ranks_of_a_run_share_one_archive(models: Path, tmp_path: Path) -> None:
    output = tmp_path / "rewards.jsonl"
    done = tiny.run_verb(
        "evaluate",
        f"rm_model_file={models / 'rm'}",
        f"data.path={models}/pairs.jsonl",
        f"output_rewards={output}",
        "model.tensor_model_parallel_size=2",
        processes=2,
        env={VARIABLE: str(tmp_path)},
    )
    assert done.stdout.count("converting it to an archive") == 1
    assert len(list((tmp_path / "models").iterdir())) == 1
    rewards = [row["rewards"]["chosen"] for row in rows_of(output)]
    of_one_rank = evaluate(models / "rm.nemo", models / "pairs.jsonl")
    expected = [row["rewards"]["chosen"] for row in of_one_rank]
    np.testing.assert_allclose(rewards, expected, atol=1e-5)


def test_changed_model_is_converted_again(models: Path, cache: Path, tmp_path: Path) -> None:
    """Also if a training has written the weights again, with the same sizes and headers."""
    folder = tmp_path / "changing"
    shutil.copytree(models / "rm", folder)
    identify = conversion_cache._identify
    first = identify(folder)
    (folder / "README.md").write_text("not read")
    assert identify(folder) == first
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        last = file.read(4)
        file.seek(-4, os.SEEK_END)
        file.write(last[::-1])
    second = identify(folder)
    assert second != first
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert identify(folder) not in (first, second)
    write_gguf(tmp_path / "model.gguf", models / "base")
    first = identify(tmp_path / "model.gguf")
    os.utime(tmp_path / "model.gguf", ns=(0, 0))
    assert identify(tmp_path / "model.gguf") != first


def test_family_of_a_users_code_is_known_to_the_conversion(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is found next to the user's script; new code converts anew."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    monkeypatch.setenv(custom_families.VARIABLE, "")
    code = (tiny.ROOT / "tests/checkpoint/hf/families/toy_llama.py").read_text()
    (tmp_path / "toy_family.py").write_text(code)
    write_toy_llama(tmp_path / "toy")
    with pytest.raises(CheckpointError, match="toy_llama"):
        read_fingerprint(tmp_path / "toy")
    monkeypatch.syspath_prepend(str(tmp_path))
    families.register_family(importlib.import_module("toy_family").TOY_LLAMA)
    convert_hf_to_nemo(tmp_path / "toy", tmp_path / "toy.nemo")
    np.testing.assert_array_equal(score(tmp_path / "toy"), score(tmp_path / "toy.nemo"))
    assert os.environ[custom_families.VARIABLE] == "toy_family:TOY_LLAMA"
    before = conversion_cache._identify(tmp_path / "toy")
    (tmp_path / "toy_family.py").write_text(f"{code}\n")
    assert conversion_cache._identify(tmp_path / "toy") != before
    monkeypatch.setenv(custom_families.VARIABLE, "")
    lost = dataclasses.replace(families.find_family("toy_llama"), name="lost")
    custom_families.announce_family(lost)
    with pytest.raises(CheckpointError, match=r"model_type lost: .*Define it in a module"):
        families.find_family("lost")


def test_cache_is_listed_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for name, size in {
        "models/a-1.nemo": 3_000_000,
        "models/b-2.nemo": 10,
        "data/c.jsonl": 20,
        "data/c.jsonl.index-0123/index.json": 100_000,
        "data/c.jsonl.index-0123/tokens": 2_000_000,
        "data/d.jsonl.index-0123/tokens": 5,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "models/.a-1.nemo.lock").touch()
    assert main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[:5]] == [
        "models/a-1.nemo",
        "data/c.jsonl.index-0123",
        "data/c.jsonl",
        "models/b-2.nemo",
        "data/d.jsonl.index-0123",
    ]
    assert lines[0].split()[:2] == ["3.0", "MB"]
    assert lines[1].split()[:2] == ["2.1", "MB"]
    assert lines[5] == f"5.1 MB in 5 files of {tmp_path}"
    assert main(["cache", "--clear", "lost*"]) == 1
    assert "lost*: no file in" in capsys.readouterr().err
    assert main(["cache", "--clear", "a-*"]) == 0
    assert capsys.readouterr().out.startswith("removed:\n")
    assert not (tmp_path / "models/a-1.nemo").exists()
    # A listed name; the token cache of a data set is removed with it.
    assert main(["cache", "--clear", "data/c.jsonl"]) == 0
    assert sorted(path.name for path in tmp_path.glob("*/*")) == [
        ".a-1.nemo.lock",
        "b-2.nemo",
        "d.jsonl.index-0123",
    ]
    assert main(["cache", "--clear"]) == 0
    assert [path.name for path in tmp_path.glob("*/*")] == [".a-1.nemo.lock"]


@pytest.mark.usefixtures("forked")
def test_gguf_file_is_converted(models: Path, cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", models / "base")
    text = "the river"
    assert read_tokenizer(tmp_path / "small.gguf").encode(text) == read_tokenizer(
        models / "base.nemo"
    ).encode(text)
    assert len(list(cache.glob("small.gguf-*.nemo"))) == 1


@pytest.mark.usefixtures("forked")
def test_name_of_the_hub_is_downloaded_once(
    models: Path, cache: Path, hub: Callable[[Path], dict[str, Any]]
) -> None:
    """A snapshot is identified by its revision, wherever the hub's cache is."""
    snapshot = models / "models--some-org--Tiny-RM/snapshots" / ("0123456789" * 4)
    shutil.copytree(models / "rm", snapshot)
    requests = hub(snapshot)
    np.testing.assert_array_equal(score("some-org/Tiny-RM"), score(models / "rm.nemo"))
    assert requests["name"] == "some-org/Tiny-RM"
    requests.clear()
    score("some-org/Tiny-RM")
    assert not requests
    (archive,) = cache.glob("Tiny-RM-*.nemo")
    (snapshot / "model.safetensors").touch()
    assert conversion_cache.find_archive(Path("some-org/Tiny-RM")) == archive
    read_tokenizer(Path("some-org/Other"))
    assert requests["allow_patterns"] == ["*.json", "*.jinja"]


@pytest.mark.usefixtures("forked")
def test_model_that_cannot_be_opened_says_what_to_do(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    def refuse(error: Exception) -> None:
        def download(name: str, **options: Any) -> str:
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    monkeypatch.chdir(tmp_path)
    refuse(OSError("no route to host"))
    with pytest.raises(CheckpointError, match=r"^some-org/Lost: .*no route.*`hf download some-org"):
        score("some-org/Lost")
    absent = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    refuse(absent)
    with pytest.raises(
        CheckpointError, match=r"^some-org/Lost: .*that you may read.*hf auth login"
    ):
        score("some-org/Lost")
    for path in ("nowhere", "some/deep/path", "nowhere.gguf", "org/lost.nemo"):
        with pytest.raises(CheckpointError, match=f"^{path}: there is no checkpoint"):
            score(path)
    folder = tmp_path / "unknown"
    shutil.copytree(models / "rm", folder)
    config = (folder / "config.json").read_text().replace('"qwen3"', '"qwen99"')
    (folder / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=rf"^{folder}: .*qwen99.*`nemo-aligner convert` has"):
        score(folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=f"the cache cannot be written: .*Set .* {VARIABLE}"):
        score(models / "rm")


def test_data_set_of_the_hub_is_evaluated(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = FakeHub(models / "pairs.jsonl").put_into(monkeypatch)
    rows = evaluate(models / "rm.nemo", "owner/pairs:validation")
    expected = evaluate(models / "rm.nemo", models / "pairs.jsonl")
    assert [{**row, "record": None} for row in rows] == [
        {**row, "record": None} for row in expected
    ]
    assert hub.requests == [("owner/pairs", "validation")]
