"""Every attention backend that runs on a CPU, on the same random packs; and which one is chosen."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from nemo_aligner.models.attention.backends import (
    BACKENDS,
    C_FILE,
    RING,
    Backend,
    Case,
    Feature,
    choose_backend,
)
from nemo_aligner.models.attention.segments import Scores
from tests.models.attention.backend_packs import RandomPack, cases_of, check_backend
from tests.models.attention.varlen_stand_in import use_stand_ins

DTYPES = torch.float64, torch.float32
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6}
GPU_BACKENDS = {
    "FlashAttention 3",
    "flash-attn-4",
    "torch's varlen function",
    "torch's varlen operator",
    "flash-attn",
}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_backend_gives_output_and_gradients_of_the_definition(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scoring has shared and cached prefixes, training shared ones; windows and soft caps both.

    Those of a GPU run with a stand-in for its kernel; tests/models/test_gpu.py has the real one.
    """
    if backend is C_FILE and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    if backend.name in GPU_BACKENDS:
        use_stand_ins(monkeypatch)
        backend = replace(backend, runs=lambda case: True)
    cases = list(cases_of(backend, "cpu", DTYPES, channels=8))
    assert cases
    for seed, case in enumerate(cases):
        pack = RandomPack.draw(seed, with_cache=not case.learns)
        batch = pack.batch()
        # A ring's shares are padded anyway.
        if seed % 2 and not case.uses_ring:
            batch = batch.padded_to_multiple(64)
        check_backend(backend, case, pack, batch, TOLERANCES[case.dtype])


def test_packs_have_shared_and_cached_prefixes() -> None:
    for seed in range(20):
        batch = RandomPack.draw(seed, with_cache=True).batch()
        assert batch.cached is not None
        assert int(batch.prefixes.max()) >= len(batch.cached.lengths)
        batch = RandomPack.draw(seed, with_cache=False).batch()
        assert batch.cached is None
        assert int(batch.prefixes.max()) >= 0


def test_cpu_s_backends_are_chosen_by_the_layer_s_scores_and_by_training() -> None:
    def name(learns: bool, *scores: float | int | None, uses_ring: bool = False) -> str:
        kind = "cpu", torch.float64, 6, 2, 8
        return choose_backend(Case(*kind, Scores(*scores), learns, uses_ring)).name  # type: ignore[arg-type]

    assert name(True) == "CPU training"
    assert name(True, None, 5) == "one by one"
    assert name(True, None, None, 30.0) == "one by one"
    assert name(False) == name(False, None, 5) == name(False, None, 5, 30.0) == "CPU blocks"
    assert name(True, None, 5, uses_ring=True) == name(False, uses_ring=True) == "ring"


def test_no_backend_computes_a_feature_that_it_does_not_name() -> None:
    scores = Scores(None, 5, 30.0)
    case = Case("cpu", torch.float64, 6, 2, 8, scores, learns=True, uses_ring=True)
    assert case.features == {Feature.WINDOW, Feature.SOFT_CAP}
    assert not RING.fits(case)
