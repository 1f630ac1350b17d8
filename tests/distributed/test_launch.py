"""A process group of one, with and without a launcher, and which layouts fit a world size."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from nemo_aligner.distributed import launch as launching
from nemo_aligner.distributed.launch import launch, single_process
from nemo_aligner.distributed.layout import LayoutSizes, ParallelLayout, check_sizes
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.processes import Process
from tests.harness import tiny
from tests.harness.launching import TORCHRUN, run_code


def test_launch_of_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in TORCHRUN:
        monkeypatch.delenv(key, raising=False)
    with launch() as launched:
        assert launched.is_main
        assert launched.world_size == dist.get_world_size() == 1
        assert launched.backend == dist.get_backend() == "one_rank"
    assert not dist.is_initialized()


def test_conversion_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in TORCHRUN:
        monkeypatch.delenv(key, raising=False)
    with single_process():
        assert dist.get_world_size() == 1
        with single_process():
            assert dist.is_initialized()
        assert dist.is_initialized()
    assert not dist.is_initialized()
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    with (
        pytest.raises(ConfigError, match=f"got {TORCHRUN['WORLD_SIZE']} processes, wanted one"),
        single_process(),
    ):
        pass


def test_fp32_stays_fp32_where_the_environment_or_the_program_asks_for_tf32() -> None:
    """Also for single backends, as ``TrainingArguments(tf32=True)`` does.

    torch then knows no common precision, and raises.
    """
    code = (
        "import torch\n"
        "from nemo_aligner.distributed.launch import launch\n"
        "print(torch.get_float32_matmul_precision())\n"
        "with launch(): print(torch.get_float32_matmul_precision())\n"
        "backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul\n"
        "for backend, precision in zip(backends, ('tf32', 'bf16')):\n"
        "    backend.fp32_precision = precision\n"
        "with launch(): print(torch.get_float32_matmul_precision())\n"
        "print(*(backend.fp32_precision for backend in backends))"
    )
    told = tiny.environment(TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1")
    done = run_code(code, environment=told)
    assert done.stdout.split() == ["high", "highest", "highest", "ieee", "ieee"], done.stderr
    for precision in ("high", "bf16 and tf32"):
        assert f"fp32 matmuls were set to reduced precision ('{precision}'" in done.stderr


def test_rank_that_fails_after_a_signal_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other may be in a collective with it; it has time to save, but not an hour."""
    seconds = 0.0

    def sleep(duration: float) -> None:
        nonlocal seconds
        seconds += duration
        assert seconds < 3600, "the launcher still waits"

    clock = SimpleNamespace(monotonic=lambda: seconds, sleep=sleep)
    monkeypatch.setattr(launching, "time", clock)
    monkeypatch.setattr(launching, "_POLL_S", 10.0)
    for signals, shortest in (([], 30), ([signal.SIGTERM], 300)):
        seconds = 0.0
        waiting, failed = Mock(**{"poll.return_value": None}), Mock(**{"poll.return_value": 3})
        assert launching._first_failure([waiting, failed], signals) == 1
        assert seconds > shortest
        # Who has the signal already gets no second one, which would end it.
        assert waiting.send_signal.called == (not signals)


