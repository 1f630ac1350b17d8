"""Several ranks fail, and one of them says why: the first."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import torch.distributed as dist

from nemo_aligner.errors import LostRankError, PeerError, short
from nemo_aligner.processes import Process, settle

_STORE_WAIT = timedelta(seconds=5)
_SAME_WAIT_S = 1.0
_COUNT = "failed"
# What gloo and NCCL raise where a rank has gone away.
_LOST = re.compile(r"(Connection (closed|reset) by peer|Broken pipe|remote process exited).*")


def fail_once(error: BaseException, store: dist.Store, process: Process) -> None:
    """Raise what this rank ends with, for ``error``; the ranks' process group may be half gone.

    The first rank of all says its own, and whether the others have met the same.

    Raises:
        PeerError: another rank failed first.
        LostRankError: none did, but one is gone.
        BaseException: ``error``, which is the first.
    """
    text = f"{type(error).__name__}: {error}"
    try:
        store.set_timeout(_STORE_WAIT)
        store.set(f"{_COUNT}/{process.rank}", text)
        is_first = store.add(_COUNT, 1) == 1
        met_by_all = is_first and _all_say(text, store, process.world_size)
    except Exception:  # where rank 0 keeps the store, they have ended together
        is_first = met_by_all = False
    if not isinstance(error, Exception):  # an interruption, or an exit
        raise error
    if not is_first:
        raise PeerError("another rank failed first, and says why") from error
    lost = _LOST.search(str(error))
    if lost is not None:
        error = LostRankError(
            f"another rank ended without a word, as if it was killed: {short(lost.group())}"
        )
    settle(error, "" if met_by_all else f"rank {process.rank}: ")
    raise error


def _all_say(text: str, store: dist.Store, world_size: int) -> bool:
    """Whether all ranks fail, and in the same words: those that agreed on it do so at once."""
    end = time.monotonic() + _SAME_WAIT_S
    while store.add(_COUNT, 0) < world_size:
        if time.monotonic() > end:
            return False
        time.sleep(_SAME_WAIT_S / 50)
    return all(store.get(f"{_COUNT}/{rank}") == text.encode() for rank in range(world_size))
