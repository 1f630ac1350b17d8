"""The table of attention backends, and the only place where one of them is chosen.

Each backend is an entry of ``BACKENDS``. The entry says which features of the scores the backend
supports, where it runs, how it computes the output of a layer's heads, and what it prepares once
for each pack. ``choose_backend`` returns the first entry that fits a ``Case``, so the table lists
the fastest first. To add a backend, add its entry; ``tests/models/attention/test_backends.py`` then
runs it on the same packs as all others.

Support for new decoders is added here, too. A new way to compute scores, such as attention sinks,
becomes a new ``Feature``: backends whose entry does not name it are never chosen for it. A layer
that does not attend to keys, like a gated delta rule, is a separate module with its own table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import compress, product
from typing import Any, Generic, cast

import torch
from torch import Tensor

from nemo_aligner.config.kernels import AttentionChoice
from nemo_aligner.cpu import block_attention, kernel_attention, training_attention
from nemo_aligner.models.attention import flash_packages, one_by_one, ring, varlen
from nemo_aligner.models.attention.segments import (
    PackedSegments,
    Plan,
    Scores,
    gathering_again,
)
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.layer import copies_keys_without_flash, widest_head


class Feature(Enum):
    """A feature of attention scores that not every backend supports, such as a sliding window."""

    WINDOW = "sliding windows"
    SOFT_CAP = "logit soft-capping"
    SINKS = "attention sinks"


@dataclass(frozen=True)
class Case:
    """Everything about a layer and a pack that decides which backend computes the attention.

    In scoring, only ``uses_ring`` depends on the pack, so that a sequence gets the same backend in
    every batch. In training, a window that covers all keys of the pack is removed from ``scores``,
    because more backends support scores without a window.

    Attributes:
        device: ``cpu`` or ``cuda``.
        dtype: dtype of queries, keys and values.
        query_heads, key_heads: number of query heads and of key heads on this rank.
        channels: number of channels of one head.
        scores: how the layer computes its scores: scale, window and soft cap.
        learns: the pass computes gradients, for training; else it only scores the pack.
        uses_ring: keys and values travel around the ranks of a context parallel group.
        has_all_keys: the layer itself brings together the keys and values of all tokens, ``[C +
            T, groups, c]``: first those of the C cached tokens, then those of the pack's T tokens
            on all ranks.
        library: the library whose kernels a GPU uses where they support the case
            (``model.attention_kernels``).
    """

    device: str
    dtype: torch.dtype
    query_heads: int
    key_heads: int
    channels: int
    scores: Scores
    learns: bool
    uses_ring: bool = False
    has_all_keys: bool = False
    library: AttentionChoice = AttentionChoice.torch

    @property
    def features(self) -> frozenset[Feature]:
        window, soft_cap = self.scores.window is not None, self.scores.soft_cap is not None
        return _FEATURES[window, soft_cap, self.scores.has_sinks]


# Maps one bool for each member of ``Feature``, in its order, to the set of the features present.
_FEATURES = {
    present: frozenset(compress(Feature, present))
    for present in product((False, True), repeat=len(Feature))
}


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of one layer, for the n tokens whose queries this rank computes.

    Attributes:
        layer_number: number of the layer, which selects its part of the pool of cached keys and
            values.
        rotated: queries ``[n, heads, c]`` and keys ``[n, groups, c]`` after RoPE; or both as
            ``joined [n, groups, repeats + 1, c]``, with each group's query heads and then its key.
        value: ``[n, groups, c]``. Keys and values are ``[C + T, groups, c]`` if
            ``Case.has_all_keys``.
        sinks: logits ``[heads]`` of the attention sinks, in fp32 or wider; None if the layer has
            none.
    """

    layer_number: int
    rotated: tuple[Tensor, Tensor] | Tensor
    value: Tensor
    sinks: Tensor | None = None

    @property
    def query(self) -> Tensor:
        """Queries ``[n, heads, c]``; a copy if ``rotated`` is one joined tensor."""
        if isinstance(self.rotated, Tensor):
            return self.rotated[:, :, :-1].flatten(1, 2)
        return self.rotated[0]

    @property
    def query_by_group(self) -> Tensor:
        """Queries ``[n, groups, repeats, c]``, a view of ``rotated``."""
        if isinstance(self.rotated, Tensor):
            return self.rotated[:, :, :-1]
        query, key = self.rotated
        return query.unflatten(1, (key.size(1), -1))

    @property
    def key(self) -> Tensor:
        """Keys ``[n, groups, c]``."""
        return self.rotated[:, :, -1] if isinstance(self.rotated, Tensor) else self.rotated[1]


