"""Lines in the server's log about requests that clients have to correct.

A run sends millions of samples, so of each kind only the first, the 10th, the 100th, ... is logged.
A trial by hand therefore does not keep the run after it out of the log. Some trainers (OpenRLHF,
slime) never show the text of an error answer, so this log is the only place with the reason.
"""

from __future__ import annotations

from collections import Counter

# Maximum number of unknown paths that are logged, so that a scan of many paths does not fill the
# log. The other kinds need no limit: they are pairs of a route and a status.
_MOST_UNKNOWN_PATHS = 20
_REJECTED = "rejected (HTTP {})"
_LOGGED = frozenset(10**power for power in range(20))


class RequestNotices:
    """Logs the first, the 10th, the 100th, ... foreign sample and rejected request of each kind.

    A foreign sample is one that is not in the model's chat template.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._unknown_paths: set[str] = set()

    def note_template(self, path: str, row: int, fault: str) -> None:
        """Log that a sample (``row`` of a request to ``path``) is not in the model's chat template.

        ``fault`` begins with its kind: "it begins", "it has" or "it ends".
        """
        kind = " ".join(fault.split()[:2])
        self._count(("template", kind), f"{path}, row {row}: {fault}")

    def note_rejection(
        self, path: str, status: int, reason: str, refused_reward: float | None = None
    ) -> None:
        """Log why a request to ``path`` was rejected; path and status are its kind.

        Only statuses of 400 to 499 are the sender's fault; failures of the server are logged where
        they happen.

        Args:
            path: path of the route, or what else was rejected.
            status: HTTP status of the answer, or of the answer without ``refused_reward``.
            reason: the error message.
            refused_reward: the reward that the sample got instead of an error answer, if it did.
        """
        if not 400 <= status < 500:
            return
        outcome = _REJECTED.format(status)
        if refused_reward is not None:
            outcome = f"a sample without a reward gets {refused_reward:g} (refused_reward)"
        self._count((path, str(status)), f"{path}: {outcome}: {reason}")

    def note_unknown_path(self, path: str, reason: str) -> None:
        """Log a request to a path that does not exist, once for each of the first such paths."""
        if path not in self._unknown_paths and len(self._unknown_paths) < _MOST_UNKNOWN_PATHS:
            self._unknown_paths.add(path)
            outcome = _REJECTED.format(404)
            _warn(f"{path}: {outcome}: {reason}. Further ones are not logged")

    def _count(self, kind: tuple[str, ...], line: str) -> None:
        """Count a request of a kind; log ``line`` if its number is a power of ten."""
        self._counts[kind] += 1
        number = self._counts[kind]
        if number in _LOGGED:
            place = "first" if number == 1 else f"{number:,}th"
            _warn(f"{line}. It is the {place} of its kind; the {10 * number:,}th is logged next")


def _warn(line: str) -> None:
    print(f"Warning: {line}", flush=True)
