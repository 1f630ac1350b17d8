"""RewardScorer: texts or tokens -> rewards on all ranks, by the rule of the checkpoint's contract.

Evaluation and the server call the same code from here down, so a text has one reward, whether it is
scored in process or over HTTP, alone or among others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from torch import Tensor

from nemo_aligner.checkpoint.nemo.fingerprint import fingerprint_of_ensemble
from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import ROWS_BY_DEVICE, PointwiseChoice
from nemo_aligner.contract.contract import EncodedText, ScoringContract
from nemo_aligner.contract.from_settings import describe_differences
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.scorer import (
    OnError,
    RowValues,
    ScoredRows,
    StepRewards,
    score_encodable,
)
from nemo_aligner.contract.steps import aggregate_texts
from nemo_aligner.contract.text_encoder import TextEncoder
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.cpu.products import use_huge_pages
from nemo_aligner.data.packing import SequenceReads, pack_sequences
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.batch_invariance import (
    freeze_for_scoring,
    make_batch_invariant,
    try_all_products,
)
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.step import count_parts, gather_rewards_later, infer_in_parts
from nemo_aligner.serving.engine.prefix_cache import CallPlan, PrefixCache
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.utils.console import Watch, unwatched
from nemo_aligner.utils.errors import ConfigError, ServingError
from nemo_aligner.utils.host_transfer import Arriving

# Tokens of a text whose attention takes every way: see cpu/block_attention.py.
logger = logging.getLogger(__name__)

_BEYOND_A_SPAN = 600


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of all calls, on all ranks.

    Attributes:
        asked: of the texts to score.
        computed: that went through the model; what texts of one call have in common, once.
        cached: that did not, as their keys and values were kept.
    """

    asked: int = 0
    computed: int = 0
    cached: int = 0

    def after(self, asked: int, computed: int, cached: int) -> TokenCounts:
        """With those of one more call."""
        return TokenCounts(self.asked + asked, self.computed + computed, self.cached + cached)