def _plan_nothing(segments: PackedSegments, case: Case) -> None:
    """Return None: the ``plan`` of backends that have nothing to prepare for a pack."""


@dataclass(frozen=True, eq=False)
class Backend(Generic[Plan]):
    """One way to compute attention.

    Attributes:
        features: the features of scores that the backend supports; it is not chosen for scores with
            any other feature.
        runs: tells if the backend can compute a case on this machine; ``features`` is checked
            separately.
        compute: computes the output ``[n, heads, c]`` from a layer's heads and the pack's plan.
        plan: makes a pack's plan, which all layers of the same case share.
        takes_packs: one kernel call computes a whole pack; else every segment needs its own call.
        library: the library that a case must name for this backend; None if it need name none.
    """

    name: str
    features: frozenset[Feature]
    runs: Callable[[Case], bool]
    compute: Callable[[Heads, PackedSegments, Case, Plan], Tensor]
    plan: Callable[[PackedSegments, Case], Plan]
    takes_packs: bool = True
    library: AttentionChoice | None = None

    def attend(self, heads: Heads, segments: PackedSegments, case: Case) -> Tensor:
        """Compute the output ``[n, heads, c]`` of a layer's heads.

        The pack's plan is made at its first layer, and reused by all layers of the same ``case``.
        """
        # A backend without a plan skips the lookup, which would take microseconds in every layer.
        has_plan = self.plan is not _plan_nothing
        plan = segments.plan(self, case) if has_plan else cast(Plan, None)
        return self.compute(heads, segments, case, plan)

    def fits(self, case: Case) -> bool:
        """Tell if this backend supports the case's features and computes it on this machine."""
        is_named = self.library is None or self.library is case.library
        return is_named and case.features <= self.features and self.runs(case)


def choose_backend(case: Case) -> Backend[Any]:
    """Return the first backend of ``BACKENDS`` that fits ``case``, which is the fastest one.

    Raises:
        ValueError: no backend fits.
    """
    for backend in BACKENDS:
        if backend.fits(case):
            return backend
    raise ValueError(f"no attention backend supports {case}. Add one to BACKENDS in {__name__}.")


# Wrappers that give the attention functions of other modules the signature of ``Backend.compute``.


def _all_keys(heads: Heads, segments: PackedSegments, case: Case) -> tuple[Tensor, ...]:
    """Return the keys and values ``[C + T, groups, c]`` of cached tokens and of all ranks."""
    if case.has_all_keys:
        return heads.key, heads.value
    return segments.with_cached(heads.layer_number, *segments.gather(heads.key, heads.value))


def _in_ring(heads: Heads, segments: PackedSegments, case: Case, plan: ring.RingPlan) -> Tensor:
    parts = heads.query, heads.key, heads.value, heads.sinks
    return ring.attend(*parts, plan, case.scores.scale)


def _plan_ring(segments: PackedSegments, case: Case) -> ring.RingPlan:
    return ring.plan_ring(segments, case.scores.window)


