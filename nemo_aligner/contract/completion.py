"""Complete a sample's token ids: add BOS, EOS and the reward token, remove trailing padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_aligner.utils.errors import DataError

if TYPE_CHECKING:
    from nemo_aligner.contract.contract import ScoringContract


def complete_ids(
    contract: ScoringContract, ids: Sequence[int], *, is_raw: bool, ends: bool = True
) -> list[int]:
    """Return the ids with the tokens that the contract adds, and without those that it removes.

    Args:
        ids: ids of a sample's text, or ids that a client has sent.
        is_raw: whether the sample is a raw text, to which BOS and EOS are added.
        ends: whether the sample ends here; only then its end is changed.

    Raises:
        DataError: the sample is empty, has only trailing padding, or begins with BOS twice.
    """
    completed = list(ids)
    if is_raw:
        if contract.add_bos and contract.bos_id is not None and ids[:1] != [contract.bos_id]:
            completed = [contract.bos_id, *completed]
        adds_eos = ends and contract.add_eos and contract.eos_id is not None
        if adds_eos and completed[-1:] != [contract.eos_id]:
            completed = [*completed, contract.eos_id]  # type: ignore[list-item]
    if not completed:
        raise DataError("the text has no tokens: it is empty")
    if ends and contract.reward_token_id not in (None, completed[-1]):
        completed = [*completed, contract.reward_token_id]
    if contract.bos_id is not None and completed[:2] == [contract.bos_id, contract.bos_id]:
        raise DataError("the text begins with BOS twice; write it once, or not at all")
    return without_trailing_pad(contract, completed) if ends else completed


def without_trailing_pad(contract: ScoringContract, ids: Sequence[int]) -> list[int]:
    """Return the ids without any ``trailing_pad_id`` at their end.

    Raises:
        DataError: nothing is left, because all ids are ``trailing_pad_id``.
    """
    end, pad = len(ids), contract.trailing_pad_id
    if pad is None:
        return list(ids)
    while end > 0 and ids[end - 1] == pad:
        end -= 1
    if ids and end == 0:
        raise DataError(
            f"all {len(ids)} tokens are {pad}, which the model takes for padding at the end of a "
            "sample (trailing_pad_id), so no token is left to score"
        )
    return list(ids[:end])
