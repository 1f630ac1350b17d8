"""Several things that have to be refused, in one test that tells every one that was not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from nemo_aligner.errors import CheckpointError

Refused = Callable[[object, str], AbstractContextManager[None]]


@contextmanager
def refusals(kind: type[Exception] = CheckpointError) -> Iterator[Refused]:
    """``with refused(case, pattern)``: what is in it ends in an error that has the pattern.

    At the end, all cases that went otherwise are told at once.
    """
    wrong: dict[str, str] = {}

    @contextmanager
    def refused(case: object, pattern: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not isinstance(error, kind) or not re.search(pattern, str(error)):
                wrong[str(case)] = f"{type(error).__name__}: {str(error)[:500]}; wanted {pattern}"
        else:
            wrong[str(case)] = f"it was taken; wanted {pattern}"

    yield refused
    assert not wrong, "\n".join(f"{case}: {told}" for case, told in wrong.items())
