"""RewardScorer: texts or tokens -> rewards on all ranks, by the rule of the checkpoint's contract.

Evaluation and the server call the same code from here down, so a text has one reward, whether it is
scored in process or over HTTP, alone or among others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import BATCH_INVARIANT_ROWS
from nemo_aligner.contract.contract import EncodedText, ScoringContract, TextEncoder
from nemo_aligner.contract.from_settings import describe_differences
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.steps import STEPPED, aggregate_texts
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.data.packing import SequenceReads, pack_sequences
from nemo_aligner.distributed.cpu_products import use_huge_pages
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.reward_model import (
    GPTRewardModel,
    freeze_for_scoring,
    make_batch_invariant,
    try_all_products,
)
from nemo_aligner.models.step import count_parts, gather_rewards, infer_in_parts
from nemo_aligner.serving.engine.prefix_cache import CallPlan, PrefixCache
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.protocols import ScoredRows, StepRewards, place_rows
from nemo_aligner.utils.console import Watch, unwatched
from nemo_aligner.utils.errors import ConfigError, DataError, ServingError

# Tokens of a text whose attention takes every way: see models/attention/cpu_inference.py.
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

    The ``score`` methods are collective: every rank calls them with the same arguments and gets all
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
        self.counts = TokenCounts()
        marker = contract.reply_marker
        self._cache = PrefixCache(
            prefix_cache_tokens, layout, micro_batch_tokens, marker, model.rotation_by_length
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

    def score(self, texts: Sequence[Text]) -> np.ndarray:
        """Rewards of raw texts and conversations.

        Raises:
            DataError: the contract refuses a text; the message has its number.
        """
        return self._score_encoded([self._encode_numbered(i, t) for i, t in enumerate(texts)])

    def score_steps(self, texts: Sequence[Text]) -> list[StepRewards]:
        """Rewards of every turn or step of each text, in one pass over it.

        Raises:
            DataError: the contract refuses a text, whose number the message has, or has no steps.
        """
        check_has_steps(self.contract)
        encoded = [self._encode_numbered(i, text) for i, text in enumerate(texts)]
        rewards, bounds = self._score_reads(encoded)
        return [
            StepRewards(of_text, text.spans)
            for of_text, text in zip(np.split(rewards, bounds[1:-1]), encoded, strict=True)
        ]

    def _score_encoded(self, texts: Sequence[EncodedText]) -> np.ndarray:
        """Rewards ``[N, A]`` of texts, by the contract's rule for those of turns or steps."""
        if self.contract.aggregate is None:
            return self.score_token_lists([text.token_ids for text in texts])
        rewards, bounds = self._score_reads(texts)
        return aggregate_texts(rewards, bounds, self.contract.aggregation)

    def _score_reads(self, texts: Sequence[EncodedText]) -> tuple[np.ndarray, list[int]]:
        """Rewards ``[S, A]`` of all turns or steps of N texts, and their N + 1 bounds."""
        reads = [text.reads or () for text in texts]
        outputs = self.score_step_outputs([text.token_ids for text in texts], reads)
        return self.contract.rewards_of(outputs), [*accumulate(map(len, reads), initial=0)]

    def score_step_outputs(
        self,
        token_lists: Sequence[Sequence[int] | np.ndarray],
        reads: Sequence[Sequence[int]],
    ) -> np.ndarray:
        """``[S, A * K]`` float32 outputs of the head at all ``reads``, places in each token list.

        The last place of each is that of its last token.
        """
        return self._score_outputs(token_lists, reads)

    def score_tokens(self, token_lists: Sequence[Sequence[int]]) -> np.ndarray:
        """Rewards of token ids as they stand.

        Raises:
            DataError: a sequence is empty, too long, or has an id outside the vocabulary.
        """
        for token_ids in token_lists:
            self.check_tokens(token_ids)
        return self.score_token_lists([list(token_ids) for token_ids in token_lists])

    def encode(self, text: Text) -> EncodedText:
        """The token ids of one text; DataError where the contract refuses it."""
        return self._encoder.encode(text)

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        """Tokens of every text's reply alone, at its full length."""
        return self._encoder.count_reply_tokens(texts)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Refuse, with a DataError, ids that the model would fail on or misread."""
        self._encoder.check_tokens(token_ids)

    def score_and_spread(self, texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray | None]:
        """``score``, and the rewards' spreads ``[N, A]`` float32, None if the head has none.

        Raises:
            DataError: as ``score``.
        """
        return self._score_and_spread([self._encode_numbered(i, t) for i, t in enumerate(texts)])[
            :2
        ]

    def score_rows(self, texts: Sequence[Text]) -> ScoredRows:
        """Rewards, NaN for each text that the contract refuses, and the reasons; as a client's.

        Raises:
            ServingError: the model's reward of a text is not a finite number.
        """
        return score_encodable(texts, self.encode, self._score_and_spread, self.contract.hash)

    def _score_and_spread(self, texts: Sequence[EncodedText]) -> RowValues:
        if self.contract.readout is None:
            return self._score_encoded(texts), None, None
        outputs = self.score_outputs([text.token_ids for text in texts])
        return *self.read_outputs(outputs), outputs

    def compute(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Compute the outputs of the head at the positions that the rows are read at.

        Returns:
            An array ``[s, A * K]`` float32 for each row, s the number of its ``reads`` or 1;
            ``read_outputs`` makes rewards of them.
        """
        sequences = [row.ids for row in rows]
        if not self.contract.has_steps:
            return np.split(self._score_outputs(sequences, None), range(1, len(rows)))
        positions = [row.positions for row in rows]
        outputs = self._score_outputs(sequences, positions)
        return np.split(outputs, np.cumsum([*map(len, positions)])[:-1])

    def score_token_lists(self, token_lists: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """Rewards of token ids that ``check_tokens`` let pass."""
        return self.contract.rewards_of(self.score_outputs(token_lists))

    def read_outputs(self, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """``[N, A]`` float32 rewards of the head's ``outputs``, and their spreads, if any.

        It is not collective.
        """
        return self.contract.rewards_of(outputs), self.contract.spreads_of(outputs)

    def score_outputs(self, token_lists: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """``[N, A * K]`` float32 outputs of the head, for token ids that were checked."""
        return self._score_outputs(token_lists, None)

    def _score_outputs(
        self,
        token_lists: Sequence[Sequence[int] | np.ndarray],
        reads: Sequence[Sequence[int]] | None,
    ) -> np.ndarray:
        if not token_lists:
            return np.zeros((0, self._num_outputs), dtype=np.float32)
        try:
            sequences = [np.array(tokens, dtype=np.int64) for tokens in token_lists]
            return self._score(sequences, None if reads is None else SequenceReads.number(reads))
        except BaseException:  # Ctrl-C, too: what was planned counts as cached, and may be missing
            self.reset_cache()
            raise

    def _score(
        self, sequences: Sequence[np.ndarray], reads: Sequence[SequenceReads] | None
    ) -> np.ndarray:
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
        everyone = gather_rewards(rewards, plan.packs, shape, self._layout).numpy()
        # Steps in cached blocks: the model has not computed them again, their outputs were kept.
        for row, outputs in plan.known.items():
            everyone[row] = outputs
        plan.keep(everyone)
        self.counts = self.counts.after(sum(map(len, sequences)), plan.computed, plan.cached)
        return everyone

    def _plan(
        self, sequences: Sequence[np.ndarray], reads: Sequence[SequenceReads] | None
    ) -> CallPlan:
        if self._pool is not None:
            return self._cache.plan(sequences, reads)
        by_length = self.model.rotation_by_length
        packs = pack_sequences(sequences, self._micro_batch_tokens, reads, by_length)
        # All ranks make the same packs, so each replica can take its own without a message.
        mine = packs[self._layout.dp_rank :: self._layout.dp]
        return CallPlan(mine, sum(pack.num_tokens for pack in packs), 0)

    def _encode_numbered(self, number: int, text: Text) -> EncodedText:
        try:
            return self.encode(text)
        except DataError as error:
            raise DataError(f"text {number}: {error}") from error


def check_has_steps(contract: ScoringContract) -> None:
    """Raise DataError if a model has no reward for each turn or step."""
    if not contract.has_steps:
        raise DataError(
            f"steps: got a model with one reward of a text (model.head.reads is "
            f"{contract.scored_position}), wanted one that reads {', '.join(STEPPED)}"
        )


RowValues = tuple[np.ndarray, "np.ndarray | None", "np.ndarray | None"]
"""``[N, A]`` rewards, their spreads, and the ``[N, A * K]`` outputs, the last two if there are."""


def score_encodable(
    texts: Sequence[Text],
    encode: Callable[[Text], EncodedText],
    measure: Callable[[Sequence[EncodedText]], RowValues],
    contract_hash: str | None = None,
) -> ScoredRows:
    """Score by ``measure`` the texts that ``encode`` accepts; the others get NaN and the reason.

    Raises:
        ServingError: the reward of a text is not a finite number.
    """
    encoded: dict[int, EncodedText] = {}
    errors: dict[int, str] = {}
    for row, text in enumerate(texts):
        try:
            encoded[row] = encode(text)
        except DataError as error:
            errors[row] = str(error)
    rows = list(encoded)
    rewards, spreads, outputs = measure([*encoded.values()])
    wrong = np.flatnonzero(~np.isfinite(rewards).all(axis=1))
    if wrong.size:
        raise ServingError(f"row {rows[wrong[0]]}: the model's reward is not a finite number")

    def at_rows(values: np.ndarray) -> np.ndarray:
        return place_rows(values.astype(np.float32, copy=False), rows, len(texts))

    return ScoredRows(
        at_rows(rewards),
        errors,
        np.array([row in encoded and encoded[row].truncated for row in range(len(texts))], bool),
        contract_hash,
        spread=None if spreads is None else at_rows(spreads),
        outputs=None if outputs is None else at_rows(outputs),
    )


def load_scorer(
    path: str | Path,
    layout: ParallelLayout,
    *,
    precision: Precision | None = None,
    micro_batch_tokens: int = 8192,
    watch: Watch = unwatched,
    prefix_cache_tokens: int = 0,
    invariant_rows: int | None = BATCH_INVARIANT_ROWS,
    can_offload: bool = False,
) -> RewardScorer:
    """The scorer of a reward model's ``.nemo``, on this rank's device; every rank calls it.

    ``precision`` None is the contract's; without ``prefix_cache_tokens`` nothing is cached. With
    ``invariant_rows`` (see ``make_batch_invariant``) a reward has the same bits in any batch.
    Weights that an OffloadGroup ``can_offload`` keep torch's layout, which on a CPU is slower.

    Raises:
        CheckpointError: the archive is unsafe, incomplete, or has no scoring contract.
        ConfigError: ``micro_batch_tokens`` is below the contract's ``seq_length``.
    """
    loaded = load_reward_model(path, layout, precision)
    make_batch_invariant(loaded.model, invariant_rows)
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
    )


# Ensembles.

# All other fields decide which ids a text becomes, or what the columns are.
_MAY_DIFFER = ("label_means", "attribute_weights")


class RewardEnsemble:
    """M models on the same ranks: ``[N, M * A]`` rewards, model after model.

    Its methods are those of ``RewardScorer``, and as collective. ``contract`` is the first model's.
    """

    def __init__(self, members: Sequence[RewardScorer]) -> None:
        """Raise ConfigError if two of them make different token ids, or attributes, of a text."""
        check_alike([member.contract for member in members])
        self._members = list(members)
        self.contract = members[0].contract

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

    def encode(self, text: Text) -> EncodedText:
        return self._members[0].encode(text)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        self._members[0].check_tokens(token_ids)

    def count_reply_tokens(self, texts: Sequence[Text]) -> list[int]:
        return self._members[0].count_reply_tokens(texts)

    def score_token_lists(self, token_lists: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """``[N, M * A]`` float32 rewards of token ids that ``check_tokens`` let pass."""
        return np.concatenate(
            [member.score_token_lists(token_lists) for member in self._members], axis=1
        )

    def score_outputs(self, token_lists: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """``[N, M * A * K]`` float32 outputs of the heads, for token ids that were checked."""
        return np.concatenate(
            [member.score_outputs(token_lists) for member in self._members], axis=1
        )

    def score_step_outputs(
        self,
        token_lists: Sequence[Sequence[int] | np.ndarray],
        reads: Sequence[Sequence[int]],
    ) -> np.ndarray:
        """``[S, M * A * K]`` float32 outputs of the heads at all ``reads`` of the token lists."""
        found = [member.score_step_outputs(token_lists, reads) for member in self._members]
        return np.concatenate(found, axis=1)

    def compute(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """``RewardScorer.compute``, with M times the columns: ``[s, M * A * K]`` for each row."""
        outputs = [member.compute(rows) for member in self._members]
        return [np.concatenate(columns, axis=1) for columns in zip(*outputs, strict=True)]

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


Scorer = RewardScorer | RewardEnsemble
"""Of its methods those that score, and ``reset_cache``, are collective over the ranks."""


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
