"""RewardCriticClient: values and rewards of token sequences, and training of a critic on them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import one_reward
from nemo_aligner.data.rollout import Rollout
from nemo_aligner.serving.client.calls import (
    ServerClient,
    check_token,
    complete_urls,
    run_all,
)
from nemo_aligner.serving.client.contract_check import ContractCheck
from nemo_aligner.serving.client.partial_requests import (
    PartialRequest,
    TooManyRowsError,
    encode_rows,
    requests_of_tokens,
    token_rows,
)
from nemo_aligner.serving.client.pool import ServerPool
from nemo_aligner.serving.client.reward import RowCollector
from nemo_aligner.serving.failures import RefusedError
from nemo_aligner.serving.protocols import critic as wire
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.serving.protocols.critic import CriticValues
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.utils.errors import ServingError, shown

TokenLists = Sequence[Sequence[int]]


class _Connections:
    """Connections to the three endpoints of a critic, and to the servers of a reward model."""

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

        # Three models of one Triton server, which become ready independently.
        self.infer = connect([url], wire.INFER_NAME)
        self.train = connect([url], wire.TRAIN_NAME)
        self.save = connect([url], wire.SAVE_NAME)
        self.rewards = connect(reward_urls, kserve.MODEL_NAME) if reward_urls else None
        self.attribute_weights: dict[str, tuple[float, ...]] = {}  # by the contract's hash
        pools = (self.infer, self.train, self.save, self.rewards)
        self._pools = [pool for pool in pools if pool is not None]

    def trouble(self) -> str:
        """List the reasons why servers are unavailable, for error messages.

        Empty if all are available.
        """
        return "; ".join(filter(None, (pool.trouble() for pool in self._pools)))

    async def close(self) -> None:
        """Close the sockets."""
        for pool in self._pools:
            await pool.close()


class RewardCriticClient(ServerClient[_Connections]):
    """Client of a PPO critic's server: fetches values and rewards, trains the critic and saves it.

    A critic with ``combine_rm_and_critic_server`` returns values and rewards together. With
    ``reward_url``, the client queries servers of a reward model at the same time as the critic.
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
        """Store the settings; the client connects at the first call.

        The client never repeats a request to train or save: if the answer is lost, the server may
        have executed it.

        Args:
            url: URL of the critic's server.
            reward_url: URL or URLs of servers of a reward model, if the critic's server returns no
                rewards.
            expect: the scoring contract, or its hash, that critic and reward model must have.
            timeout_s: deadline of one call, including retries, in seconds.
            wait_s: how long to wait for a server that is still starting, in seconds.
            retry_s: how long to wait for a server that has answered before and is gone, in seconds.
            max_connections: maximum number of concurrent requests per server.
            token: bearer token that is sent to all servers; None if they require none.

        Raises:
            ConfigError: ``expect`` is neither a contract nor a hash, a URL is invalid or has a
                password next to the token, or a header cannot carry the token.
        """
        (critic,) = complete_urls([url])
        rewards = [reward_url] if isinstance(reward_url, str) else list(reward_url or ())
        reward_urls = complete_urls(rewards) if rewards else []
        check_token(token, [critic, *reward_urls])
        ContractCheck(expect)  # a wrong value raises here, and not later in the thread
        connect = partial(
            _Connections, critic, reward_urls, expect, (wait_s, retry_s), max_connections, token
        )
        super().__init__(f"{critic}, critic", timeout_s, connect)

    def infer(self, token_lists: TokenLists) -> CriticValues:
        """Fetch the values of N token sequences, and their rewards if there is a reward model.

        Raises:
            ServingError: a sequence is empty; or a server rejected the request (the error has the
                reason), failed, or does not answer.
            TypeError: ``token_lists`` is not a list of lists.
        """
        return self._wait(self.infer_future(token_lists))

    def infer_future(self, token_lists: TokenLists) -> Future[CriticValues]:
        """Fetch the values (and rewards) of N token sequences; return a future without waiting."""
        return self._submit(_infer, token_rows(token_lists))

    def train(
        self, tokens: np.ndarray, returns: np.ndarray, prev_values: np.ndarray, mask: np.ndarray
    ) -> float:
        """Train the critic on a rollout; return the mean of the loss before each update.

        Args:
            tokens: ``[N, S]`` token ids of the rollout's N sequences.
            returns: ``[N, S - 1]`` targets of the values, for each token except the last.
            prev_values: ``[N, S - 1]`` values that the critic had before this training step.
            mask: ``[N, S - 1]``, 1 where the critic learns, else 0.

        Raises:
            ServingError: an array does not have two dimensions, or the server rejected the rollout,
                failed, or does not answer. The request is not repeated.
        """
        return self._wait(self.train_future(tokens, returns, prev_values, mask))

    def train_future(
        self, tokens: np.ndarray, returns: np.ndarray, prev_values: np.ndarray, mask: np.ndarray
    ) -> Future[float]:
        """Start training on a rollout, and return a future of the mean loss; see ``train``.

        The arrays must not change before the future is done.
        """
        arrays = {"returns": returns, "prev_values": prev_values, "mask": mask}
        rollout = Rollout(
            _check_matrix("tokens", tokens, "[N, S] token ids (integers)", kinds="iu"),
            **{name: _check_matrix(name, array, "[N, S - 1]") for name, array in arrays.items()},
        )
        return self._submit(_train_critic, rollout)

    def save(self) -> None:
        """Tell the critic's server to write a checkpoint; it is on disk when this returns.

        Raises:
            ServingError: saving failed, or the server does not answer.
        """
        self._wait(self.save_future())

    def save_future(self) -> Future[None]:
        """Tell the critic's server to write a checkpoint, without waiting for it.

        The returned future is done when the checkpoint is on disk, and has the error if saving
        failed.
        """
        return self._submit(_save_critic)


