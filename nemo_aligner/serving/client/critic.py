"""RewardCriticClient: values and rewards of rollouts, and a critic that learns from them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import one_reward
from nemo_aligner.data.rollout import Rollout
from nemo_aligner.serving.client.calls import ServerClient, check_token, checked_urls
from nemo_aligner.serving.client.pool import ServerPool
from nemo_aligner.serving.client.reward import (
    PartialRequest,
    RowCollector,
    encoded,
    split_tokens,
    token_rows,
)
from nemo_aligner.serving.client.server import ContractCheck
from nemo_aligner.serving.failures import RefusedError
from nemo_aligner.serving.protocols import critic as wire
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.serving.protocols.critic import Valued
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.utils.errors import ServingError, shown

TokenLists = Sequence[Sequence[int]]


class _Connections:
    """To the three endpoints of a critic, and to the servers of a reward model."""

    def __init__(
        self,
        url: str,
        reward_urls: Sequence[str],
        expect: ScoringContract | str | None,
        patience: tuple[float, float],
        max_connections: int,
        token: str | None,
    ) -> None:
        def connect(urls: Sequence[str], name: str) -> ServerPool:
            return ServerPool(urls, name, ContractCheck(expect), *patience, max_connections, token)

        # Three models of one Triton, each of which is ready, or not, by itself.
        self.infer = connect([url], wire.INFER_NAME)
        self.train = connect([url], wire.TRAIN_NAME)
        self.save = connect([url], wire.SAVE_NAME)
        self.rewards = connect(reward_urls, kserve.MODEL_NAME) if reward_urls else None
        pools = (self.infer, self.train, self.save, self.rewards)
        self._pools = [pool for pool in pools if pool is not None]

    def trouble(self) -> str:
        """Reasons why servers are unavailable."""
        return "; ".join(filter(None, (pool.trouble() for pool in self._pools)))

    async def close(self) -> None:
        """Let the sockets go."""
        for pool in self._pools:
            await pool.close()


class RewardCriticClient(ServerClient[_Connections]):
    """Asks a critic for values, has it learn, and has it saved; rewards come from where they are.

    A critic with ``combine_rm_and_critic_server`` gives both in one answer. With ``reward_url``,
    of one or several servers of a reward model, these are asked for rewards at the same time.
    """

    def __init__(
        self,
        url: str = wire.DEFAULT_URL,
        *,
        reward_url: str | Sequence[str] | None = None,
        expect: ScoringContract | str | None = None,
        timeout_s: float = 3600.0,
        wait_s: float = 0.0,
        retry_s: float = 5.0,
        max_connections: int = 16,
        token: str | None = None,
    ) -> None:
        """As ``RewardClient``; ``expect`` and ``token`` are those of critic and reward model.

        What trains or saves is sent once: where its answer is lost, it may have been done.

        Raises:
            ConfigError: ``expect`` is neither a contract nor a hash, a URL is none, or the token
                is not one word.
        """
        check_token(token)
        (critic,) = checked_urls([url])
        rewards = [reward_url] if isinstance(reward_url, str) else list(reward_url or ())
        reward_urls = checked_urls(rewards) if rewards else []
        ContractCheck(expect)  # here, and not in the thread, it is refused if it is none
        connect = partial(
            _Connections, critic, reward_urls, expect, (wait_s, retry_s), max_connections, token
        )
        super().__init__(f"{critic}, critic", timeout_s, connect)

    def infer(self, token_lists: TokenLists) -> Valued:
        """Values of N token sequences, and rewards.

        Raises:
            ServingError: a sequence is empty, a server refused it (in its words), there is none,
                or it failed.
            TypeError: ``token_lists`` is no list of lists.
        """
        return self._wait(self.infer_future(token_lists))

    def infer_future(self, token_lists: TokenLists) -> Future[Valued]:
        """Like ``infer``, in the background."""
        return self._submit(_infer, token_rows(token_lists))

    def train(
        self, tokens: np.ndarray, returns: np.ndarray, prev_values: np.ndarray, mask: np.ndarray
    ) -> float:
        """Have the critic learn from a rollout; the mean of its loss before each update.

        Shapes and meanings are those of ``data.rollout.Rollout``.

        Raises:
            ServingError: an array has other than two dimensions, or the server refused it, failed,
                or is gone; it is not sent again.
        """
        return self._wait(self.train_future(tokens, returns, prev_values, mask))

    def train_future(
        self, tokens: np.ndarray, returns: np.ndarray, prev_values: np.ndarray, mask: np.ndarray
    ) -> Future[float]:
        """Like ``train``, in the background; the arrays may not be changed until it is done."""
        arrays = {"returns": returns, "prev_values": prev_values, "mask": mask}
        rollout = Rollout(
            _matrix("tokens", tokens, "[N, S]"),
            **{name: _matrix(name, given, "[N, S - 1]") for name, given in arrays.items()},
        )
        return self._submit(_train, rollout)

    def save(self) -> None:
        """Have the critic saved; it is on the disk when this returns.

        Raises:
            ServingError: it could not be saved, or the server is gone.
        """
        self._wait(self.save_future())

    def save_future(self) -> Future[None]:
        """Like ``save``, in the background."""
        return self._submit(_save)


async def _infer(connections: _Connections, token_lists: list[Sequence[int]]) -> Valued:
    if not token_lists:
        return Valued([], np.zeros(0, dtype=np.float32))
    values = asyncio.ensure_future(_values(connections.infer, token_lists))
    if connections.rewards is None:
        return await values
    rewards = asyncio.ensure_future(_rewards(connections.rewards, token_lists))
    try:
        await asyncio.gather(values, rewards)
    finally:  # where one has failed, nobody wants the other
        values.cancel(), rewards.cancel()
    return Valued(values.result().values, rewards.result())


async def _values(pool: ServerPool, token_lists: list[Sequence[int]]) -> Valued:
    limit, _ = await pool.limit()
    whole = PartialRequest(list(range(len(token_lists))), token_lists, kserve.encode_tokens)
    replies = await _all_values(pool, whole.chunks(limit))
    rows = [row for reply in replies for row in reply.values]
    # What a server sends is as wide as the request's longest sequence.
    values = [row[: len(tokens)] for row, tokens in zip(rows, token_lists, strict=True)]
    rewards = [reply.rewards for reply in replies if reply.rewards is not None]
    return Valued(values, np.concatenate(rewards) if rewards else None)


async def _all_values(pool: ServerPool, parts: list[PartialRequest]) -> list[Valued]:
    found = await asyncio.gather(*(_ask_for_values(pool, part) for part in parts))
    return [reply for replies in found for reply in replies]


async def _ask_for_values(pool: ServerPool, part: PartialRequest) -> list[Valued]:
    """The answer to a request; to its halves where it has too many bytes."""
    try:
        return [await pool.ask_for(encoded(part), len(part.rows), _read_values)]
    except RefusedError as refusal:
        if refusal.is_too_large and len(part.rows) > 1:
            return await _all_values(pool, part.chunks(-(-len(part.rows) // 2)))
        if refusal.row is None or refusal.row >= len(part.rows):
            raise
        raise refusal.of_row(part.rows[refusal.row]) from refusal


def _read_values(outputs: Tensors, server: str) -> Valued:
    try:
        return wire.decode_values(outputs)
    except KeyError:
        raise ServingError(f"{server}: the answer has no values") from None


async def _rewards(pool: ServerPool, token_lists: list[Sequence[int]]) -> np.ndarray:
    """``[N]``, attributes merged by the weights of the server's scoring contract."""
    # PPO needs a reward of every row of a rollout, so one that is refused is an error.
    split = partial(split_tokens, token_lists)
    scored = await RowCollector(pool, "raise").collect(len(token_lists), split, None)
    if scored.rewards.shape[1] == 1:
        return scored.rewards[:, 0]
    return one_reward(scored.rewards, (await pool.ask_contract()).attribute_weights)


async def _train(connections: _Connections, rollout: Rollout) -> float:
    inputs = wire.encode_rollout(rollout)
    return await connections.train.ask_for(inputs, 1, _read_loss, again=False)


def _matrix(name: str, given: object, wanted: str) -> np.ndarray:
    """Numbers in rows; whether they fit each other, the server says."""
    try:
        array = np.asarray(given)
    except ValueError:
        got = "rows of different lengths"
    else:
        if array.ndim == 2 and array.dtype.kind in "biuf":
            return array
        got = f"shape {list(array.shape)}" if array.ndim != 2 else shown(given)
    raise RefusedError("client", 400, f"{name}: got {got}, wanted {wanted}")


def _read_loss(outputs: Tensors, server: str) -> float:
    try:
        return float(outputs["loss_mean"].reshape(-1)[0])
    except (KeyError, IndexError):
        raise ServingError(f"{server}: the answer has no loss_mean") from None


async def _save(connections: _Connections) -> None:
    inputs = {"dummy_var": np.zeros(1, dtype=np.int64)}
    await connections.save.ask_for(inputs, 1, lambda outputs, server: None, again=False)
