"""``nemo-aligner export --push``: the upload to a hub that a fake HfApi records."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from nemo_aligner.checkpoint.hf.push import push
from nemo_aligner.cli import checkpoint as verbs
from nemo_aligner.utils.errors import CheckpointError, ConfigError

CALLS = ["whoami", "create_repo", "upload_folder"]


class FakeApi:
    """HfApi, with one method that fails."""

    calls: list[tuple[str, dict[str, Any]]]
    failing: str

    def __getattr__(self, name: str) -> Any:
        def call(*names: str, **options: Any) -> Any:
            self.calls.append((name, {**options, "names": names}))
            if name == self.failing:
                raise OSError("401 Unauthorized")
            return SimpleNamespace(commit_url="https://hub/commit/1")

        return call


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("failing", ["", *CALLS])
def test_export_is_pushed(
    kind: str,
    failing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / ("out" if kind == "folder" else "rm.gguf")
    uploads = CALLS if kind == "folder" else [*CALLS[:2], "upload_file"]
    failing = failing if failing != CALLS[2] else uploads[2]
    FakeApi.calls, FakeApi.failing = [], failing

    def export(archive: Path, target: Path, **options: Any) -> str:
        assert options["hub_name"] == "org/name"
        target.mkdir() if kind == "folder" else target.write_text("")
        return "exported"

    monkeypatch.setattr("huggingface_hub.HfApi", FakeApi)
    monkeypatch.setattr(verbs, "export_archive", export)
    command = ["--input", "rm.nemo", "--output", str(output), "--push", "org/name"]
    options: Namespace = verbs.export_parser().parse(command)
    if failing == "whoami":
        with pytest.raises(ConfigError, match=r"^push: .*401 Unauthorized.*hf auth login"):
            verbs.run_export(options)
        assert not output.exists()
        return
    if failing:
        with pytest.raises(
            CheckpointError, match=f"is exported, but .*401.*hf upload org/name {output}"
        ):
            verbs.run_export(options)
        return
    assert verbs.run_export(options) == 0
    assert capsys.readouterr().out == "exported\nuploaded: https://hub/commit/1\n"
    assert [name for name, _ in FakeApi.calls] == uploads
    assert FakeApi.calls[-1][1]["repo_id"] == "org/name"
    assert output in FakeApi.calls[-1][1].values()


def test_pushed_folder_replaces_an_earlier_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one in another form; what no export writes stays."""
    FakeApi.calls, FakeApi.failing = [], ""
    monkeypatch.setattr("huggingface_hub.HfApi", FakeApi)
    push(tmp_path, "org/name")
    exported = [
        "config.json", "scoring_contract.json", "chat_template.jinja", "tokenizer.json",
        "model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
        "value_head.safetensors", "adapter_config.json", "adapter_model.safetensors",
        "modules.json", "1_Pooling/config.json", "score.0/config.json", "score/model.safetensors",
    ]  # fmt: skip
    others = ["rm.gguf", "plot.png", "onnx/model.safetensors", "onnx/config.json"]
    patterns = FakeApi.calls[-1][1]["delete_patterns"]
    deleted = filter_repo_objects([*exported, *others], allow_patterns=patterns)
    assert list(deleted) == exported


def test_push_to_a_name_without_an_organization(tmp_path: Path) -> None:
    command = ["--input", "a.nemo", "--output", str(tmp_path / "out"), "--push", "name"]
    with pytest.raises(ConfigError, match=r"^push: got 'name', wanted .* ORGANIZATION/NAME"):
        verbs.run_export(verbs.export_parser().parse(command))