async def _infer(connections: _Connections, token_lists: list[Sequence[int]]) -> CriticValues:
    if not token_lists:
        return CriticValues([], np.zeros(0, dtype=np.float32))
    values = asyncio.ensure_future(_fetch_values(connections.infer, token_lists))
    if connections.rewards is None:
        return await values
    rewards = asyncio.ensure_future(_fetch_rewards(connections, connections.rewards, token_lists))
    try:
        await asyncio.gather(values, rewards)
    finally:  # if one of the two requests has failed, the other's answer is not needed
        values.cancel(), rewards.cancel()
    return CriticValues(values.result().values, rewards.result())


async def _fetch_values(pool: ServerPool, token_lists: list[Sequence[int]]) -> CriticValues:
    capacity = await pool.capacity()
    call = PartialRequest(list(range(len(token_lists))), token_lists, kserve.encode_tokens)
    replies = await _request_all_values(pool, call.split(capacity.rows))
    rows = [row for reply in replies for row in reply.values]
    # A server pads the values of all rows to the longest sequence of their request.
    values = [row[: len(tokens)] for row, tokens in zip(rows, token_lists, strict=True)]
    rewards = [reply.rewards for reply in replies if reply.rewards is not None]
    return CriticValues(values, np.concatenate(rewards) if rewards else None)


async def _request_all_values(pool: ServerPool, parts: list[PartialRequest]) -> list[CriticValues]:
    answers = await run_all(_request_values(pool, part) for part in parts)
    return [reply for replies in answers for reply in replies]


async def _request_values(pool: ServerPool, part: PartialRequest) -> list[CriticValues]:
    """Request the values of a part of a call; return the answers in row order.

    If the server rejects the request as too large, it is split in halves. If the server has
    restarted, and accepts fewer rows now, the request is split into parts of that size.
    """
    try:
        encode = partial(encode_rows, part)
        return [await pool.send_request(encode, len(part.rows), _read_values)]
    except TooManyRowsError as error:
        return await _request_all_values(pool, part.split(error.limit))
    except RefusedError as refusal:
        if refusal.is_too_large and len(part.rows) > 1:
            return await _request_all_values(pool, part.split(-(-len(part.rows) // 2)))
        if refusal.row is None or refusal.row >= len(part.rows):
            raise
        raise refusal.of_row(part.rows[refusal.row]) from refusal


def _read_values(outputs: Tensors, server: str) -> CriticValues:
    try:
        return wire.decode_values(outputs)
    except KeyError:
        raise ServingError(
            f"{server}: the answer has no values; it is not a critic's server"
        ) from None


async def _fetch_rewards(
    connections: _Connections, pool: ServerPool, token_lists: list[Sequence[int]]
) -> np.ndarray:
    """Fetch rewards ``[N]``: sums of the attributes, with the scoring contract's weights."""
    # PPO needs a reward for every sequence of a rollout, so one rejected sequence fails the call.
    requests = requests_of_tokens(token_lists)
    scored = await RowCollector(pool, "raise").collect(len(token_lists), requests, None)
    if scored.contract_hash is None and scored.rewards.shape[1] == 1:
        return scored.rewards[:, 0]  # a server of NVIDIA's NeMo-Aligner, which publishes no weights
    weights = connections.attribute_weights.get(scored.contract_hash or "")
    if weights is None:
        contract = await pool.fetch_contract()
        weights = connections.attribute_weights[contract.hash] = contract.attribute_weights
    return one_reward(scored.rewards, weights)


async def _train_critic(connections: _Connections, rollout: Rollout) -> float:
    encode = partial(wire.encode_rollout, rollout)
    return await connections.train.send_request(encode, 1, _read_loss, may_repeat=False)


def _check_matrix(name: str, value: object, expected: str, kinds: str = "biuf") -> np.ndarray:
    """Convert ``value``, one argument of ``train``, to a two-dimensional array of numbers.

    The server checks that the shapes of all arguments fit each other.

    Args:
        name: the argument, for the message.
        value: an array or nested lists.
        expected: the expected shape, for the message.
        kinds: the accepted kinds of elements, as letters of ``np.dtype.kind``.

    Raises:
        RefusedError: ``value`` does not have two dimensions, or has elements of another kind.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        actual = "rows of different lengths"
    else:
        if array.ndim == 2 and array.dtype.kind in kinds:
            return array
        if array.ndim != 2:
            actual = f"shape {list(array.shape)}"
        else:
            actual = str(array.dtype) if array.dtype.kind in "biuf" else shown(value)
    raise RefusedError("client", 400, f"{name}: got {actual}, wanted {expected}")


def _read_loss(outputs: Tensors, server: str) -> float:
    try:
        return float(outputs["loss_mean"].reshape(-1)[0])
    except (KeyError, IndexError):
        raise ServingError(
            f"{server}: the answer has no loss_mean; it is not a critic's server"
        ) from None


async def _save_critic(connections: _Connections) -> None:
    def encode() -> Tensors:
        return {"dummy_var": np.zeros(1, dtype=np.int64)}

    await connections.save.send_request(encode, 1, lambda outputs, server: None, may_repeat=False)
