"""Lines in the server's log about requests that clients have to correct; one for each kind.

A run sends millions of samples, so only the first of each kind is logged. Some trainers (OpenRLHF,
slime) never show the text of an error answer, so this log is the only place with the reason.
"""

from __future__ import annotations

# Maximum number of unknown paths that are logged, so that a scan of many paths does not fill the
# log. The other kinds need no limit: they are pairs of a route and a status.
_MOST_UNKNOWN_PATHS = 20
_REJECTED = "rejected (HTTP {})"


class RequestNotices:
    """Logs foreign samples and rejected requests, only the first of each kind.

    A foreign sample is one that is not in the model's chat template.
    """

    def __init__(self) -> None:
        self._noted: set[tuple[str, ...]] = set()
        self._unknown_paths: set[str] = set()

    def note_template(self, path: str, row: int, fault: str) -> None:
        """Log that a sample (``row`` of a request to ``path``) is not in the model's chat template.

        Only the first sample of each kind of ``fault`` is logged.
        """
        kind = " ".join(fault.split()[:2])  # e.g. "it begins", "it has" or "it ends"
        if self._is_new("template", kind):
            print(
                f"Warning: {path}, row {row}: {fault}. Further such samples are only counted "
                "(foreign_template in /metrics)",
                flush=True,
            )

    def note_rejection(
        self, path: str, status: int, reason: str, refused_reward: float | None = None
    ) -> None:
        """Log why a request to ``path`` was rejected, once for each path and status.

        Only statuses of 400 to 499 are the sender's fault; failures of the server are logged where
        they happen.

        Args:
            path: path of the route, or what else was rejected.
            status: HTTP status of the answer, or of the answer without ``refused_reward``.
            reason: the error message.
            refused_reward: the reward that the sample got instead of an error answer, if it did.
        """
        if not 400 <= status < 500 or not self._is_new(path, str(status)):
            return
        outcome = _REJECTED.format(status)
        if refused_reward is not None:
            outcome = f"a sample without a reward gets {refused_reward:g} (refused_reward)"
        _warn(path, outcome, reason)

    def note_unknown_path(self, path: str, reason: str) -> None:
        """Log a request to a path that does not exist, once for each of the first such paths."""
        if path not in self._unknown_paths and len(self._unknown_paths) < _MOST_UNKNOWN_PATHS:
            self._unknown_paths.add(path)
            _warn(path, _REJECTED.format(404), reason)

    def _is_new(self, *kind: str) -> bool:
        if kind in self._noted:
            return False
        self._noted.add(kind)
        return True


def _warn(path: str, outcome: str, reason: str) -> None:
    print(f"Warning: {path}: {outcome}: {reason}. Further ones are not logged", flush=True)