class RewardScorer:
    """Scores N texts as ``[N, A]`` float32, one column per attribute of the contract.

    Methods that score are collective: every rank calls them with the same arguments and gets all
    rewards. The packs are shared out over the data parallel ranks.

    With a prefix cache the keys and values of ``prefix_cache_tokens`` tokens are kept on each data
    parallel replica, the last ones used, and a text that begins as one before it is computed from
    there on. After a call that failed on any rank, every rank has to ``reset_cache``.
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
    ) -> None:
        """Raise ConfigError if a text of the contract's ``seq_length`` exceeds the budget."""
        # A text is never divided over packs: causal attention needs all of it in one.
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
        self.counts = TokenCounts()
        marker = contract.reply_marker
        self._cache = PrefixCache(
            prefix_cache_tokens, layout, micro_batch_tokens, marker, model.length_dependent_rope
        )
        self._pool = model.new_key_value_pool(self._cache.slots) if self._cache.slots else None

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the columns of the rewards."""
        return tuple(self.contract.attributes)

    @property
    def tokens_per_call(self) -> int:
        """Tokens with which a call of ``score_token_lists`` has a pack for every rank."""
        return self._micro_batch_tokens * self._layout.dp * self._layout.pp

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of the prefix cache on this rank."""
        return 0 if self._pool is None else self._pool.num_bytes

    def warm_up(self) -> None:
        """Compute once what the first texts would otherwise wait for; every rank calls it.

        Raises:
            ServingError: on every rank, if a reward is not finite: those of texts would not be.
        """
        try_all_products(self.model)
        if self._pool is not None:
            self._pool.touch()
        for tokens in (1, min(self.contract.seq_length, _BEYOND_A_SPAN)):
            (rewards,) = self.score_token_lists([[0] * tokens])
            if not np.isfinite(rewards).all():
                raise ServingError(
                    f"got the reward {rewards.tolist()} for a text of {tokens} tokens, wanted "
                    f"finite numbers: the model overflows in {self.contract.dtype}. Serve it with "
                    "precision=bf16 or fp32"
                )
        use_huge_pages()
        # Nobody's texts begin with these; and the counts are of requests.
        self.reset_cache()
        self.counts = TokenCounts()

    def turn_end(self) -> TurnEnd | None:
        """Text that the contract's chat template writes after a reply."""
        return TurnEnd.of(self.contract.template, self._tokenizer, self.contract.template_kwargs)

    def sample_frame(self) -> SampleFrame | None:
        """Text that the contract's chat template writes around the contents of a sample."""
        return SampleFrame.of(self.contract, self._tokenizer)

    def reset_cache(self) -> None:
        """Empty the prefix cache: keys and values of a failed call may be missing."""
        self._cache.reset_cache()

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Score samples, and all their steps in the same pass; see ``Scorer`` of the contract."""
        return _score_rows(self, samples, on_error)

    def encode(self, text: Text) -> EncodedText:
        """The token ids of one text; DataError where the contract refuses it."""
        return self._encoder.encode(text)

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Tokens of every text's reply alone, at its full length."""
        return self._encoder.count_reply_tokens(texts)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Refuse, with a DataError, ids that the model would fail on or misread."""
        self._encoder.check_tokens(token_ids)

    def compute(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Compute the outputs of the head at the positions that the rows are read at.

        Returns:
            An array ``[s, A * K]`` float32 for each row, s the number of its ``reads`` or 1;
            ``read_outputs`` makes rewards of them. For no rows one array without rows.
        """
        return self.begin(rows).wait()

    def begin(self, rows: Sequence[Row]) -> Arriving[list[np.ndarray]]:
        """Ask the device for what ``compute`` returns, without waiting for it.

        Calls may be begun before those begun earlier have arrived, and have to be waited for in
        their order. One that fails, here or when it is waited for, has emptied the prefix cache;
        later ones that were already begun may have used what it was to leave there.
        """
        positions = [row.positions for row in rows]
        outputs = self._begin([row.ids for row in rows], positions)
        return outputs.then(lambda each: np.split(each, np.cumsum([*map(len, positions)])[:-1]))

    def score_token_lists(self, token_lists: Sequence[Sequence[int]]) -> np.ndarray:
        """Rewards of token ids that ``check_tokens`` let pass."""
        outputs = self.compute([Row.of(token_ids) for token_ids in token_lists])
        return self.contract.rewards_of(np.concatenate(outputs))

    def read_outputs(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """``[N, A]`` float32 rewards of the head's ``outputs``, and their spreads, if any.

        It is not collective.
        """
        return self.contract.rewards_of(outputs), self.contract.spreads_of(outputs)

    def _begin(
        self, sequences: Sequence[np.ndarray], positions: Sequence[Sequence[int]]
    ) -> Arriving[np.ndarray]:
        if not sequences:
            return Arriving.now(np.zeros((0, self._num_outputs), dtype=np.float32))
        reads = SequenceReads.number(positions) if self.contract.has_steps else None
        with self._forgetting_failures():
            arriving = self._score(sequences, reads)
            if reads is not None:
                # What is kept of steps has to be there before another call's blocks are placed.
                return Arriving.now(arriving.wait())

        def wait() -> np.ndarray:
            with self._forgetting_failures():
                return arriving.wait()

        return Arriving(arriving.has_arrived, wait)

    @contextmanager
    def _forgetting_failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C, too: what was planned counts as cached, and may be missing
            self.reset_cache()
            raise

    def _score(
        self, sequences: Sequence[np.ndarray], reads: Sequence[SequenceReads] | None
    ) -> Arriving[np.ndarray]:
        count = len(sequences)
        plan = self._plan(sequences, reads)
        parts = count_parts(plan.computed, self._micro_batch_tokens, self._layout)
        self._watch(0, count)
        rewards = infer_in_parts(
            self.model,
            plan.packs,
            self._layout,
            parts,
            lambda share: self._watch(round(share * count), count),
            self._pool,
        )
        shape = (count if reads is None else sum(len(own.rows) for own in reads), self._num_outputs)

        def finish(gathered: Tensor) -> np.ndarray:
            everyone = gathered.numpy()
            # Steps in cached blocks: the model has not computed them again, their outputs were
            # kept.
            for row, outputs in plan.known.items():
                everyone[row] = outputs
            plan.keep(everyone)
            self.counts = self.counts.after(sum(map(len, sequences)), plan.computed, plan.cached)
            return everyone

        return gather_rewards_later(rewards, plan.packs, shape, self._layout).then(finish)

    def _plan(
        self, sequences: Sequence[np.ndarray], reads: Sequence[SequenceReads] | None
    ) -> CallPlan:
        if self._pool is not None:
            return self._cache.plan(sequences, reads)
        by_length = self.model.length_dependent_rope
        packs = pack_sequences(sequences, self._micro_batch_tokens, reads, by_length)
        # All ranks make the same packs, so each replica can take its own without a message.
        mine = packs[self._layout.dp_rank :: self._layout.dp]
        return CallPlan(mine, sum(pack.num_tokens for pack in packs), 0)


def load_scorer(
    path: str | Path,
    layout: ParallelLayout,
    *,
    precision: Precision | None = None,
    micro_batch_tokens: int = 8192,
    watch: Watch = unwatched,
    prefix_cache_tokens: int = 0,
    invariant_rows: int | None = ROWS_BY_DEVICE,
    pointwise_kernels: PointwiseChoice | None = None,
    can_offload: bool = False,
    cuda_graphs: bool = False,
) -> RewardScorer:
    """The scorer of a reward model's ``.nemo``, on this rank's device; every rank calls it.

    ``precision`` None is the contract's; without ``prefix_cache_tokens`` nothing is cached. With
    ``invariant_rows`` (see ``make_batch_invariant``) a reward has the same bits in any batch.
    Weights that an OffloadGroup ``can_offload`` keep torch's layout, which on a CPU is slower.
    With ``cuda_graphs`` packs run by them (``GPTRewardModel.use_cuda_graphs``).
    ``pointwise_kernels`` as in ``choose_kernels``.

    Raises:
        CheckpointError: the archive is unsafe, incomplete, or has no scoring contract.
        ConfigError: ``micro_batch_tokens`` is below the contract's ``seq_length``.
    """
    loaded = load_reward_model(path, layout, precision, pointwise_kernels)
    make_batch_invariant(loaded.model, invariant_rows)
    if cuda_graphs and can_offload:
        logger.warning("model.cuda_graphs: not used, because cpu_offload moves the weights")
    elif cuda_graphs:
        loaded.model.use_cuda_graphs()
    # Only now: it concerns the layers that were made batch invariant.
    if not can_offload:
        freeze_for_scoring(loaded.model)
    return RewardScorer(
        loaded.model,
        loaded.contract,
        loaded.tokenizer,
        layout,
        micro_batch_tokens,
        watch,
        prefix_cache_tokens,
        loaded.fingerprint,
    )


# Ensembles.

# All other fields decide which ids a text becomes, or what the columns are.
_MAY_DIFFER = ("label_means", "attribute_weights")


class RewardEnsemble:
    """M models on the same ranks: ``[N, M * A]`` rewards, model after model.

    Its methods are those of ``RewardScorer``, and as collective. ``contract`` is the first model's,
    ``fingerprint`` that of all in their order.
    """

    def __init__(self, members: Sequence[RewardScorer]) -> None:
        """Raise ConfigError if two of them make different token ids, or attributes, of a text."""
        check_alike([member.contract for member in members])
        self._members = list(members)
        self.contract = members[0].contract
        self.fingerprint = fingerprint_of_ensemble([member.fingerprint for member in members])

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the columns of the rewards, model after model."""
        return tuple(
            f"{name} of model {number}"
            for number, member in enumerate(self._members)
            for name in member.attributes
        )

    @property
    def counts(self) -> TokenCounts:
        """Tokens of all models."""
        counts = TokenCounts()
        for member in self._members:
            counts = counts.after(*vars(member.counts).values())
        return counts

    @property
    def tokens_per_call(self) -> int:
        return self._members[0].tokens_per_call

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of the prefix caches on this rank."""
        return sum(member.prefix_cache_bytes for member in self._members)

    def score_rows(self, samples: Sequence[Text], *, on_error: OnError = "nan") -> ScoredRows:
        """Score samples, and all their steps in the same pass; see ``Scorer`` of the contract."""
        return _score_rows(self, samples, on_error)

    def encode(self, text: Text) -> EncodedText:
        return self._members[0].encode(text)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        self._members[0].check_tokens(token_ids)

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        return self._members[0].count_reply_tokens(texts)

    def compute(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """``RewardScorer.compute``, with M times the columns: ``[s, M * A * K]`` for each row."""
        return self.begin(rows).wait()

    def begin(self, rows: Sequence[Row]) -> Arriving[list[np.ndarray]]:
        """``RewardScorer.begin`` of all models."""
        parts = [member.begin(rows) for member in self._members]

        def wait() -> list[np.ndarray]:
            outputs = [part.wait() for part in parts]
            return [np.concatenate(columns, axis=1) for columns in zip(*outputs, strict=True)]

        return Arriving(lambda: all(part.has_arrived() for part in parts), wait)

    def read_outputs(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """``[N, M * A]`` float32 rewards of ``outputs``, and their spreads, if any."""
        parts = np.split(outputs, len(self._members), axis=1)
        read = [
            member.read_outputs(part) for member, part in zip(self._members, parts, strict=True)
        ]
        spreads = [each for _, each in read if each is not None]
        return (
            np.concatenate([rewards for rewards, _ in read], axis=1),
            np.concatenate(spreads, axis=1) if spreads else None,
        )

    def reset_cache(self) -> None:
        for member in self._members:
            member.reset_cache()


TokenScorer = RewardScorer | RewardEnsemble
"""Of its methods those that score, and ``reset_cache``, are collective over the ranks."""


def _score_rows(scorer: TokenScorer, samples: Sequence[Text], on_error: OnError) -> ScoredRows:
    contract = scorer.contract

    def measure(encoded: Sequence[EncodedText]) -> RowValues:
        rows = [Row.of(sample.token_ids, sample.reads) for sample in encoded]
        outputs = np.concatenate(scorer.compute(rows))
        rewards, spreads = scorer.read_outputs(outputs)
        bounds = [*accumulate((len(row.positions) for row in rows), initial=0)]
        last = np.array(bounds[1:], dtype=np.int64) - 1
        steps = np.full(len(rows), None, dtype=np.object_)
        for row, (start, end) in enumerate(pairwise(bounds)):
            steps[row] = StepRewards(rewards[start:end], encoded[row].spans)
        return RowValues(
            aggregate_texts(rewards, bounds, contract.aggregation),
            None if spreads is None else spreads[last],
            None if contract.readout is None else outputs[last],
            steps if contract.has_steps else None,
        )

    scored = score_encodable(samples, scorer.encode, measure, contract.hash, on_error)
    return replace(scored, model_fingerprint=scorer.fingerprint)


def check_alike(contracts: Sequence[ScoringContract]) -> None:
    """Refuse models that do not score the same token ids by the same attributes.

    Raises:
        ConfigError: it names the model by its number in ``ensemble.files``, and what is different.
    """
    for number, contract in enumerate(contracts[1:], start=1):
        differences = contracts[0].differences(contract)
        parting = {name: each for name, each in differences.items() if name not in _MAY_DIFFER}
        if parting:
            raise ConfigError(
                f"ensemble.files: model {number} does not score as rm_model_file does: "
                + describe_differences(parting)
            )
