"""What only a GPU can show: attention by its kernels, and bf16 training that learns."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_aligner.config.common import Precision
from nemo_aligner.distributed.gpu_matmuls import chunk_sizes, invariant_linear_on_gpu
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.attention.backends import BACKENDS, Backend
from nemo_aligner.models.delta_choice import try_kernel
from nemo_aligner.models.flash_delta import load_kernel
from nemo_aligner.models.pointwise.choice import available_kernels
from nemo_aligner.models.shapes.linear_attention import LinearAttentionShape
from nemo_aligner.models.step import infer
from nemo_aligner.serving.engine.rows import Row
from tests.harness import families, tiny
from tests.models.attention.backend_packs import RandomPack, cases_of, check_backend
from tests.models.dequantized import differing_cases
from tests.models.graphed import PACKS, gradients, load
from tests.models.test_pointwise import check_implementation
from tests.serving.engine.batch_invariance import LONGEST, Case, draw_texts, traffic, write_cases
from tests.serving.engine.cached_layouts import score_ahead, scorers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# What has changed most since it ran on a GPU comes first, because time on one is short.


def test_rewards_have_the_same_bits_in_any_company_on_a_gpu(tmp_path: Path) -> None:
    """Of the defaults, alone and in packs of many sizes, with and without a prefix cache."""
    archive = tiny.write_reward_nemo(tmp_path / "reward.nemo", seq_length=LONGEST)
    case = Case(str(archive), draw_texts(100, LONGEST, 90), orders=6)
    cases = write_cases(tmp_path / "cases.json", {"tiny": case})
    script, settings = "tests/serving/engine/batch_invariance.py", {"CUDA_VISIBLE_DEVICES": "0"}
    done = tiny.run_script(script, str(cases), "one", env=settings, fresh=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {"one": {"tiny": {"fp32": 0, "bf16": 0}}}


def test_calls_that_are_begun_ahead_have_the_bits_of_those_one_by_one(
    tmp_path: Path, layout: ParallelLayout
) -> None:
    """Also with a prefix cache, whose keys the call before has perhaps not computed yet."""
    archive = families.write_base_nemo(tmp_path / "llama3.nemo", "llama3")
    plain, cached = scorers(archive, layout, (1024,), Precision.bf16)
    calls = traffic(random.Random(1), 30)
    one_by_one = [np.concatenate(plain.compute([Row.of(ids) for ids in call])) for call in calls]
    assert all(map(np.array_equal, score_ahead(plain, calls), one_by_one))
    # In bf16 keys that were computed in another pack differ by roundings.
    limit = 0.05 * np.ptp(np.concatenate(one_by_one))
    for ahead, wanted in zip(score_ahead(cached, calls), one_by_one, strict=True):
        np.testing.assert_allclose(ahead, wanted, atol=limit)
    assert cached.counts.cached > 0


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_attention_backend_gives_output_and_gradients_of_the_definition(backend: Backend) -> None:
    """On the packs that a CPU's get, in bf16 and in fp32, of the heads of a real model."""
    cases = [
        case
        for dtype in (torch.bfloat16, torch.float32)
        for case in cases_of(backend, "cuda", (dtype,), channels=64)
    ]
    if not cases:
        pytest.skip("it does not run on this GPU, with this torch, or is not installed")
    for seed, case in enumerate(cases):
        pack = RandomPack.draw(seed, with_cache=not case.learns)
        tolerance = 5e-2 if case.dtype is torch.bfloat16 else 1e-4
        check_backend(backend, case, pack, pack.batch(), tolerance)


def check_kernels(name: str) -> None:
    if name not in [each.value for each in available_kernels(torch.device("cuda"))]:
        pytest.skip(f"{name} is not installed")
    done = tiny.run_script(
        "tests/models/pointwise_ops.py", "cuda", name, env={"CUDA_VISIBLE_DEVICES": "0"}
    )
    found = json.loads(done.stdout.splitlines()[-1])
    check_implementation(found[name], is_invariant=name == "triton")


def test_triton_s_pointwise_kernels_are_right_and_train_alike() -> None:
    """Rows have the same bits alone and among others."""
    check_kernels("triton")


def test_quantized_weights_have_the_bits_of_a_cpu() -> None:
    assert differing_cases("cuda") == []


def train(base: Path, pairs: Path, run: Path, *settings: str) -> list[float]:
    """The loss of each step that ``run`` has so far."""
    tiny.run_script(
        "examples/train_reward_model.py",
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix.train=[{pairs}]",
        f"exp_manager.explicit_log_dir={run}",
        "trainer.precision=bf16",
        "trainer.rm.max_epochs=10",
        "model.global_batch_size=16",
        *settings,
        env={"CUDA_VISIBLE_DEVICES": "0"},
    )
    (path,) = run.rglob("metrics.csv")
    with path.open() as lines:
        return [float(row["train/loss"]) for row in csv.DictReader(lines) if row["train/loss"]]