def _by_c_file(
    heads: Heads, segments: PackedSegments, case: Case, plan: kernel_attention.KernelPlan
) -> Tensor:
    pooled, (key, value) = None, (heads.key, heads.value)
    if not case.has_all_keys:
        key, value = segments.gather(key, value)
        if segments.cached is not None and segments.pool is not None:
            layer = segments.pool.layer(heads.layer_number)
            use = segments.cached
            pooled = kernel_attention.PooledTokens(layer, use.stored, use.slots)
    scale, window = case.scores.scale, case.scores.window
    return kernel_attention.attend_by_kernel(
        heads.query_by_group, key, value, pooled, plan, scale, window, heads.sinks
    )


def _plan_c_file(segments: PackedSegments, case: Case) -> kernel_attention.KernelPlan:
    slots, lengths = None, segments.all_lengths
    if segments.cached is not None and not case.has_all_keys:
        slots, lengths = segments.cached.read_slots, segments.lengths
    repeats = case.query_heads // case.key_heads
    keys = _segment_keys(segments)
    return kernel_attention.plan_items(keys, sum(lengths), slots, repeats)


def _by_blocks(
    heads: Heads, segments: PackedSegments, case: Case, plan: block_attention.BlockPlan
) -> Tensor:
    query = heads.query_by_group.contiguous()
    key, value = _all_keys(heads, segments, case)
    scale, soft_cap = case.scores.scale, case.scores.soft_cap
    return block_attention.attend_in_blocks(query, key, value, plan, scale, soft_cap, heads.sinks)


def _plan_blocks(segments: PackedSegments, case: Case) -> block_attention.BlockPlan:
    shape = block_attention.ScoreShape(case.scores.window, case.scores.soft_cap is not None)
    dtype = torch.promote_types(case.dtype, torch.float32)
    keys = _segment_keys(segments)
    return block_attention.plan_blocks(keys, case.query_heads, case.key_heads, shape, dtype)


def _segment_keys(segments: PackedSegments) -> list[block_attention.SegmentKeys]:
    return block_attention.list_segment_keys(
        segments.cu_seqlens, segments.kv_cu_seqlens, segments.kv_index
    )


