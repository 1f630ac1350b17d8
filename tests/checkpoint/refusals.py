"""Check tables of inputs that must be refused; a test reports all wrong cases at once."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.fuzzing import files_of, write_files

LONGEST = 2000  # characters of an error
Refused = Callable[[object, str], AbstractContextManager[None]]
# Changes of a checkpoint's folder, with the pattern of the expected error.
Damages = Iterable[tuple[Callable[[Path], object], str]]


@contextmanager
def refusals(kind: type[Exception] = CheckpointError) -> Iterator[Refused]:
    """``with refused(case, pattern)``: what is in it ends in a short error that has the pattern.

    At the end, all cases that went otherwise are told at once.
    """
    wrong: dict[str, str] = {}

    @contextmanager
    def refused(case: object, pattern: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            message = str(error)
            is_right = isinstance(error, kind) and re.search(pattern, message)
            if not is_right or len(message) > LONGEST:
                wrong[str(case)] = f"{type(error).__name__}: {message[:500]}; wanted {pattern}"
        else:
            wrong[str(case)] = f"it was taken; wanted {pattern}"

    yield refused
    assert not wrong, "\n".join(f"{case}: {problem}" for case, problem in wrong.items())


def overwrite(name: str, content: bytes | str) -> Callable[[Path], object]:
    """Return a damage that replaces the content of a file."""
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def check_damages(
    folder: Path,
    damages: Damages,
    use: Callable[[Path], object],
    kind: type[Exception] = CheckpointError,
) -> None:
    """Check that ``use(folder)`` refuses each damage; restore ``folder`` after each."""
    original = files_of(folder)
    with refusals(kind) as refused:
        for number, (damage, pattern) in enumerate(damages):
            damage(folder)
            with refused(f"{number}: {pattern}", pattern):
                use(folder)
            shutil.rmtree(folder)
            write_files(folder, original)
