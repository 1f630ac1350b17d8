"""RewardClient: texts, conversations or token ids -> rewards, over HTTP; sync, futures, asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text, check_texts
from nemo_aligner.contract.turns import TurnEnd
from nemo_aligner.serving.client.calls import (
    OnError,
    RowCollector,
    ServerClient,
    Split,
    check_on_error,
    check_token,
    checked_urls,
    split_texts,
    split_tokens,
    token_rows,
)
from nemo_aligner.serving.client.contract_check import ContractCheck
from nemo_aligner.serving.client.pool import ServerPool
from nemo_aligner.serving.protocols import ScoredRows, kserve


class RewardClient(ServerClient[ServerPool]):
    """Scores on reward model servers; a text is a raw string or a conversation.

    A conversation is a list of messages, or a ``Conversation``, which has tools and documents, too.

    Conversations get the model's chat template on the server. A call is split into requests that
    are sent side by side, each to the least busy of the servers; one that is gone is left out, and
    tried again. Safe to use from several threads.

    All rewards of a client are by one scoring contract: ``expect`` (a contract, or its hash), else
    the first that it meets. A server that scores by another one is left out until it is right.
    """

    def __init__(
        self,
        url: str | Sequence[str] = kserve.DEFAULT_URL,
        model_name: str = kserve.MODEL_NAME,
        *,
        expect: ScoringContract | str | None = None,
        timeout_s: float = 600.0,
        wait_s: float = 0.0,
        retry_s: float = 5.0,
        max_connections: int = 16,
        token: str | None = None,
        in_callers_loop: bool = False,
    ) -> None:
        """One ``url``, or those of several servers of the same model.

        Args:
            url: ``http://host:port``
            model_name: what it is called on the servers
            expect: see above
            timeout_s: for one call with all that it takes
            wait_s: for a server that is not up yet
            retry_s: for a server that has answered before and is gone, or has no room
            max_connections: requests at once, for each server
            token: the servers' bearer token, where they ask for one
            in_callers_loop: the asyncio methods work in the event loop that calls them, always the
                same one, and not in a thread, which costs each request two hand-overs; ``aclose``
                then closes the client, and the other methods are not for it

        Raises:
            ConfigError: ``expect`` is neither a contract nor a hash, a URL is none, or the token
                is not one word.
        """
        check_token(token)
        urls = checked_urls([url] if isinstance(url, str) else url)
        self._contract_check = ContractCheck(expect)
        connect = partial(
            ServerPool,
            *(urls, model_name, self._contract_check, wait_s, retry_s, max_connections, token),
        )
        name = f"{', '.join(urls)}, {model_name}"
        super().__init__(name, timeout_s, connect, in_callers_loop)

    def contract(self) -> ScoringContract:
        """The contract that the servers score by.

        Raises:
            ServingError: there is no server, or it publishes none.
        """
        return self._wait(self._submit(ServerPool.ask_contract))

    def score(self, texts: Sequence[Text], *, on_error: OnError = "raise") -> np.ndarray:
        """Rewards ``[N, A]`` float32 of N texts.

        With ``on_error="nan"`` a text that the server refuses has NaN, and the others their
        rewards; what is wrong with it is logged. ``score_rows`` returns it.

        Raises:
            ServingError: the server refused a text (in its words), there is none, it failed, or it
                scores by another contract.
        """
        return self._wait(self.score_future(texts, on_error=on_error))

    def score_rows(self, texts: Sequence[Text]) -> ScoredRows:
        """Rewards, NaN for the texts that the server refuses, and why it does.

        Raises:
            ServingError: as above, but for a refused text.
        """
        return self._wait(self._submit(self._collect, *_of_texts(texts), "nan"))

    def score_tokens(
        self, token_lists: Sequence[Sequence[int]], *, on_error: OnError = "raise"
    ) -> np.ndarray:
        """Rewards ``[N, A]`` float32 of N token sequences, scored as they stand.

        Raises:
            ServingError: as ``score``; an empty sequence is refused before it is sent.
            TypeError: ``token_lists`` is no list of lists.
        """
        return self._wait(self.score_tokens_future(token_lists, on_error=on_error))

    def score_future(
        self, texts: Sequence[Text], *, on_error: OnError = "raise"
    ) -> Future[np.ndarray]:
        """Like ``score``, in the background."""
        return self._submit(self._rewards, *_of_texts(texts), on_error)

    def score_tokens_future(
        self, token_lists: Sequence[Sequence[int]], *, on_error: OnError = "raise"
    ) -> Future[np.ndarray]:
        """Like ``score_tokens``, in the background."""
        rows = token_rows(token_lists)
        return self._submit(self._rewards, len(rows), partial(split_tokens, rows), on_error)

    async def score_async(
        self, texts: Sequence[Text], *, on_error: OnError = "raise"
    ) -> np.ndarray:
        """Like ``score``, for asyncio."""
        return await self._run(self._rewards, *_of_texts(texts), on_error)

    async def score_rows_async(
        self, texts: Sequence[Text], *, on_error: OnError = "nan"
    ) -> ScoredRows:
        """Like ``score_rows``, for asyncio; ``on_error="raise"``: a refused text is an error."""
        return await self._run(self._collect, *_of_texts(texts), on_error)

    async def score_token_rows_async(
        self, token_lists: Sequence[Sequence[int]], *, on_error: OnError = "nan"
    ) -> ScoredRows:
        """``score_rows_async`` of token sequences, scored as they stand."""
        rows = token_rows(token_lists)
        return await self._run(self._collect, len(rows), partial(split_tokens, rows), on_error)

    async def contract_async(self) -> ScoringContract:
        """Like ``contract``, for asyncio."""
        return await self._run(ServerPool.ask_contract)

    async def turn_end_async(self) -> TurnEnd | None:
        """Text that the servers' chat template writes after a reply; None if unknown."""
        return await self._run(ServerPool.ask_turn_end)

    async def probe_async(self) -> dict[str, str | None]:
        """State of each server by its URL: why it gives no rewards now, None if it does."""
        return await self._run(ServerPool.probe)

    async def statistics_async(self) -> dict[str, dict[str, float] | None]:
        """Counts of each server since its start, by its URL and by name.

        None where it does not answer, empty where it is a server that counts nothing.
        """
        return await self._run(ServerPool.ask_statistics)

    async def _rewards(
        self, pool: ServerPool, total: int, split: Split, on_error: OnError
    ) -> np.ndarray:
        return (await self._collect(pool, total, split, on_error)).rewards

    async def _collect(
        self, pool: ServerPool, total: int, split: Split, on_error: OnError
    ) -> ScoredRows:
        check_on_error(on_error)
        return await RowCollector(pool, on_error).collect(
            total, split, self._contract_check.columns
        )


def _of_texts(texts: Sequence[Text]) -> tuple[int, Split]:
    rows = check_texts(texts)
    return len(rows), partial(split_texts, rows)
