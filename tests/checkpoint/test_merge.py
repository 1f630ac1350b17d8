"""Merged reward models have the weighted sums of weights and offsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import EMBEDDING
from nemo_aligner.checkpoint.merge import extrapolate, merge_checkpoints
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model, save_reward_model
from nemo_aligner.cli.checkpoint import merge_parser, run_merge
from nemo_aligner.config.common import Precision
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from tests.checkpoint.refusals import refusals
from tests.harness import tiny

TEXTS = ["what is a map", "thanks for asking"]
Vary = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with reward models whose contracts differ in the length limit, and their bases."""
    folder = tmp_path_factory.mktemp("merge")
    tiny.write_reward_nemo(folder / "first.nemo")
    tiny.write_reward_nemo(folder / "shorter.nemo", seq_length=64)
    return folder


@pytest.fixture
def first(folder: Path) -> Path:
    return folder / "first.nemo"


@pytest.fixture
def vary(first: Path, layout: ParallelLayout, tmp_path: Path) -> Vary:
    """Save the first model with random noise on its last layer and head."""

    def vary(
        name: str,
        seed: int,
        offsets: tuple[float, float] = (1.5, 2.5),
        precision: Precision | None = None,
        **changes: Any,
    ) -> Path:
        loaded = load_reward_model(first, layout, precision)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, parameter in loaded.model.named_parameters():
                if "layers.1" in key or "rm_head" in key:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        contract = replace(loaded.contract, label_means=offsets, **changes)
        save_reward_model(tmp_path / name, loaded.model, loaded.config, loaded.tokenizer, contract)
        return tmp_path / name

    return vary


def stored(path: Path) -> dict[str, Tensor]:
    """Read an archive's tensors; the embedding without vocabulary padding."""
    with open_nemo(path) as folder:
        tensors = {name: folder.store.read(folder.prefix + name) for name in folder.tensors}
        tensors[EMBEDDING] = tensors[EMBEDDING][: folder.config["vocab_size"]]
        return tensors


def score(path: Path, layout: ParallelLayout) -> Any:
    return score_all(load_scorer(path, layout), TEXTS)


def test_merge_sums_weights_and_offsets(
    first: Path, vary: Vary, layout: ParallelLayout, tmp_path: Path
) -> None:
    second = vary("second.nemo", 1, (0.5, -1.5))
    output = tmp_path / "merged.nemo"
    summary = merge_checkpoints([first, second], [0.25, 0.75], output)
    assert "+0.75 x" in summary
    of_first, of_second, merged = stored(first), stored(second), stored(output)
    assert merged.keys() == of_first.keys()
    heads = (tensors["rm_head.weight"].flatten() for tensors in (of_first, of_second))
    cosine = float(torch.cosine_similarity(*heads, dim=0))  # below the limit of 0.5
    assert f"warning: the heads differ in direction (cosine {cosine:.2f})" in summary
    for key, tensor in merged.items():
        expected = 0.25 * of_first[key].double() + 0.75 * of_second[key].double()
        assert torch.equal(tensor, expected.to(tensor.dtype)), key
    contract = load_reward_model(output, layout).contract
    assert contract.label_means == (0.75, -0.5)
    assert contract.hash in summary
    assert np.ptp(score(output, layout)) > 0


def test_merge_of_a_model_with_itself_scores_as_before(
    first: Path, layout: ParallelLayout, tmp_path: Path
) -> None:
    summary = merge_checkpoints([first] * 3, [1 / 3] * 3, tmp_path / "merged.nemo")
    assert "warning" not in summary
    np.testing.assert_array_equal(score(tmp_path / "merged.nemo", layout), score(first, layout))


def test_merge_extrapolates_past_the_trained_model(first: Path, vary: Vary, tmp_path: Path) -> None:
    trained = vary("trained.nemo", 1)
    extrapolate(first, trained, 0.5, tmp_path / "further.nemo")
    base, end = stored(first), stored(trained)
    for key, tensor in stored(tmp_path / "further.nemo").items():
        torch.testing.assert_close(tensor, end[key] + 0.5 * (end[key] - base[key]))


def test_merge_allows_another_kind_of_head_only_where_training_went_on(
    first: Path, vary: Vary, layout: ParallelLayout, tmp_path: Path
) -> None:
    trained = vary("trained.nemo", 1, (0.0, 0.0), attributes=("a", "b"))
    with pytest.raises(CheckpointError, match=r"attributes: \['a', 'b'\] -> \['helpfulness'"):
        merge_checkpoints([first, trained], [0.5, 0.5], tmp_path / "merged.nemo")
    extrapolate(first, trained, 0.5, tmp_path / "further.nemo")
    contract = load_reward_model(tmp_path / "further.nemo", layout).contract
    assert (contract.attributes, contract.label_means) == (("a", "b"), (-0.75, -1.25))


def test_merge_verb_averages_by_default(
    first: Path, vary: Vary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> int:
        return run_merge(merge_parser().parse([str(argument) for argument in arguments]))

    second, output = vary("second.nemo", 2), tmp_path / "mean.nemo"
    assert run("--input", first, second, f"--output={output}") == 0
    assert "+0.5 x" in capsys.readouterr().out
    mean, of_first, of_second = stored(output), stored(first), stored(second)
    torch.testing.assert_close(
        mean["rm_head.weight"], (of_first["rm_head.weight"] + of_second["rm_head.weight"]) / 2
    )
    with pytest.raises(ConfigError, match="got 1 inputs, wanted two: where training"):
        run("--input", first, f"--output={tmp_path / 'x.nemo'}", "--extrapolate=0.5")


def test_merge_refuses_weights_that_would_change_the_scale(first: Path, tmp_path: Path) -> None:
    with refusals(ConfigError) as refused:
        for weights, message in (
            ([0.5, 0.4], "sum to 0.9, wanted a sum of 1"),
            ([float("nan"), 1.0], "wanted a sum of 1"),
            ([1.0], "got 1 weights, wanted 2"),
        ):
            with refused(weights, message):
                merge_checkpoints([first, first], weights, tmp_path / "merged.nemo")
    assert not list(tmp_path.iterdir())


def test_merge_refuses_models_of_another_kind(
    first: Path, folder: Path, vary: Vary, tmp_path: Path
) -> None:
    output, bf16 = tmp_path / "merged.nemo", vary("bf16.nemo", 1, precision=Precision.bf16)
    with refusals() as refused:
        for other, message in (
            (folder / "first.base", "it is not a reward model of this package"),
            (folder / "shorter.nemo", r"shorter\.nemo: .* with .*: model.data.seq_length: "),
            (bf16, "the scoring contracts differ: trainer.precision: 'fp32' -> 'bf16'"),
        ):
            with refused(other.name, message):
                merge_checkpoints([other, first], [0.5, 0.5], output)
    with pytest.raises(ConfigError, match="got 1 reward models to merge"):
        merge_checkpoints([first], [1.0], output)
    assert not output.exists()