def test_ranks_that_save_are_killed_by_a_second_ctrl_c_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the rule of the ranks themselves, see training/test_signals.py."""
    now = 5.0
    monkeypatch.setattr(launching, "time", SimpleNamespace(monotonic=lambda: now))
    interrupt, terminate, user = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
    for first, second, after, is_killed in (
        (interrupt, interrupt, 1.5, True),
        (interrupt, interrupt, 0.3, False),
        (terminate, interrupt, 1.5, True),
        (terminate, terminate, 1.5, False),
        (user, terminate, 1.5, False),
    ):
        rank = Mock()
        with launching._forwarding_signals([rank]):
            signal.raise_signal(first)
            now += after
            signal.raise_signal(second)
            sent = [call.args[0] for call in rank.send_signal.call_args_list]
        assert sent == [first, *[signal.SIGKILL] * is_killed], (first, second, after)


def test_ranks_inherit_that_nohup_ignores_the_end_of_the_terminal() -> None:
    """A signal with a handler has its default effect in a program that is executed."""
    previous = {number: signal.getsignal(number) for number in launching._FORWARDED_SIGNALS}
    try:
        for hangup in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, hangup)
            with launching._forwarding_signals([]):
                handlers = {number: signal.getsignal(number) for number in previous}
            assert (handlers.pop(signal.SIGHUP) is signal.SIG_IGN) == (hangup is signal.SIG_IGN)
            assert all(map(callable, handlers.values()))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def select(monkeypatch: pytest.MonkeyPatch, local_rank: int, gpus: int, torchrun: bool) -> str:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("RANK", raising=False)
    if torchrun:
        monkeypatch.setenv("RANK", str(local_rank))
    process = Process(local_rank, 4, local_rank, 4, ("127.0.0.1", 1))
    return str(launching._select_device(process, use_cuda=True))


def test_gpu_of_a_local_rank_is_its_own_or_the_only_one_that_slurm_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert select(monkeypatch, 2, gpus=4, torchrun=True) == "cuda:2"
    assert select(monkeypatch, 2, gpus=4, torchrun=False) == "cuda:2"
    assert select(monkeypatch, 2, gpus=1, torchrun=False) == "cuda:0"
    with pytest.raises(
        ConfigError, match="local rank 2 has no GPU of its own: this process sees 1"
    ):
        select(monkeypatch, 2, gpus=1, torchrun=True)
    with pytest.raises(ConfigError, match="this process sees 2"):
        select(monkeypatch, 2, gpus=2, torchrun=False)


def test_threads_of_the_ranks_share_the_cores_that_they_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """srun binds each rank to cores of its own, which other launchers do not."""
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(launching.os, "cpu_count", lambda: 64)
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0"}
    for usable, ranks, environment, expected in (
        (64, 8, {}, 8),
        (16, 8, {}, 2),
        (2, 1, {}, 2),
        (1, 2, {}, 1),
        (8, 8, slurm, 8),
        (64, 8, slurm, 8),
        (8, 8, {**slurm, "RANK": "0", "WORLD_SIZE": "8"}, 1),
        (16, 2, {"OMP_NUM_THREADS": "3"}, None),
    ):
        threads.clear()
        monkeypatch.setattr(launching, "usable_cores", lambda usable=usable: usable)
        monkeypatch.setattr(launching.os, "environ", environment)
        launching._split_cores(ranks)
        assert threads == ([] if expected is None else [expected])


def test_rank_that_fails_first_says_so_when_the_store_is_gone_with_rank_0() -> None:
    """Rank 0, which hosts the store under srun, counts second and ends at once."""
    store = Mock(add=Mock(side_effect=[1, dist.DistNetworkError("connection reset")]))
    rank_1 = Process(1, 2, 1, 2, ("127.0.0.1", 1))
    with pytest.raises(ConfigError, match="seed: got -1"):
        launching.fail_once(ConfigError("seed: got -1"), store, rank_1)


def test_layout_sizes_leave_the_rest_to_data_parallelism_or_do_not_fit() -> None:
    for ranks, tp, pp, dp in ((1, 1, 1, 1), (8, 2, 2, 2), (8, 8, 1, 1), (6, 1, 3, 2)):
        assert check_sizes(ranks, tp, pp, sequence_parallel=tp > 1) == dp
    with pytest.raises(ConfigError, match="got 6 processes, wanted a multiple of 4"):
        check_sizes(6, 2, 2, False)
    with pytest.raises(ConfigError, match=r"model\.sequence_parallel: got true"):
        check_sizes(2, 1, 2, True)
    with pytest.raises(ConfigError, match=r"expert_model_parallel_size: .*--processes 12$"):
        check_sizes(4, 2, 1, False, ep=3, cp=2)
    assert check_sizes(12, 2, 1, False, ep=3, cp=2) == 3


def test_layout_is_written_in_one_way() -> None:
    sizes = {"tp": 2, "pp": 3, "dp": 4, "sequence_parallel": True}
    ranks = {"tp_rank": 1, "pp_rank": 2, "dp_rank": 0}
    layout = ParallelLayout(**sizes, **ranks)  # type: ignore[arg-type]
    assert str(layout) == str(LayoutSizes(**sizes)) == "TP=2+SP PP=3 DP=4"  # type: ignore[arg-type]
    assert layout.num_ranks == 24
    assert str(LayoutSizes()) == "TP=1 PP=1 DP=1"
