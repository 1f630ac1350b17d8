"""Options of pytest, distribution of tests over xdist workers, and fixtures of several folders."""

from __future__ import annotations

import argparse
import gc
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

import nemo_aligner.distributed  # noqa: F401 - before any test imports megatron-core
from nemo_aligner.contract.tokenizer import Tokenizer, load_tokenizer
from tests.harness import tiny
from tests.harness.contracts import Contracts
from tests.harness.environments import kept_environment, make_environment
from tests.harness.launching import PREPARED
from tests.harness.once import TURNS, Once, once_per_run, run_folder
from tests.harness.tiers import QUICK_SECS, Clock, Durations, store

# xdist workers and background jobs of a shell ignore SIGINT, and so do the processes they start.
# Tests of Ctrl-C need the default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

MAX_THREADS = 150  # the process groups of one layout have 60
MIN_MUTATIONS = 100  # enough that some damaged checkpoints load and some do not
DURATIONS = Durations()


def mutations(text: str) -> int:
    count = int(text)
    if count < MIN_MUTATIONS:
        raise argparse.ArgumentTypeError(f"got {count}, wanted at least {MIN_MUTATIONS}")
    return count


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mutations",
        type=mutations,
        default=100,
        help="damaged checkpoints of each kind that are read (default: 100)",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"only tests of up to {QUICK_SECS:.0f} s (tests/durations.json) or marked smoke",
    )
    parser.addoption(
        "--store-durations", action="store_true", help="rewrite tests/durations.json from this run"
    )
    parser.addoption(
        "--fresh",
        action="store_true",
        help="start every script by python or torchrun instead of forking a prepared process",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Clock())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        left_out = [item for item in items if not DURATIONS.is_quick(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if DURATIONS.is_quick(item)]
    DURATIONS.longest_first(items)


def pytest_collection_finish() -> None:
    """Exclude the million objects of imported modules from garbage collection.

    They live until the end, and every full collection would take a second to scan them.
    """
    gc.collect()
    gc.freeze()


class Groups(LoadScopeScheduling):
    """Gives all tests of a group to one worker, in their order."""

    def _split_scope(self, nodeid: str) -> str:
        return DURATIONS.group(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    config.option.loadscopereorder = False  # they are already sorted, longest first
    return Groups(config, log)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("store_durations"):
        reports = [
            r for outcome_reports in terminalreporter.stats.values() for r in outcome_reports
        ]
        options = config.option
        chosen = options.quick or options.keyword or options.markexpr or "::" in str(config.args)
        store([r for r in reports if isinstance(r, pytest.TestReport)], of_whole_files=not chosen)


@pytest.fixture(scope="session", autouse=True)
def launching(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> None:
    """Have workers take turns with tests that start several busy processes."""
    TURNS.begin(run_folder(tmp_path_factory))
    if pytestconfig.getoption("fresh"):
        PREPARED.is_used = False


def count_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Release process groups when there are too many threads.

    Their threads wake often, and reference cycles of a model keep them alive.
    """
    yield
    if count_threads() > MAX_THREADS:
        release_process_groups()


def release_process_groups() -> None:
    """Free the process groups of models that no test uses any more.

    Megatron-core's DistributedDataParallel registers hooks on autograd nodes, which hold the
    wrapper: a cycle that the garbage collector cannot see. Emptying the wrapper breaks it.
    """
    import torch.distributed as dist

    if not dist.is_initialized() and "megatron.core.distributed" in sys.modules:
        from megatron.core.distributed import DistributedDataParallel

        for wrapped in [o for o in gc.get_objects() if isinstance(o, DistributedDataParallel)]:
            vars(wrapped).clear()
    gc.collect()


@pytest.fixture(scope="module")
def layout() -> Iterator[Any]:
    """A layout with this process as the only rank, for all tests of a file."""
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import destroy_layout, initialize_layout

    with launch():
        yield initialize_layout()
        destroy_layout()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that ``tempfile`` uses during the test."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """``once(name, build)``: a folder that one worker fills by ``build`` for all workers."""
    return partial(once_per_run, run_folder(tmp_path_factory))


@pytest.fixture(scope="session")
def trl_python() -> Path:
    """A Python interpreter with TRL and the package rewardbench, without its dependencies."""
    trl, rewardbench = "trl==1.16.0", "rewardbench==0.1.4"

    def make(folder: Path) -> None:
        make_environment(folder, trl, alone=(rewardbench,))

    return kept_environment("trl", (trl, rewardbench), make) / "bin" / "python"


@pytest.fixture(scope="session")
def rewardbench_python() -> Path:
    """A Python interpreter with rewardbench and the old transformers and TRL that it needs."""

    rewardbench = "rewardbench==0.1.4"
    # The versions that were current when it was released.
    dependencies = (
        "transformers==4.51.0",
        "accelerate==1.6.0",
        "datasets==3.5.0",
        "fschat==0.2.36",
        "trl==0.16.1",
        "wandb==0.19.9",
        "pandas==2.2.3",
        "setuptools<81",
        "sentencepiece",
    )

    def make(folder: Path) -> None:
        make_environment(folder, *dependencies, alone=(rewardbench,))

    return kept_environment("rewardbench", (*dependencies, rewardbench), make) / "bin" / "python"


@pytest.fixture(scope="session")
def tokenizer_folder(once: Once) -> Path:
    return once("tokenizer", tiny.write_tokenizer)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def base(once: Once) -> Path:
    """The archive of a tiny base model; tests must not change it."""
    return once("base", lambda folder: tiny.write_base_nemo(folder / "base.nemo")) / "base.nemo"


@pytest.fixture(scope="session")
def contracts(tokenizer: Tokenizer) -> Contracts:
    return Contracts(tokenizer)