def test_training_in_bf16_learns_and_with_moments_in_host_memory_is_the_same(
    tmp_path: Path,
) -> None:
    base = tiny.write_base_nemo(tmp_path / "base.nemo")
    pairs = tiny.write_pairs(tmp_path / "pairs.jsonl", 64)
    losses = train(base, pairs, tmp_path / "learns", "model.optim.lr=1e-3")
    assert losses[-1] < 0.5 * losses[0]

    def resumed(offload: str) -> list[float]:
        for steps in (4, 8):  # the second goes on from a checkpoint
            more = (f"model.optim.cpu_offload={offload}", f"trainer.rm.max_steps={steps}")
            losses = train(base, pairs, tmp_path / offload, *more)
        return losses

    found = [resumed(offload) for offload in ("false", "true")]
    assert len(found[0]) == 8
    # The backward of flash attention sums in an order that changes from run to run.
    np.testing.assert_allclose(*np.array(found), rtol=2e-2)


def test_flash_linear_attention_computes_what_torch_does() -> None:
    """In the sizes of a rank of Qwen3.5 9B; the library rejects some versions of Triton."""
    shape = LinearAttentionShape(16, 32, 128, 128, 4)
    device, dtype = torch.device("cuda"), torch.bfloat16
    pytest.importorskip("fla")
    try:
        try_kernel(load_kernel(), shape, shape.num_key_heads, dtype, device)
    except RuntimeError as error:
        if "produces incorrect results" not in str(error):
            raise
        pytest.skip(str(error))


def test_prefix_cache_changes_no_reward_on_a_gpu(tmp_path: Path) -> None:
    """In bf16 what is put together in another order differs by roundings, and by no more."""
    archive = families.write_base_nemo(tmp_path / "llama3.nemo", "llama3")
    done = tiny.run_script(
        "tests/serving/engine/cached_layouts.py",
        "--one",
        "--bf16",
        str(archive),
        env={"CUDA_VISIBLE_DEVICES": "0"},
    )
    found = json.loads(done.stdout.splitlines()[-1])["one"]["llama3"]
    assert found["range"] > 0.3
    assert max(found["worst"].values()) < 0.05 * found["range"]
    assert found["counts"]["4096"]["cached"] > 0


def test_cuda_graphs_give_the_same_rewards_and_gradients(
    tmp_path: Path, layout: ParallelLayout
) -> None:
    """Of two sizes of packs, and with weights that change between replays."""
    base = tiny.write_base_nemo(tmp_path / "base.nemo")
    plainly, model = (
        load(base, layout, capture, precision=Precision.bf16) for capture in (False, None)
    )
    packs = [pack for kind in PACKS.values() for pack in kind]
    for _ in range(2):
        for pack in packs:
            assert torch.equal(infer(model, [pack], layout), infer(plainly, [pack], layout))
        for each in (model, plainly):
            with torch.no_grad():
                each.decoder.layers[1].mlp.linear_fc1.weight.mul_(1.5)
    assert (model.graphs.replayed, model.graphs.eager) == (2 * len(packs) - 2, 2)
    wanted, found = (gradients(each, packs, layout) for each in (plainly, model))
    assert (model.graphs.replayed, model.graphs.eager) == (4 * len(packs) - 4, 4)
    # The backward of flash attention sums in an order that changes from run to run.
    for name, gradient in found.items():
        assert (gradient - wanted[name]).norm() < 0.03 * wanted[name].norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matmuls_have_the_same_bits_for_a_row_in_any_number_of_rows(dtype: torch.dtype) -> None:
    """Of a decoder's shapes, of a LoRA adapter's and of a head's; see ``gpu_matmuls``."""
    torch.manual_seed(0)
    kind = {"device": "cuda", "dtype": dtype}
    for outputs, inputs in ((3072, 2048), (2048, 5632), (16, 2048), (2048, 16), (1, 2048)):
        x, weight = torch.randn(9000, inputs, **kind), torch.randn(outputs, inputs, **kind)
        for bias in (None, torch.randn(outputs, **kind)):
            assert outputs <= 16 or len(chunk_sizes(weight, bias, 1024)) > 1
            every = invariant_linear_on_gpu(x, weight, bias, 1024)
            for start, end in ((0, 1), (64, 200), (1024, 1900), (5, 4200), (8999, 9000)):
                ours = invariant_linear_on_gpu(x[start:end], weight, bias, 1024)
                assert torch.equal(ours, every[start:end]), (outputs, inputs, start, end)
            wanted = torch.nn.functional.linear(x, weight, bias)
            torch.testing.assert_close(every, wanted, atol=inputs**0.5 * 2e-2, rtol=2e-2)


# Last: each shape is compiled, which takes minutes.
@pytest.mark.parametrize("name", ["liger", "compile"])
def test_other_pointwise_kernels_are_right_and_train_alike(name: str) -> None:
    check_kernels(name)