_Calls = Sequence[training_attention.Block]
_Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""``query [n, heads, c]``, ``key`` and ``value [C + T, groups, c]``, and ``Heads.sinks``."""


def _train_on_cpu(tensors: _Tensors, segments: PackedSegments, case: Case, calls: _Calls) -> Tensor:
    return training_attention.attend_by_calls(*tensors, calls, case.scores.scale)


def _plan_calls(segments: PackedSegments, case: Case) -> _Calls:
    parts = segments.queries
    chains = [segments.chain(part) for part in parts]
    return training_attention.plan_calls(segments.all_lengths, parts, chains)


_AttendToAll = Callable[[_Tensors, PackedSegments, Case, Plan], Tensor]


def _to_all_keys(
    attend: _AttendToAll[Plan], reads_index: bool = False
) -> Callable[[Heads, PackedSegments, Case, Plan], Tensor]:
    """Wrap ``attend``, which needs the keys and values of all segments, as a ``Backend.compute``.

    The wrapper gathers keys and values over context parallel ranks, and adds the cached ones.

    Args:
        reads_index: ``attend`` selects keys and values by ``PackedSegments.kv_index`` unless that
            is None. In training under context parallelism the wrapper then gathers them in this
            order, so that ``attend`` need not copy them again.
    """

    def attend_to_all_keys(
        heads: Heads, segments: PackedSegments, case: Case, plan: Plan
    ) -> Tensor:
        query, sinks = heads.query, heads.sinks
        if segments.share is not None and case.learns:
            layout, index, copies = segments, segments.share.gathered, None
            if reads_index:
                layout, index, copies = segments.gathered_layout
            with gathering_again(heads.key, heads.value, index, copies) as (key, value):
                return attend((query, key, value, sinks), layout, case, plan)
        key, value = _all_keys(heads, segments, case)
        return attend((query, key, value, sinks), segments, case, plan)

    return attend_to_all_keys


_AttendVarlen = Callable[[_Tensors, PackedSegments, Scores], Tensor]


def _by_varlen(
    attend: _AttendVarlen,
) -> Callable[[Heads, PackedSegments, Case, None], Tensor]:
    """Wrap a variable-length kernel, which needs no plan of a pack, as a ``Backend.compute``."""

    def attend_without_plan(
        tensors: _Tensors, segments: PackedSegments, case: Case, plan: None
    ) -> Tensor:
        return attend(tensors, segments, case.scores)

    return _to_all_keys(attend_without_plan, reads_index=True)


# Conditions under which a backend computes a case: the functions ``Backend.runs``.


def _is_scored_by_c_file(case: Case) -> bool:
    repeats = case.query_heads // case.key_heads
    is_scored = _is_scored_on_cpu(case)
    return is_scored and kernel_attention.can_attend(case.dtype, case.channels, repeats)


def _is_scored_on_cpu(case: Case) -> bool:
    return case.device == "cpu" and not case.learns


def _runs_varlen(is_there: Callable[[bool], bool]) -> Callable[[Case], bool]:
    """Make the ``Backend.runs`` of a kernel that computes a whole pack on a GPU.

    Args:
        is_there: tells if the kernel is installed; with the argument True, a kernel that also
            supports sliding windows.
    """

    def runs(case: Case) -> bool:
        is_taken = case.device == "cuda" and varlen.why_no_kernel(case.dtype, case.channels) is None
        return is_taken and is_there(Feature.WINDOW in case.features)

    return runs


def _has_library(choice: AttentionChoice) -> Callable[[bool], bool]:
    """Tell if FlashAttention 3 or flash-attn-4, which support windows, can run on this machine."""
    return lambda with_window: flash_packages.why_unavailable(choice) is None


_WINDOWS = frozenset({Feature.WINDOW})
_WINDOWS_AND_CAPS = frozenset({Feature.WINDOW, Feature.SOFT_CAP})
_SINKS = frozenset({Feature.SINKS})

RING = Backend("ring", _WINDOWS | _SINKS, lambda case: case.uses_ring, _in_ring, _plan_ring)
C_FILE = Backend("C file", _WINDOWS | _SINKS, _is_scored_by_c_file, _by_c_file, _plan_c_file)

BACKENDS: tuple[Backend[Any], ...] = (
    RING,
    C_FILE,
    Backend("CPU blocks", _WINDOWS_AND_CAPS | _SINKS, _is_scored_on_cpu, _by_blocks, _plan_blocks),
    Backend(
        "CPU training",
        _SINKS,
        lambda case: case.device == "cpu",
        _to_all_keys(_train_on_cpu),
        _plan_calls,
    ),
    Backend(
        "FlashAttention 3",
        _WINDOWS_AND_CAPS,
        _runs_varlen(_has_library(AttentionChoice.flash_attn_3)),
        _by_varlen(flash_packages.by_flash_attn_3),
        _plan_nothing,
        library=AttentionChoice.flash_attn_3,
    ),
    Backend(
        "flash-attn-4",
        _WINDOWS_AND_CAPS | _SINKS,
        _runs_varlen(_has_library(AttentionChoice.flash_attn_4)),
        _by_varlen(flash_packages.by_flash_attn_4),
        _plan_nothing,
        library=AttentionChoice.flash_attn_4,
    ),
    Backend(
        "torch's varlen function",
        _WINDOWS,
        _runs_varlen(varlen.has_public_function),
        _by_varlen(varlen.by_public_function),
        _plan_nothing,
    ),
    Backend(
        "torch's varlen operator",
        _WINDOWS | _SINKS,
        _runs_varlen(varlen.has_operator),
        _by_varlen(varlen.by_operator),
        _plan_nothing,
    ),
    Backend(
        "flash-attn",
        _WINDOWS_AND_CAPS,
        _runs_varlen(flash_packages.has_flash_attn),
        _by_varlen(flash_packages.by_flash_attn),
        _plan_nothing,
    ),
    Backend(
        "one by one",
        _WINDOWS_AND_CAPS | _SINKS,
        lambda case: True,
        _to_all_keys(one_by_one.attend),
        one_by_one.plan_masks,
        takes_packs=False,
    ),
)
"""All backends, the fastest first."""


def rotates_by_c_file(case: Case) -> bool:
    """Tell if ``kernels.c``, rather than torch, applies RoPE to a layer's queries and keys.

    It does so exactly where it can also compute the layer's attention.
    """
    return C_FILE.fits(case)


# Predictions of which backends a model will use on this GPU, made before the model is built.


def scores_of(shape: ModelShape, layer_number: int) -> Scores:
    """Return how attention computes its scores in a layer, numbered from 1 to ``num_layers``."""
    window = shape.window_of(layer_number)
    cap, has_sinks = shape.attn_logit_softcapping, shape.attention_sinks
    return Scores(shape.softmax_scale, window, cap, has_sinks)


def gpu_cases(
    shape: ModelShape, dtype: torch.dtype, library: AttentionChoice = AttentionChoice.torch
) -> Iterator[Case]:
    """Yield the ``Case`` that every layer's attention has when the model scores on a GPU."""
    for layer_number in range(1, shape.num_layers + 1):
        layer, scores = shape.of_layer(layer_number), scores_of(shape, layer_number)
        heads = layer.num_attention_heads, layer.num_query_groups
        kind = "cuda", dtype, *heads, layer.kv_channels
        yield Case(*kind, scores, learns=False, library=library)


