"""The gateway's scoring service: upstream servers score the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress

from nemo_aligner.config.gateway import GatewayConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.serving.client.pool import NoServerError
from nemo_aligner.serving.client.reward import OnError, RewardClient
from nemo_aligner.serving.failures import FailureKind, RefusedError, RequestError, public_failure
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.scoring import ScoringService, TemplateParts
from nemo_aligner.utils.errors import ServingError, one_line

# Short, because nobody knows when a backend comes back.
_RETRY_AFTER_S = 1


class UpstreamService(ScoringService):
    """The gateway's service: a ``RewardClient`` sends the requests to model servers (backends)."""

    def __init__(self, client: RewardClient, config: GatewayConfig) -> None:
        super().__init__(config)
        self._publishes_none = False
        self._client = client
        # Fetched only once, because these texts depend only on the chat template. A backend with
        # another template has another contract hash, so the client does not use its rewards.
        self._parts: TemplateParts | None = None
        self._startup_check: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._startup_check = asyncio.ensure_future(self._warn_of_missing_backends())

    async def close(self) -> None:
        try:
            if self._startup_check is not None:
                self._startup_check.cancel()
                with suppress(asyncio.CancelledError):
                    await self._startup_check
            await super().close()
        finally:
            await self._client.aclose()

    async def template_parts(self) -> TemplateParts:
        if self._parts is None:
            try:
                self._parts = TemplateParts(
                    await self._client.turn_end_async(), await self._client.sample_frame_async()
                )
            except ServingError as error:
                raise _upstream_error(error) from error
        return self._parts

    async def read_contract(self) -> ScoringContract:
        try:
            return await self._fetch_contract()
        except ServingError as error:
            raise _upstream_error(error) from error

    async def find_contract(self) -> ScoringContract | None:
        try:
            return await self._fetch_contract_if_any()
        except ServingError as error:
            raise _upstream_error(error) from error

    async def probe(self) -> dict[str, str | None]:
        return await self._client.probe_async()

    async def statistics(self) -> Mapping[str, Mapping[str, float] | None]:
        return await self._client.statistics_async()

    async def _score(
        self, request: ScoreRequest, aside: Collection[FailureKind], is_probe: bool
    ) -> ScoredRows:
        if not request.adds_special_tokens:
            await self._check_special_tokens()
        try:
            on_error: OnError = "nan" if aside else "raise"
            scored = await self._forward(request, on_error, is_probe)
            await self._note_contract(scored.contract_hash)
            if scored.model_fingerprint is not None:
                self.fingerprint = scored.model_fingerprint
        except RefusedError as error:
            raise _refusal_of(error).renumber(request.row_numbers) from error
        except ServingError as error:
            raise _upstream_error(error) from error
        except Exception as error:
            raise public_failure(error) from error
        _check_unscored(scored, request, aside)
        return scored

    async def _forward(
        self, request: ScoreRequest, on_error: OnError, is_probe: bool
    ) -> ScoredRows:
        if request.texts is not None:
            return await self._client.score_rows_async(
                request.texts, on_error=on_error, is_probe=is_probe
            )
        return await self._client.score_token_rows_async(
            request.token_lists or [], on_error=on_error, is_probe=is_probe
        )

    async def _check_special_tokens(self) -> None:
        """Raise RequestError if the model servers may add BOS or EOS to a raw text.

        They do so where the text lacks them, which cannot be seen here without a tokenizer.
        """
        contract = self.contract or await self.find_contract()
        if contract is None or contract.add_bos or contract.add_eos:
            raise RequestError(
                "add_special_tokens: got false, wanted true: the model's scoring contract adds BOS "
                "or EOS to texts that lack them. Send messages, or query the model's server itself",
                FailureKind.bad_request,
            )

    async def _note_contract(self, contract_hash: str | None) -> None:
        """Fetch the backends' contract if the hash of new rewards differs from the last one.

        The contract has the names and weights of attributes. Fetching it for every answer would
        double the number of requests.
        """
        if self.contract is not None and contract_hash in (None, self.contract.hash):
            return
        if self._publishes_none and contract_hash is None:  # the backends still publish no contract
            return
        self._publishes_none = await self._fetch_contract_if_any() is None

    async def _fetch_contract(self) -> ScoringContract:
        self.contract = await self._client.contract_async()
        self.fingerprint = self._client.fingerprint
        return self.contract

    async def _fetch_contract_if_any(self) -> ScoringContract | None:
        try:
            return await self._fetch_contract()
        except RefusedError as error:
            if not error.is_unknown_model:
                raise
            return None

    async def _warn_of_missing_backends(self) -> None:
        """Print a warning for each backend that gives no rewards; the gateway starts anyway."""
        try:
            states = await self.probe()
        except ServingError as error:
            print(
                f"Warning: the backends could not be checked: {one_line(error)}. "
                "GET /ready tells which of them give rewards.",
                flush=True,
            )
            return
        for url, reason in states.items():
            if reason is not None:
                print(
                    f"Warning: {url}: {one_line(reason)}; while no backend answers, requests wait "
                    "gateway.retry_s, and then get status 503 (GET /ready lists the backends)",
                    flush=True,
                )


def _check_unscored(
    scored: ScoredRows, request: ScoreRequest, aside: Collection[FailureKind]
) -> None:
    """Raise RequestError if a row that has to be scored was too slow, or a backend's part failed.

    Such a backend is itself a gateway.
    """
    if scored.unscored and FailureKind.unscored not in aside:
        row = min(scored.unscored)
        text = f"row {request.row_numbers[row]}: {scored.errors[row]}"
        if row in scored.temporary:
            raise RequestError(text, FailureKind.slow, _RETRY_AFTER_S)
        raise RequestError(text, FailureKind.unscored)


def _refusal_of(error: RefusedError) -> RequestError:
    """Build the gateway's error for a request that a backend has rejected."""
    if error.kind is FailureKind.unauthorized:
        text = f"{error}. Set backend_token_file or backend_token_variable of the gateway"
        return RequestError(one_line(text), FailureKind.internal)
    # Any other rejection is not the sender's fault either, e.g. if the model fails.
    kind = error.kind if error.kind.reaction == "skip" else FailureKind.internal
    row = error.row if kind is FailureKind.bad_request else None
    return RequestError(one_line(error.message), kind, row=row)


def _upstream_error(error: ServingError) -> RequestError:
    """Build the gateway's error for a request that no backend has answered."""
    if isinstance(error, RefusedError) and error.kind is FailureKind.unauthorized:
        return _refusal_of(error)
    text = f"no backend answers: {error.trouble}" if isinstance(error, NoServerError) else error
    return RequestError(one_line(text), FailureKind.unreachable, _RETRY_AFTER_S)
