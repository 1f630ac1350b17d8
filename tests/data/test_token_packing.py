"""Packs whose every token is a record."""

from __future__ import annotations

import numpy as np
import torch

from nemo_aligner.batch import LabelColumns
from nemo_aligner.data.token_packing import TokenPacking

SEQUENCES = [np.arange(10 * n, 10 * n + length) for n, length in enumerate((3, 9, 1, 5, 4))]
TOTAL = 22


def test_every_token_of_the_members_is_a_record_with_its_labels() -> None:
    labels = LabelColumns.of(("number",), torch.arange(float(TOTAL))[:, None])
    packs = TokenPacking(micro_batch_tokens=10).pack(SEQUENCES, [0, 1, 3, 4], labels)
    assert [pack.num_tokens for pack in packs] == sorted(
        (p.num_tokens for p in packs), reverse=True
    )
    assert max(pack.num_tokens for pack in packs) <= 10
    tokens = np.concatenate(SEQUENCES)
    for pack in packs:
        assert len(pack.records) == pack.records.num_rewards == pack.num_tokens
        assert pack.scored_tokens.tolist() == list(range(pack.num_tokens))
        assert pack.tokens.tolist() == tokens[pack.rows].tolist()
        assert pack.records.labels.targets(("number",))[:, 0].tolist() == pack.rows.tolist()
    rows = sorted(row for pack in packs for row in pack.rows.tolist())
    assert rows == [*range(12), *range(13, TOTAL)]


def test_ranks_share_the_work_and_may_have_none() -> None:
    packing = TokenPacking(micro_batch_tokens=10, query_key_cost=0.1)
    shares = packing.share([len(each) for each in SEQUENCES], 2)
    assert sorted(index for share in shares for index in share) == [0, 1, 2, 3, 4]
    assert all(shares)
    assert packing.share([4], 2) == [[0], []]
    assert packing.pack(SEQUENCES, []) == []
