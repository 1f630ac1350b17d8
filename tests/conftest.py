"""What tests of several folders have in common, and how a run of them is shared out."""

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

import nemo_aligner.parallel  # noqa: F401 - before any test imports megatron-core
from nemo_aligner.text.tokenizer import Tokenizer, load_tokenizer
from tests import tiny
from tests.contracts import Contracts
from tests.environments import kept_environment, make_environment
from tests.launching import PREPARED
from tests.once import TURNS, Once, once_per_run, run_folder

# Workers of xdist, and what a shell puts into the background, ignore SIGINT, and what they start
# does, too: Ctrl-C could not be tested there.
signal.signal(signal.SIGINT, signal.default_int_handler)

MOST_THREADS = 150  # a layout has 60
FEWEST_MUTATIONS = 100  # of which some load and some do not


def mutations(text: str) -> int:
    count = int(text)
    if count < FEWEST_MUTATIONS:
        raise argparse.ArgumentTypeError(f"got {count}, wanted at least {FEWEST_MUTATIONS}")
    return count


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--mutations",
        type=mutations,
        default=300,
        help="damaged checkpoints of each kind that are read (default: 300)",
    )
    parser.addoption(
        "--fresh",
        action="store_true",
        help="start every script by python or torchrun, none from a prepared process",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that the workers of a run, who share out what is left, end together."""

    def seconds(item: pytest.Item) -> float:
        marker = item.get_closest_marker("slow")
        return 0.0 if marker is None else marker.kwargs.get("seconds", 10.0)

    items.sort(key=seconds, reverse=True)


def minutes(seconds: float) -> str:
    whole, rest = divmod(round(seconds), 60)
    return f"{whole} min {rest} s"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the slow tests and the others took, set-up and all, summed over the workers."""
    spent = {True: 0.0, False: 0.0}
    tests: dict[bool, set[str]] = {True: set(), False: set()}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                is_slow = "slow" in report.keywords
                spent[is_slow] += report.duration
                tests[is_slow].add(report.nodeid)
    for is_slow, name in ((False, "not slow"), (True, "slow")):
        if tests[is_slow]:
            count = f"{len(tests[is_slow])} tests that are {name}"
            terminalreporter.write_line(f"{count}: {minutes(spent[is_slow])} of work")


@pytest.fixture(scope="session", autouse=True)
def launching(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> None:
    """Workers take turns with what starts several busy processes."""
    TURNS.begin(run_folder(tmp_path_factory))
    if pytestconfig.getoption("fresh"):
        PREPARED.is_used = False


def threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Process groups have threads that wake often, and live on in the cycles of a model."""
    yield
    if threads() > MOST_THREADS:
        release_process_groups()


def release_process_groups() -> None:
    """Let go of groups that nothing can use any more, where there are no others.

    Megatron's data parallel wrapper hangs its hooks on nodes of autograd, and these hold it: a
    cycle that Python cannot see. So what the wrapper holds is taken from it.
    """
    import torch.distributed as dist

    if not dist.is_initialized() and "megatron.core.distributed" in sys.modules:
        from megatron.core.distributed import DistributedDataParallel

        for wrapped in [o for o in gc.get_objects() if isinstance(o, DistributedDataParallel)]:
            vars(wrapped).clear()
    gc.collect()


@pytest.fixture(scope="module")
def layout() -> Iterator[Any]:
    """This process as the only rank, for all tests of a file."""
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import destroy_layout, initialize_layout

    with launch():
        yield initialize_layout()
        destroy_layout()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, empty."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """``once(name, build)``: the folder that ``build`` fills, by one worker for all of a run."""
    return partial(once_per_run, run_folder(tmp_path_factory))


@pytest.fixture(scope="session")
def trl_python() -> Path:
    """A python with TRL and the module of rewardbench's pipeline."""
    trl, rewardbench = "trl==1.16.0", "rewardbench==0.1.4"

    def make(folder: Path) -> None:
        make_environment(folder, trl, alone=(rewardbench,))

    return kept_environment("trl", (trl, rewardbench), make) / "bin" / "python"


@pytest.fixture(scope="session")
def tokenizer_folder(once: Once) -> Path:
    return once("tokenizer", tiny.write_tokenizer)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def contracts(tokenizer: Tokenizer) -> Contracts:
    return Contracts(tokenizer)
