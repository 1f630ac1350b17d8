"""PackedBatch, Records and LabelColumns, and the pairs of ranked samples."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.batch.cache_use import CachedPrefix, Stored
from nemo_aligner.batch.outputs import OutputColumns
from nemo_aligner.batch.packed import Group, LabelColumns, PackedBatch, Records
from nemo_aligner.batch.pairs import PairRows


def test_batch_lays_sequences_end_to_end() -> None:
    batch = PackedBatch.pack([[7, 8, 9], [5], [6, 6], [4]], Records.of([10, 11], [2, 2]))
    assert batch.tokens.tolist() == [7, 8, 9, 5, 6, 6, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6, 7]
    assert batch.scored_tokens.tolist() == [2, 3, 5, 6]
    assert (batch.num_tokens, batch.records.num_rewards, len(batch.records)) == (7, 4, 2)
    assert batch.rows.tolist() == [0, 1, 2, 3]
    assert batch.prefixes.tolist() == [-1] * 4
    elsewhere = PackedBatch.pack([[1], [2], [3]], Records.of([4, 2], [2, 1]), rows=[5, 6, 0])
    assert elsewhere.rows.tolist() == [5, 6, 0]


def test_batch_of_too_few_or_empty_sequences_is_refused() -> None:
    for sequences in ([], [[1], []]):
        with pytest.raises(ValueError, match="no sequence may be empty"):
            PackedBatch.pack(sequences)
    with pytest.raises(ValueError, match=r"^3 sequences .* 2 records with 4 samples"):
        PackedBatch.pack([[1], [2], [3]], Records.of([0, 1], [2, 2]))
    with pytest.raises(ValueError, match="rows has 2 elements; 3 rewards"):
        PackedBatch.pack([[1], [2], [3]], Records.of([4, 2], [2, 1]), rows=[5, 6])


def test_batch_has_a_common_prefix_once() -> None:
    sequences = [[1, 2, 3, 4], [1, 2, 5], [9, 9], [7]]
    batch = PackedBatch.pack(
        sequences, Records.of([0, 1], [2, 2]), groups=[Group(2, 2), Group(2, 0)]
    )
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 9, 9, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 2, 0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 7, 8]
    assert batch.prefixes.tolist() == [-1, 0, 0, -1, -1]
    assert batch.scored_tokens.tolist() == [3, 4, 6, 7]
    # Each sequence needs a last token after the prefix.
    with pytest.raises(ValueError, match="a prefix of 3 tokens"):
        PackedBatch.pack(sequences[:2], Records.of([0], [2]), groups=[Group(2, 3)])
    with pytest.raises(ValueError, match="a prefix of 2 tokens"):
        PackedBatch.pack([[1, 2]], groups=[Group(1, 2)])
    batch = PackedBatch.pack([[1, 2]], groups=[Group(1, 1)])
    assert (batch.cu_seqlens.tolist(), batch.prefixes.tolist()) == ([0, 1, 2], [-1, 0])


def test_batch_says_where_keys_and_values_are_taken_from_and_stored() -> None:
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 8, 9]]
    groups = [Group(2, 3, CachedPrefix(torch.tensor([10, 11]))), Group(1, 0)]
    stored = [
        Stored(2, torch.tensor([20, 21, 22])),
        Stored(3, torch.tensor([23])),
        Stored(1, torch.tensor([24, 25])),
    ]
    batch = PackedBatch.pack(sequences, groups=groups, stored=stored)
    assert batch.tokens.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert batch.position_ids.tolist() == [2, 3, 4, 3, 0, 1, 2]
    assert batch.prefixes.tolist() == [0, 1, 1, -1]
    cached = batch.cached
    assert cached is not None
    assert (cached.lengths, cached.read_slots.tolist()) == ((2,), [10, 11])
    # Tokens of the shared prefix, tokens after it, and a sequence without a prefix.
    assert cached.stored.tolist() == [0, 1, 2, 3, 5, 6]
    assert cached.slots.tolist() == [20, 21, 22, 23, 24, 25]
    assert PackedBatch.pack(sequences, groups=groups).cached is not None
    assert PackedBatch.pack(sequences, stored=stored).cached is not None
    assert PackedBatch.pack(sequences).cached is None


def test_batch_filler_is_a_segment_that_no_record_owns() -> None:
    batch = PackedBatch.pack([[1, 2, 3], [4, 5]])
    padded = batch.padded_to_multiple(8)
    assert padded.tokens.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert padded.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert padded.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert padded.prefixes.tolist() == [-1, -1, -1]
    assert (padded.tokens.dtype, padded.cu_seqlens.dtype) == (torch.int64, torch.int32)
    assert padded.scored_tokens.tolist() == [2, 4]
    assert batch.padded_to_multiple(4).num_tokens == 8
    assert batch.padded_to_multiple(5) is batch.padded_to_multiple(1) is batch


def test_batch_indices_are_of_the_types_that_are_promised() -> None:
    batch = PackedBatch.pack([[1, 2], [3]], Records.of([4], [2]), groups=[Group(2, 0)])
    assert batch.cu_seqlens.dtype == torch.int32
    for tensor in (
        batch.tokens, batch.position_ids, batch.prefixes, batch.scored_tokens, batch.rows,
        batch.records.ids, batch.records.sample_bounds, batch.records.reward_bounds,
        batch.records.rows([0]),
    ):  # fmt: skip
        assert tensor.dtype == torch.int64


def test_batch_moves_what_the_model_and_the_loss_compute_with() -> None:
    labels = LabelColumns.of(["a"], torch.ones(1, 1)).centred_on({"a": 2.0})
    moved = PackedBatch.pack([[1, 2]], Records.of([3], [1], labels)).to("meta")
    for tensor in (moved.tokens, moved.position_ids, moved.scored_tokens):
        assert tensor.device.type == "meta"
    assert moved.records.labels.values.device.type == "meta"
    assert moved.records.labels.means == {"a": 2.0}
    planned_by = (moved.cu_seqlens, moved.prefixes, moved.rows, moved.records.record_bounds)
    for tensor in (*planned_by, moved.records.ids):
        assert tensor.device.type == "cpu"


def test_records_have_samples_and_samples_have_rewards() -> None:
    labels = LabelColumns.of(["a"], torch.tensor([[1.0], [2.0], [3.0]]))
    records = Records.of([7, 8, 9], [2, 1, 3], labels)
    assert records.sample_bounds.tolist() == records.record_bounds.tolist() == [0, 2, 3, 6]
    assert (len(records), records.num_samples, records.num_rewards) == (3, 6, 6)
    assert records.rows([2, 0]).tolist() == records.sample_rows([2, 0]).tolist() == [3, 4, 5, 0, 1]
    assert records.rows([]).tolist() == []
    chosen = records.select([2, 0])
    assert (chosen.ids.tolist(), chosen.sample_bounds.tolist()) == ([9, 7], [0, 3, 5])
    assert chosen.labels.values.tolist() == [[3.0], [1.0]]


def test_records_of_turns_or_steps() -> None:
    """A comparison has one row of labels, a rating one for each of its rewards."""
    labels = LabelColumns.of(["a"], torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    lengths = torch.arange(8)
    records = Records.of([7, 9], [2, 1], labels, None, [1, 4, 3], lengths)
    assert records.sample_bounds.tolist() == [0, 2, 3]
    assert records.reward_bounds.tolist() == [0, 1, 5, 8]
    assert records.record_bounds.tolist() == [0, 5, 8]
    assert records.label_bounds.tolist() == [0, 1, 4]
    assert records.sample_rows([1, 0]).tolist() == [2, 0, 1]
    assert records.rows([1, 0]).tolist() == [5, 6, 7, 0, 1, 2, 3, 4]
    turned = records.select([1, 0])
    assert turned.reward_bounds.tolist() == [0, 3, 4, 8]
    assert turned.ranks.tolist() == [0, 0, 1]
    assert turned.reply_lengths.tolist() == [5, 6, 7, 0, 1, 2, 3, 4]
    assert turned.labels.values.flatten().tolist() == [2.0, 3.0, 4.0, 1.0]
    better, worse = turned.pairs().of(torch.arange(3))
    assert (better.tolist(), worse.tolist()) == ([1], [2])


def test_records_of_one_reward_each_are_single() -> None:
    rewards = torch.arange(8.0).reshape(4, 2)
    single = Records.of(range(4), [1] * 4)
    assert single.as_single(rewards).tolist() == rewards.tolist()
    assert single.as_single(rewards[:, 0]).tolist() == [0, 2, 4, 6]
    for sizes, named in (([2, 1, 1], r"\[1, 2\]"), ([2, 2], r"\[2\]")):
        with pytest.raises(ValueError, match=rf"got records of {named} samples"):
            Records.of(range(len(sizes)), sizes).as_single(rewards)


def test_label_columns_know_their_names_and_are_centred_before_they_are_rounded() -> None:
    values = torch.tensor([[1.0, 10.0], [float("nan"), 30.0]])
    labels = LabelColumns.of(["help", "margin"], values).centred_on({"help": 0.5})
    assert labels.means == labels.select(torch.tensor([0])).means == {"help": 0.5}
    assert labels.targets(["margin", "help"])[0].tolist() == [10.0, 0.5]
    assert labels.targets(["margin"]).tolist() == [[10.0], [30.0]]
    assert bool(labels.targets(["help"])[1].isnan())
    assert labels.measured_means() == (1.0, 20.0)
    with pytest.raises(KeyError, match=r"'length'.*'help', 'margin'"):
        labels.targets(["length"])
    assert LabelColumns.none(3).values.shape == (3, 0)
    tenths = torch.tensor([[0.1, 0.1]])
    labels = LabelColumns.of(["a", "b"], tenths).centred_on({"a": 0.1})
    exact = tenths.double()[0, 0].item() - 0.1
    assert exact != 0
    assert labels.targets(["a"]).item() == pytest.approx(exact, rel=1e-6, abs=0)
    assert labels.targets(["a", "b"]).dtype == torch.float32
    assert labels.targets(["b"]).item() == tenths[0, 1].item()
    # Means are computed in float64; a column without labels has none.
    column = torch.tensor([[1.0, float("nan")], [1.0, float("nan")], [2.0, float("nan")]])
    mean, none = LabelColumns.of(["a", "b"], column).measured_means()
    assert mean == 4 / 3
    assert none != none


def ranked(*ranks: list[int]) -> Records:
    flat = torch.tensor([rank for record_ranks in ranks for rank in record_ranks])
    return Records.of(range(len(ranks)), [len(record_ranks) for record_ranks in ranks], ranks=flat)


def listed(pairs: PairRows, rewards: int) -> list[tuple[int, int]]:
    better, worse = pairs.of(torch.arange(rewards))
    return list(zip(better.tolist(), worse.tolist(), strict=True))


def test_pairs_of_a_record_count_as_one_record() -> None:
    """Pairs with the better sample first are slices; without records there are no pairs."""
    pairs = Records.of([5, 3], [2, 2]).pairs()
    assert isinstance(pairs.better, slice)
    nothing = Records.of([0], [1]).pairs(), Records.of([], []).pairs()
    several = ranked([0, 1, 2], [1, 0], [0]).pairs()
    for pair_rows, rewards, expected, losses, total_and_count in (
        (pairs, 4, [(0, 1), (2, 3)], [1.0, 5.0], (6.0, 2)),
        (several, 6, [(0, 1), (0, 2), (1, 2), (4, 3)], [1.0, 2.0, 6.0, 10.0], (3.0 + 10.0, 2)),
        *((empty, number, [], [], (0.0, 0)) for empty, number in zip(nothing, (1, 0), strict=True)),
    ):
        assert listed(pair_rows, rewards) == expected
        total, count = pair_rows.sum_and_count(torch.tensor(losses))
        assert (float(total), int(count)) == (pytest.approx(total_and_count[0]), total_and_count[1])
    assert pairs.of_records(torch.tensor([7, 8])).tolist() == [7, 8]
    assert several.of_records(torch.tensor([7, 8, 9])).tolist() == [7, 7, 7, 8]


def test_pairs_of_tied_completions_are_there_where_ties_are_wanted() -> None:
    records = ranked([2, 2], [1, 0, 1], [0, 0]).select([1, 2])
    assert records.ranks.tolist() == [1, 0, 1, 0, 0]
    assert listed(records.pairs(), 5) == [(1, 0), (1, 2)]
    assert records.pairs().num_records == 1
    pairs = records.pairs(with_ties=True)
    assert listed(pairs, 5) == [(1, 0), (0, 2), (1, 2), (3, 4)]
    assert pairs.are_ties is not None
    assert pairs.are_ties.tolist() == [False, True, False, True]
    assert pairs.shares is not None
    assert pairs.shares.tolist() == [pytest.approx(1 / 3)] * 3 + [1.0]


@pytest.mark.parametrize(("ranks", "multiple"), [(1, 1), (2, 1), (3, 4), (4, 16)])
def test_ranks_share_out_a_pack_evenly_with_all_that_is_read(ranks: int, multiple: int) -> None:
    sequences = [list(range(3, 3 + length)) for length in (90, 83, 1, 7, 64)]
    batch = PackedBatch.pack(sequences, groups=[Group(2, 60), *[Group(1, 0)] * 3])
    shared = [batch.shared(rank, ranks, multiple) for rank in range(ranks)]
    shares = [part.share for part in shared if part.share is not None]
    rows = torch.cat([share.rows for share in shares])
    assert torch.equal(rows[shares[0].gathered], torch.arange(shared[0].num_tokens))
    assert {part.num_own_tokens for part in shared} == {shared[0].num_tokens // ranks}
    assert shared[0].num_own_tokens % multiple == 0
    read = torch.cat([share.rows[share.read_rows] for share in shares])
    of_which = torch.cat([share.reads for share in shares])
    assert torch.equal(read[of_which.argsort()], batch.scored_tokens)
    # The work of a rank is the number of keys that its tokens attend to.
    positions = batch.padded_to_multiple(shared[0].num_tokens).position_ids
    positions[batch.num_tokens :] = 0
    work = [int(positions[share.rows].sum()) for share in shares]
    assert max(work) < 1.1 * sum(work) / ranks


def test_columns_of_a_heads_outputs_are_told_apart_in_their_order() -> None:
    columns = OutputColumns(num_attributes=2, outputs_per_attribute=3, num_learned=1)
    outputs = torch.arange(4 * columns.count).view(4, 7)
    named = columns.split(outputs)
    assert named.attributes[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert named.learned[0].tolist() == [6]
    assert torch.equal(named.joined(), outputs)
    assert columns.by_attribute(outputs)[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert OutputColumns(2).split(outputs[:, :2]).learned.shape == (4, 0)