def slow_attention(
    shape: ModelShape, dtype: torch.dtype, library: AttentionChoice = AttentionChoice.torch
) -> str | None:
    """Return a warning that says why attention is slow on this GPU; None if it is not slow."""
    if not torch.cuda.is_available():
        return None
    if all(choose_backend(case).takes_packs for case in gpu_cases(shape, dtype, library)):
        return None
    has_cap = shape.attn_logit_softcapping is not None
    channels = widest_head(shape)
    reason = varlen.why_no_kernel(dtype, channels)
    if reason is None:
        missing = Feature.SOFT_CAP if has_cap else Feature.WINDOW
        reason = f"torch {torch.__version__} has no kernel for {missing.value}: "
        is_installable = not shape.attention_sinks
        reason += "install flash-attn >= 2.6" if is_installable else "install torch >= 2.11"
    if shape.attention_sinks:
        return f"attention runs one sequence at a time, and computes scores twice: {reason}"
    if not has_cap and not one_by_one.takes_equal_heads(dtype, channels):
        reason += "; SDPA has no fused kernel for it either, and scores are computed twice"
    return f"attention runs one sequence at a time, which is slow: {reason}"


def why_gathered(shape: ModelShape, dtype: torch.dtype) -> str | None:
    """Return why ``model.cp_comm_type=p2p``, the ring of ranks, cannot be used; None if it can.

    The ring merges partial results by their log-sum-exp, so a kernel has to return the log-sum-exp
    and to take it in its backward pass.
    """
    if shape.attn_logit_softcapping is not None:
        return f"no kernel in torch supports {Feature.SOFT_CAP.value}"
    if not torch.cuda.is_available():
        return None
    has_window = any(Feature.WINDOW in case.features for case in gpu_cases(shape, dtype))
    if has_window and not varlen.has_operator(True):
        return f"torch {torch.__version__} has no kernel for {Feature.WINDOW.value}"
    return varlen.why_no_kernel(dtype, widest_head(shape))


def copies_keys(
    shape: ModelShape, dtype: torch.dtype, library: AttentionChoice = AttentionChoice.torch
) -> bool:
    """Tell if attention on this GPU copies keys and values for each query head.

    The dry run of a training adds the copies to its estimate of memory.
    """
    return (
        copies_keys_without_flash(shape)
        and slow_attention(shape, dtype, library) is not None
        and one_by_one.takes_equal_heads(dtype, widest_head(shape))
    )
