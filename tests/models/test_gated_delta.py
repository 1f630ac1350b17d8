"""The tree of chunks of a pack, and the gated delta rule and Mamba-2 against their recurrences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch.cache_use import StateUse
from nemo_aligner.models.chunk_tree import ChunkTree
from nemo_aligner.models.gated_delta import DeltaIntraChunk, Inputs
from nemo_aligner.models.mamba import MambaIntraChunk
from nemo_aligner.models.shapes.linear_attention import CHUNK_TOKENS

BEFORE = 3
# A prefix of 150 tokens of two sequences, one of which is a prefix of a third; and a short one.
LENGTHS, PREFIXES = (150, 40, 30, 1, 7), (-1, 0, 0, 2, -1)
SEQUENCES = [[0, 1], [0, 2, 3], [4]]


def rows_of(sequence: list[int]) -> list[int]:
    starts = [sum(LENGTHS[:segment]) for segment in range(len(LENGTHS))]
    return [
        row
        for segment in sequence
        for row in range(starts[segment], starts[segment] + LENGTHS[segment])
    ]


def test_chunk_tree_has_each_whole_chunk_of_a_prefix_once() -> None:
    tree = ChunkTree.of(LENGTHS, PREFIXES, BEFORE, "cpu")
    assert [level.end - level.start for level in tree.levels] == [2, 1, 2]
    assert [level.parents.tolist() for level in tree.levels] == [[], [0], [0, 0]]
    own = tree.rows[:, BEFORE:]
    assert torch.equal(own.flatten()[tree.places], torch.arange(sum(LENGTHS)))
    # The chunk behind the whole chunks of the prefix: its rest, then the sequence's own tokens.
    first, second = own[3].tolist(), own[4].tolist()
    assert first[:62] == rows_of(SEQUENCES[0])[2 * CHUNK_TOKENS :]
    assert second[:53] == rows_of(SEQUENCES[1])[2 * CHUNK_TOKENS :]
    assert {*first[62:], *second[53:]} == {-1}
    assert tree.rows[0, :BEFORE].tolist() == [-1] * BEFORE
    assert tree.rows[2, :BEFORE].tolist() == [61, 62, 63]


def test_runs_of_a_tree_end_where_it_branches() -> None:
    """A prefix that continues another one adds a whole chunk, which is a run of its own."""
    lengths, prefixes = (200, 40, 90, 10, 20, 300), (-1, 0, 0, 2, 2, -1)
    tree = ChunkTree.of(lengths, prefixes, BEFORE, "cpu", has_runs=True)
    assert tree.runs is not None
    bounds, parents, chunks = zip(
        *((each.bounds, each.parents, each.chunks) for each in tree.runs.levels), strict=True
    )
    # The prefix and the last sample; the first sample and the second prefix; the two behind it.
    assert [each.tolist() for each in bounds] == [[0, 192, 512], [0, 64, 128], [0, 64, 128]]
    assert [each.tolist() for each in parents] == [[], [0, 0], [1, 1]]
    assert chunks[0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [1, 3], [1, 4]]
    levels = tree.runs.levels
    assert [(level.start, level.end) for level in levels] == [(0, 8), (8, 10), (10, 12)]
    own = tree.runs.rows[:, BEFORE:]
    assert torch.equal(own.flatten()[tree.runs.places], torch.arange(sum(lengths)))
    assert sorted(tree.runs.rows.tolist()) == sorted(tree.rows.tolist())
    assert ChunkTree.of(lengths, prefixes, BEFORE, "cpu").runs is None


def test_chunk_tree_begins_behind_cached_prefixes() -> None:
    """One sequence without a cached prefix, and two with one, of which one has more segments."""
    lengths, prefixes = (70, 100, 30, 40), (-1, 1, 3, 0)
    states = StateUse(read_slots=(5, 8), stored=(63, 133, 197), slots=(1, 2, 3))
    tree = ChunkTree.of(lengths, prefixes, BEFORE, "cpu", states)
    assert tree.read_slots is not None
    assert tree.read_slots.tolist() == [5, 8]
    assert [level.end - level.start for level in tree.levels] == [3, 2, 1]
    assert tree.levels[0].parents.tolist() == [0, 2, 1]
    assert tree.levels[1].parents.tolist() == [0, 1]
    # Rows in front of the first chunks: none, and those of the second and the first prefix.
    rows, behind = tree.rows[:, :BEFORE].tolist(), sum(lengths)
    assert rows[0] == [-1] * BEFORE
    assert rows[1] == [behind + 3, behind + 4, behind + 5]
    assert rows[2] == [behind, behind + 1, behind + 2]
    assert rows[4] == [131, 132, 133]
    stored = [(level.stored, level.slots) for level in tree.levels]
    found = [[each if each is None else each.tolist() for each in pair] for pair in stored]
    assert found == [[[0, 1], [1, 2]], [[1], [3]], [None, None]]


@pytest.mark.parametrize("is_delta", [True, False], ids=["gated delta", "mamba"])
def test_scan_in_chunks_is_its_recurrence(is_delta: bool) -> None:
    """Outputs and gradients in fp64, also of rows that several sequences share."""
    torch.manual_seed(0)
    tokens, keys, repeats, width, values = sum(LENGTHS), 2, 3, 4, 5
    shapes = [(keys, 1, width), (keys, 1, width), (keys, repeats, values), *[(keys, repeats)] * 2]
    given = [torch.randn(tokens, *shape, dtype=torch.float64) for shape in shapes]
    given[3], given[4] = -0.1 * given[3].abs(), given[4].sigmoid()
    factors = torch.randn(tokens, keys, repeats, values, dtype=torch.float64)
    grads = []
    outputs = []
    for compute in (by_chunks, by_tokens):
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        output = compute(inputs, is_delta)
        outputs.append(output.detach())
        inputs = inputs[: len(given) - (not is_delta)]  # Mamba-2 has no write strength
        grads.append(torch.autograd.grad((output * factors).sum(), inputs))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def by_chunks(inputs: list[Tensor], is_delta: bool) -> Tensor:
    tree = ChunkTree.of(LENGTHS, PREFIXES, BEFORE, "cpu")
    rows = tree.rows[:, BEFORE:]
    chunks = [
        tensor[rows.clamp(min=0)].movedim(1, 3) for tensor in inputs
    ]  # rows without a token are the last ones, so that nothing reads what they write
    outputs, state = [], None
    for level in tree.levels:
        first = None if state is None else state[level.parents]
        of_level = [chunk[level.start : level.end] for chunk in chunks]
        if is_delta:
            output, state = DeltaIntraChunk.of(Inputs(*of_level)).advance(first)
        else:
            output, state = MambaIntraChunk.of(*of_level[:-1]).advance(first)
        outputs.append(output)
    return torch.cat(outputs).movedim(3, 1).flatten(0, 1)[tree.places]


def by_tokens(inputs: list[Tensor], is_delta: bool) -> Tensor:
    result: dict[int, Tensor] = {}
    for sequence in SEQUENCES:
        state = torch.zeros(2, 3, 4, 5, dtype=torch.float64)
        for row in rows_of(sequence):
            query, key, value, decay, strength = (tensor[row] for tensor in inputs)
            state, written, scale = state * decay.exp()[..., None, None], value, 1.0
            if is_delta:
                query, key = (
                    heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                    for heads in (query, key)
                )
                left = (key.unsqueeze(-2) @ state).squeeze(-2)
                written, scale = (value - left) * strength.unsqueeze(-1), 4**-0.5
            state = state + key.unsqueeze(-1) * written.unsqueeze(-2)
            result.setdefault(row, (query.unsqueeze(-2) @ state).squeeze(-2) * scale)
    return torch.stack([result[row] for row in range(len(result))])
