"""RewardScorer: compute rewards of samples or token ids on all ranks, by the scoring contract.

Evaluation and the server share this code, so a sample gets the same reward in process and over
HTTP, and in a batch of one or of many.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch import Tensor

from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model
from nemo_aligner.config.common import PREFIX_CACHE_STATES, Precision
from nemo_aligner.config.kernels import DEFAULT_KERNELS, KernelChoices
from nemo_aligner.config.model import ROWS_BY_DEVICE
from nemo_aligner.contract.contract import EncodedText, ScoringContract
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.text_encoder import TextEncoder
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.cpu.matmuls import use_huge_pages
from nemo_aligner.data.packing import SequenceReads, pack_sequences
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.attention.segments import KeyValuePool
from nemo_aligner.models.batch_invariance import (
    freeze_for_scoring,
    make_batch_invariant,
    try_all_matmuls,
)
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.shared_body import Bodies, SharedBody
from nemo_aligner.models.step import count_parts, gather_rewards_later, infer_in_parts
from nemo_aligner.serving.engine.prefix_cache import CallPlan, PrefixCache
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.token_scorer import TokenCounts, TokenScorer
from nemo_aligner.utils.console import Watch, unwatched
from nemo_aligner.utils.errors import ConfigError, ServingError
from nemo_aligner.utils.host_transfer import Arriving
from nemo_aligner.utils.processes import is_main

logger = logging.getLogger(__name__)
# Number of tokens for which attention uses all of its code paths: more than a span of
# cpu/block_attention.py.
_LONG_SAMPLE = 600


class RewardScorer(TokenScorer):
    """Scores samples with one model, by the contract's attributes.

    Packs are split over the data parallel ranks.

    With a prefix cache, each data parallel replica keeps the keys and values of the
    ``prefix_cache_tokens`` tokens that were used last. For a sample with a cached prefix, only the
    tokens after it are computed. A model with linear attention also needs one of the
    ``prefix_cache_states`` snapshots of its states (``prefix_cache.py``). After a call that failed
    on any rank, every rank must call ``reset_cache``.
    """

    def __init__(
        self,
        model: GPTRewardModel,
        contract: ScoringContract,
        tokenizer: Tokenizer,
        layout: ParallelLayout,
        micro_batch_tokens: int,
        watch: Watch = unwatched,
        prefix_cache_tokens: int = 0,
        fingerprint: str | None = None,
        prefix_cache_states: int = PREFIX_CACHE_STATES,
        body: SharedBody | None = None,
    ) -> None:
        """Store a loaded model with what scoring needs; nothing is computed yet.

        Args:
            model: the reward model on this rank.
            contract: the model's scoring contract.
            tokenizer: the tokenizer that the contract describes.
            layout: parallel layout of the ranks.
            micro_batch_tokens: maximum number of tokens in a pack.
            watch: called with the number of scored samples and their total.
            prefix_cache_tokens: size of the prefix cache; 0 for none.
            fingerprint: fingerprint of the weights; None if unknown.
            prefix_cache_states: snapshots in the prefix cache of a model with linear attention; 0
                for no prefix cache.
            body: how many weights are shared with another model; None if unknown.

        Raises:
            ConfigError: ``micro_batch_tokens`` is below the contract's ``seq_length``.
        """
        # A sample is never split over packs: causal attention needs all of its tokens in one pack.
        if micro_batch_tokens < contract.seq_length:
            raise ConfigError(
                f"model.micro_batch_tokens: got {micro_batch_tokens}, "
                f"wanted at least the scoring contract's seq_length, {contract.seq_length}"
            )
        self.model = model
        self._tokenizer = tokenizer
        self._layout = layout
        self._micro_batch_tokens = micro_batch_tokens
        self._watch = watch
        self._num_outputs = contract.num_outputs
        self._encoder = TextEncoder(contract, tokenizer)
        self.contract = contract
        self.fingerprint = fingerprint
        self.body = body
        self._counts = TokenCounts()
        self._cache, self._pool = self._new_cache(prefix_cache_tokens, prefix_cache_states)

    def _new_cache(self, tokens: int, states: int) -> tuple[PrefixCache, KeyValuePool | None]:
        """Create the prefix cache and its pool; there is no pool if the cache has no room."""
        model, has_states = self.model, self.model.has_states
        if tokens and has_states and states == 0:
            tokens = 0
            if is_main():
                logger.warning(
                    "the prefix cache is off: this model has linear attention, and "
                    "prefix_cache_states=0 leaves no room for its states"
                )
        cache = PrefixCache(
            tokens,
            self._layout,
            self._micro_batch_tokens,
            self.contract.reply_marker,
            model.length_dependent_rope,
            states if has_states else None,
        )
        return cache, model.new_key_value_pool(cache.slots, states) if cache.slots else None

    @property
    def attributes(self) -> tuple[str, ...]:
        return tuple(self.contract.attributes)

    @property
    def counts(self) -> TokenCounts:
        return self._counts

    @property
    def tokens_per_call(self) -> int:
        return self._micro_batch_tokens * self._layout.dp * self._layout.pp

    @property
    def prefix_cache_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.num_bytes

    @property
    def num_cached_states(self) -> int:
        """Number of snapshots for which the prefix cache has room; 0 without linear attention."""
        states = None if self._pool is None else self._pool.states
        return 0 if states is None else states.slots

    def warm_up(self) -> None:
        """Run a first forward pass, which is slow, before a sample has to wait for it; collective.

        Raises:
            ServingError: a reward is not finite, so rewards of samples would not be finite either.
                It is raised on every rank.
        """
        try_all_matmuls(self.model)
        if self._pool is not None:
            self._pool.touch()
        for tokens in (1, min(self.contract.seq_length, _LONG_SAMPLE)):
            (rewards,) = self.score_token_lists([[0] * tokens])
            if not np.isfinite(rewards).all():
                raise ServingError(
                    f"got the reward {rewards.tolist()} for a sample of {tokens} tokens, wanted "
                    f"finite numbers: the model overflows in {self.contract.dtype}. Use "
                    "precision=bf16 or fp32"
                )
        use_huge_pages()
        # Drop what the warm-up has cached and counted: no real sample begins with its tokens, and
        # the counts are about requests only.
        self.reset_cache()
        self._counts = TokenCounts()

    def turn_end(self) -> TurnEnd | None:
        """Return what the contract's chat template writes after a reply (the end of its turn).

        None if there is none.
        """
        return TurnEnd.of(self.contract.chat_template(self._tokenizer), self._tokenizer)

    def sample_frame(self) -> SampleFrame | None:
        """Return the text that the contract's chat template writes around a sample.

        None if there is no template.
        """
        return SampleFrame.of(self.contract, self._tokenizer)

    def reset_cache(self) -> None:
        self._cache.reset_cache()

    def adds_special_tokens(self, text: str) -> bool:
        return self._encoder.adds_special_tokens(text)

    def encode(self, text: Text) -> EncodedText:
        return self._encoder.encode(text)

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        return self._encoder.count_reply_tokens(texts)

    def encode_tokens(self, token_ids: Sequence[int]) -> EncodedText:
        return self._encoder.encode_tokens(token_ids)

    def begin(self, rows: Sequence[Row]) -> Arriving[list[np.ndarray]]:
        positions = [row.positions for row in rows]
        outputs = self._begin([row.ids for row in rows], positions)
        return outputs.then(lambda joined: np.split(joined, np.cumsum([*map(len, positions)])[:-1]))

    def score_token_lists(self, token_lists: Sequence[Sequence[int]]) -> np.ndarray:
        """Score token ids that ``encode_tokens`` has returned: rewards ``[N, A]`` float32."""
        outputs = self.compute([Row.of(token_ids) for token_ids in token_lists])
        return self.contract.rewards_of(np.concatenate(outputs))

    def read_outputs(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return self.contract.rewards_of(outputs), self.contract.spreads_of(outputs)

    def _begin(
        self, sequences: Sequence[np.ndarray], positions: Sequence[Sequence[int]]
    ) -> Arriving[np.ndarray]:
        if not sequences:
            return Arriving.now(np.zeros((0, self._num_outputs), dtype=np.float32))
        reads = SequenceReads.number(positions) if self.contract.has_steps else None
        with self._resetting_cache_on_failure():
            arriving = self._score(sequences, reads)
            if reads is not None:
                # Wait for the device here: this call's outputs at turns or steps must be cached
                # before the next call is planned, which may evict their blocks.
                return Arriving.now(arriving.wait())

        def wait() -> np.ndarray:
            with self._resetting_cache_on_failure():
                return arriving.wait()

        return Arriving(arriving.has_arrived, wait)

    @contextmanager
    def _resetting_cache_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # also Ctrl-C: blocks that count as cached may be missing
            self.reset_cache()
            raise

    def _score(
        self, sequences: Sequence[np.ndarray], reads: Sequence[SequenceReads] | None
    ) -> Arriving[np.ndarray]:
        count = len(sequences)
        plan = self._plan(sequences, reads)
        parts = count_parts(plan.num_computed, self._micro_batch_tokens, self._layout)
        self._watch(0, count)
        rewards = infer_in_parts(
            self.model,
            plan.packs,
            self._layout,
            parts,
            lambda fraction: self._watch(round(fraction * count), count),
            self._pool,
        )
        rows = count if reads is None else sum(len(read.rows) for read in reads)

        def finish(gathered: Tensor) -> np.ndarray:
            outputs = gathered.numpy()
            # The model has skipped the turns or steps in cached blocks, so their outputs come from
            # the cache.
            for row, cached in plan.cached_outputs.items():
                outputs[row] = cached
            plan.keep(outputs)
            self._counts = self._counts.after(
                sum(map(len, sequences)), plan.num_computed, plan.num_cached
            )
            return outputs

        shape = (rows, self._num_outputs)
        return gather_rewards_later(rewards, plan.packs, shape, self._layout).then(finish)

    def _plan(
        self, sequences: Sequence[np.ndarray], reads: Sequence[SequenceReads] | None
    ) -> CallPlan:
        if self._pool is not None:
            return self._cache.plan(sequences, reads)
        by_length = self.model.length_dependent_rope
        packs = pack_sequences(sequences, self._micro_batch_tokens, reads, by_length)
        # All ranks build the same packs, so each replica selects its own without communication.
        local_packs = packs[self._layout.dp_rank :: self._layout.dp]
        return CallPlan(local_packs, sum(pack.num_tokens for pack in packs), 0)


def load_scorer(
    path: str | Path,
    layout: ParallelLayout,
    *,
    precision: Precision | None = None,
    micro_batch_tokens: int = 8192,
    watch: Watch = unwatched,
    prefix_cache_tokens: int = 0,
    invariant_rows: int | None = ROWS_BY_DEVICE,
    kernels: KernelChoices = DEFAULT_KERNELS,
    can_offload: bool = False,
    cuda_graphs: bool = False,
    prefix_cache_states: int = PREFIX_CACHE_STATES,
    bodies: Bodies | None = None,
) -> RewardScorer:
    """Load a reward model's ``.nemo`` on this rank's device as a scorer; collective.

    Args:
        path: the archive.
        layout: parallel layout of the ranks.
        precision: precision in which the model computes; None for the contract's ``dtype``.
        micro_batch_tokens: maximum number of tokens in a pack.
        watch: called with the number of scored samples and their total.
        prefix_cache_tokens: size of the prefix cache; 0 for none.
        invariant_rows: rows per matmul, with which rewards are bit-identical in any batch; see
            ``make_batch_invariant``.
        kernels: which implementations compute the operations of the model.
        can_offload: whether an OffloadGroup moves the weights. They then keep torch's memory
            layout, which is slower on a CPU.
        cuda_graphs: run packs as CUDA graphs; see ``GPTRewardModel.use_cuda_graphs``.
        prefix_cache_states: see ``RewardScorer``.
        bodies: see ``load_reward_model``.

    Raises:
        CheckpointError: the archive is unsafe, incomplete, or has no scoring contract.
        ConfigError: ``micro_batch_tokens`` is below the contract's ``seq_length``.
    """
    loaded = load_reward_model(path, layout, precision, kernels, bodies)
    make_batch_invariant(loaded.model, invariant_rows)
    if cuda_graphs and can_offload:
        logger.warning("model.cuda_graphs: ignored, because cpu_offload moves the weights")
    elif cuda_graphs:
        loaded.model.use_cuda_graphs()
    # freeze_for_scoring comes last, because it converts the layers that make_batch_invariant has
    # replaced. A shared body is converted already.
    if not can_offload and not loaded.shares_body:
        freeze_for_scoring(loaded.model)
    return RewardScorer(
        loaded.model,
        loaded.contract,
        loaded.tokenizer,
        layout,
        micro_batch_tokens=micro_batch_tokens,
        watch=watch,
        prefix_cache_tokens=prefix_cache_tokens,
        fingerprint=loaded.fingerprint,
        prefix_cache_states=prefix_cache_states,
        body=loaded.body,
    )
