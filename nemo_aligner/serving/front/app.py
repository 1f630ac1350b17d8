"""The HTTP front as an ASGI application: every protocol on one port, for any scoring service.

A request passes three checks in this order: the limits of its connection (``connection.py``, before
anything is read), the bearer token, and the route. KServe v2 is answered by ``kserve.py``. FastAPI
has the routes of all other protocols (``serving/protocols/``), health, metrics and OpenAPI.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic_core import from_json, to_json
from starlette.types import ASGIApp, Receive, Scope, Send

import nemo_aligner
from nemo_aligner.config.describe import suggestion
from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.serving.endpoints import Endpoint, call_by_size
from nemo_aligner.serving.failures import NO_ROWS, FailureKind, RequestError, public_failure
from nemo_aligner.serving.front import kserve
from nemo_aligner.serving.front.bodies import BodyReader, RequestBodies
from nemo_aligner.serving.front.kserve import KServe, KServeAnswer
from nemo_aligner.serving.front.metrics import FrontMetrics, Statistics
from nemo_aligner.serving.front.notices import RequestNotices
from nemo_aligner.serving.protocols import (
    ScoredRows,
    ScoreRequest,
    gym,
    openrlhf,
    rerank,
    rewards,
    sglang,
    slime,
    tei,
    vllm,
)
from nemo_aligner.serving.protocols.base import (
    HttpAnswer,
    ModelRoute,
    PlainRoute,
    Route,
    Served,
    refuse_with_detail,
    row_headers,
)
from nemo_aligner.serving.protocols.kserve import MODEL_NAME
from nemo_aligner.serving.scoring import FOREIGN_ADVICE, ScoringService, check_num_rows
from nemo_aligner.serving.tokens import has_token
from nemo_aligner.utils.errors import ServingError, one_line, shown

# The routes of all protocols; a new protocol needs a line here.
ROUTES: list[Route[Any]] = [
    *rewards.ROUTES,
    *openrlhf.ROUTES,
    *slime.ROUTES,
    *vllm.ROUTES,
    *sglang.ROUTES,
    *tei.ROUTES,
    *rerank.ROUTES,
    *gym.ROUTES,
]
PLAIN_ROUTES: list[PlainRoute] = [*gym.PLAIN_ROUTES]
MODEL_ROUTES: list[ModelRoute] = [*vllm.MODEL_ROUTES, *tei.MODEL_ROUTES]

# Health checks of Kubernetes and load balancers send no token.
_OPEN_PATHS = ("/health", "/ready")
_SCHEMAS = "#/components/schemas/"
_METRICS_PATH = "/metrics"
# Errors that the OpenAPI page lists. 500 is not among them, because no client should expect it.
_ERRORS = {
    FailureKind.bad_request: "A body that cannot be read, or a sample that cannot be scored",
    FailureKind.unauthorized: "The bearer token is missing or wrong",
    FailureKind.too_large: "A body of more than max_request_bytes",
    FailureKind.busy: (
        "No server answers, or the queue is full; Retry-After tells when to try again"
    ),
}
_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    str(kind.status): {"description": text} for kind, text in _ERRORS.items()
}


class Front:
    """ASGI application that serves KServe endpoints and the protocols of a scoring service.

    Attributes:
        is_ready: whether requests are answered; ``/ready`` and KServe's readiness report it.
        scoring: scores the requests; None if there are only KServe endpoints.
        metrics: counts requests and rows.
    """

    def __init__(
        self,
        scoring: ScoringService | None,
        endpoints: Sequence[Endpoint],
        config: FrontConfig,
        token: str | None,
        statistics: Callable[[], Awaitable[Statistics]],
    ) -> None:
        """Build the application.

        Args:
            scoring: scores the requests; None for only KServe endpoints, as for a critic.
            endpoints: KServe endpoints.
            config: address, access and limits.
            token: bearer token that requests need, except for health, readiness and tensor shapes;
                None if no request needs one.
            statistics: returns the counts of each model server by its name, for ``/metrics``.
        """
        self.is_ready = True
        self.scoring = scoring
        self.metrics = FrontMetrics()
        self._config, self._token, self._statistics = config, token, statistics
        self._bodies, self._notices = RequestBodies(config), RequestNotices()
        self._kserve = KServe(endpoints, self._has_rewards, self.metrics.count_request)
        self._routes: dict[str, list[Route[Any]]] = {}
        for route in ROUTES if scoring is not None else ():
            self._routes.setdefault(route.path, []).append(route)
        self._app = self._build_app(scoring)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI application: check its token, then find its route."""
        if scope["type"] != "http":
            return
        # NeMo Gym's rollout prefix is removed first, because _is_open compares the path without it.
        path = gym.ROLLOUT_PREFIX.sub("", scope["path"])
        # HEAD is answered like GET; uvicorn then omits the body.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if path != scope["path"] or method != scope["method"]:
            scope = {**scope, "method": method, "path": path, "raw_path": path.encode()}
        if not self._is_open(scope["method"], path) and not self._has_token(scope):
            await self._refuse_token(path)(scope, receive, send)
        elif self._is_kserve(path):
            await self._answer_kserve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer_kserve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        with self._bodies.reserve() as reader:
            try:
                body = b""
                if scope["method"] == "POST":
                    body = await reader.read(receive, headers)
            except RequestError as error:
                answer = kserve.refuse(error)
            except ServingError as error:
                answer = kserve.refuse(RequestError(one_line(error), FailureKind.bad_request))
            else:
                answer = await self._kserve.answer(scope["method"], scope["path"], headers, body)
        await _send_answer(answer, send)

    def _is_open(self, method: str, path: str) -> bool:
        """Tell whether a request needs no bearer token."""
        if self._token is None or path in _OPEN_PATHS:
            return True
        # These paths are open because clients of Triton read the names and shapes of tensors first,
        # and pytriton's ModelClient sends its headers only with inference requests.
        return method == "GET" and self._is_kserve(path) and not path.endswith("/stats")

    def _is_kserve(self, path: str) -> bool:
        # /v2/rerank belongs to Cohere's protocol, and not to KServe.
        return path == "/v2" or (path.startswith("/v2/") and path not in self._routes)

    async def _probe(self) -> Mapping[str, str | None]:
        """Map the name of each server to why it gives no rewards now, or to None if it does."""
        if not self.is_ready:
            return {}
        return {"local": None} if self.scoring is None else await self.scoring.probe()

    async def _has_rewards(self) -> bool:
        return None in (await self._probe()).values()

    def _has_token(self, scope: Scope) -> bool:
        assert self._token is not None
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        return has_token(sent, self._token)

    def _refuse_token(self, path: str) -> ASGIApp:
        failure = RequestError("the bearer token is missing or wrong", FailureKind.unauthorized)
        self._notices.note_rejection("the server", failure.kind.status, failure.message)
        if self._is_kserve(path):
            answer = kserve.refuse(failure)
            headers = {**answer.headers, "WWW-Authenticate": "Bearer"}
            return Response(answer.body, answer.status, headers)
        if path not in self._routes:
            return respond(refuse_with_detail(failure, None))
        refusal = self._routes[path][0].refuse(failure, None)
        self.metrics.count_request(path, refusal.status, 0.0)
        return respond(refusal)

    def _build_app(self, scoring: ScoringService | None) -> FastAPI:
        app = _App(
            [route for routes in self._routes.values() for route in routes],
            title="nemo_aligner",
            version=nemo_aligner.__version__,
            description="Rewards of a reward model, by several protocols; KServe v2 is at /v2.",
        )
        app.add_exception_handler(404, self._answer_unknown_path)
        app.add_exception_handler(405, self._answer_wrong_method)
        self._add_status_routes(app)
        if scoring is None:
            return app
        for path, routes in self._routes.items():
            summary = "; ".join(route.summary for route in routes)
            app.add_api_route(
                path,
                _RouteHandler(
                    routes,
                    scoring,
                    self._config,
                    self.metrics,
                    self._bodies,
                    self._notices,
                ).handle,
                methods=["POST"],
                summary=summary,
                description=summary,  # FastAPI would otherwise show the handler's docstring
                operation_id=path.strip("/").replace("/", "_"),
                openapi_extra=_describe_routes(routes),
            )
        for plain in PLAIN_ROUTES:
            _add_plain_route(app, plain, self._bodies)
        for model_route in MODEL_ROUTES:
            _add_model_route(app, model_route, scoring, self._config)

        async def contract() -> Response:
            # Read the contract each time, because a backend of the gateway may have been replaced.
            published = (await scoring.read_contract()).to_dict()
            return respond(HttpAnswer(200, {**published, "model_fingerprint": scoring.fingerprint}))

        summary = "The scoring contract: what a reward means"
        _add_get_routes(app, [("/v1/contract", contract, summary)])
        return app

    async def _answer_unknown_path(self, request: Request, error: Exception) -> Response:
        path = request.url.path
        near = suggestion(path, [*self._routes, "/health", "/ready", _METRICS_PATH])
        meant = f"; did you mean {near}?" if near else "."
        reason = f"this server has no such path{meant} GET /docs lists all paths"
        self._notices.note_rejection(shown(path), 404, reason)
        return respond(HttpAnswer(404, {"detail": f"{shown(path)}: {reason}"}))

    async def _answer_wrong_method(self, request: Request, error: Exception) -> Response:
        other = "POST" if request.method == "GET" else "GET"
        path, reason = request.url.path, f"got {request.method}, wanted {other}"
        self._notices.note_rejection(path, 405, reason)
        return respond(HttpAnswer(405, {"detail": f"{path}: {reason}"}))

    def _add_status_routes(self, app: FastAPI) -> None:
        async def ready() -> Response:
            servers = await self._probe()
            status = 200 if None in servers.values() else 503
            states = {
                url: "ready" if reason is None else one_line(reason)
                for url, reason in servers.items()
            }
            state = "ready" if status == 200 else "no backend answers"
            return respond(HttpAnswer(status, {"status": state, "backends": states}), 1)

        async def scrape() -> Response:
            text, kind = self.metrics.render(self.scoring, await self._statistics())
            return Response(text, media_type=kind)

        _add_get_routes(
            app,
            [
                ("/health", _answer_health, "200 while the server runs"),
                ("/ready", ready, "200 while rewards are available, else 503"),
                (_METRICS_PATH, scrape, "For Prometheus"),
            ],
        )


class _App(FastAPI):
    """FastAPI application whose OpenAPI page also describes bodies that this package parses."""

    def __init__(self, protocols: Sequence[Route[Any]], **settings: Any) -> None:
        super().__init__(**settings)
        self._bodies = {body for route in protocols for body in (route.request, route.response)}

    def openapi(self) -> dict[str, Any]:
        """Build the description of the API at the first request for it, and keep it."""
        if self.openapi_schema is None:
            page = super().openapi()
            schemas = page.setdefault("components", {}).setdefault("schemas", {})
            for body in self._bodies:
                schema = body.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")
                schemas.update({**schema.pop("$defs", {}), body.__name__: schema})
        return self.openapi_schema or {}


class _RouteHandler:
    """Handles requests for all routes of a path: parses, scores, and builds answer or error."""

    def __init__(
        self,
        routes: Sequence[Route[Any]],
        scoring: ScoringService,
        config: FrontConfig,
        metrics: FrontMetrics,
        bodies: RequestBodies,
        notices: RequestNotices,
    ) -> None:
        self._route, *self._others = routes
        self._scoring, self._config, self._metrics = scoring, config, metrics
        self._bodies, self._notices = bodies, notices

    async def handle(self, request: Request) -> Response:
        """Answer a request in the form of its route, and count it."""
        begun = time.monotonic()
        with self._bodies.reserve() as reader:
            response = await self._answer(request, reader)
        seconds = time.monotonic() - begun
        self._metrics.count_request(self._route.path, response.status_code, seconds)
        return response

    async def _answer(self, request: Request, reader: BodyReader) -> Response:
        route, body, size = self._route, None, 0
        try:
            content = await reader.read(request.receive, request.headers)
            size = len(content)
            route, body = await call_by_size(size, self._choose_route, content)
            if body is None:
                body = await call_by_size(size, route.parse, content)
            scored = await self._score(route, body, size)
            response = await call_by_size(size, self._respond, route, body, scored)
            self._metrics.count_scored(route.path, scored)
            return response
        except Exception as error:
            failure = public_failure(error)
        # An error answer may repeat the whole body, so that of a large body is built in a thread.
        response = await call_by_size(size, self._refuse, route, failure, body)
        self._notices.note_rejection(route.path, response.status_code, failure.message)
        return response

    def _refuse(self, route: Route[Any], failure: RequestError, body: Any) -> Response:
        return respond(route.refuse(failure, body), failure.retry_after_s)

    def _respond(self, route: Route[Any], body: Any, scored: ScoredRows) -> Response:
        content = route.answer(body, scored, self._describe_model(scored))
        return respond(HttpAnswer(200, content, row_headers(scored)))

    def _choose_route(self, content: bytes) -> tuple[Route[Any], Any]:
        """Choose which protocol's route a body belongs to, if several protocols share its path.

        It is the first route, unless fields that this route does not know are ``marks`` of another.

        Returns:
            The route; and the parsed body if it is the first route, otherwise None.

        Raises:
            ServingError: the first route cannot parse the body, and it has no marks of another
                route.
        """
        try:
            body = self._route.parse(content)
        except ServingError:
            route = self._marked_route(_field_names(content) if self._others else ())
            if route is self._route:
                raise
            return route, None
        route = self._marked_route((body.model_extra or {}).keys())
        return route, body if route is self._route else None

    def _marked_route(self, names: Collection[str]) -> Route[Any]:
        unknown = set(names) - self._route.request.model_fields.keys()
        marked = (other for other in self._others if unknown & set(other.marks))
        return next(marked, self._route)

    async def _score(self, route: Route[Any], body: Any, size: int) -> ScoredRows:
        """Score the samples of a parsed body.

        Args:
            route: the route that the body belongs to.
            body: the body, parsed by ``route.parse``.
            size: its length in bytes; a large body is converted in a thread.

        Raises:
            Exception: any failure, which the caller converts with ``public_failure``.
        """
        request = await call_by_size(size, route.read, body)
        check_num_rows(request, self._config)
        if route.completes_turns:
            request, completed = await self._scoring.complete_turns(request)
            self._metrics.count_rows(route.path, "completed", completed)
        foreign = await self._scoring.find_foreign_rows(request)
        self._metrics.count_rows(route.path, "foreign_template", len(foreign))
        if foreign:
            request = self._note_foreign_rows(route, request, foreign)
        try:
            scored = await self._score_rows(route, request)
            if not foreign:
                return scored
            is_foreign = np.isin(np.arange(len(scored.rewards)), [*foreign])
            return replace(scored, foreign_template=is_foreign)
        except RequestError as refusal:
            if refusal.row is None or route.with_other_reply is None:
                raise
            return await self._blame(refusal, route.with_other_reply(body))

    async def _score_rows(self, route: Route[Any], request: ScoreRequest) -> ScoredRows:
        """Score a request; rows that get ``refused_reward`` have NaN and the reason.

        Only a rejected sample gets it. If a judge or a server fails, the request fails, because the
        trainer can send it again.
        """
        reward = self._config.refused_reward
        scored = await self._scoring.answer(request, route.rows_aside(reward))
        if scored.errors and not route.sets_rows_aside:
            row, status = min(scored.errors), FailureKind.bad_request.status
            message = f"row {row}: {scored.errors[row]}"
            self._notices.note_rejection(route.path, status, message, reward)
        return scored

    def _note_foreign_rows(
        self, route: Route[Any], request: ScoreRequest, foreign: Mapping[int, str]
    ) -> ScoreRequest:
        """Log the first row that is not in the model's chat template.

        Reject such rows if configured.

        Raises:
            RequestError: such rows are rejected, and the answer of this protocol has no place for
                errors of single rows.
        """
        row, fault = next(iter(foreign.items()))
        self._notices.note_template(route.path, row, fault)
        if not self._config.reject_foreign_templates:
            return request
        if not route.sets_rows_aside:
            setting = f"{self._config.section}.reject_foreign_templates"
            text = f"row {row}: {fault} ({setting}). {FOREIGN_ADVICE}"
            raise RequestError(text, FailureKind.bad_request, row=row)
        return request.without_rows(foreign)

    async def _blame(self, refusal: RequestError, other: ScoreRequest) -> ScoredRows:
        """Find out if the prompt or the reply is at fault in a rejected request.

        ``other`` is the same request with a reply that is always valid.

        If ``other`` can be scored, the reply is at fault: return ``refusal`` as the error of row 0.
        Otherwise the prompt is at fault, so raise the error of ``other``.
        """
        scored = await self._scoring.answer(other, NO_ROWS, is_probe=True)
        reason = refusal.message.removeprefix(f"row {refusal.row}: ")
        # The other reply's reward is not used, only the number of attributes, for a row of NaN.
        no_rewards = np.full_like(scored.rewards, np.nan)
        return ScoredRows(no_rewards, {0: reason}, np.zeros(1, dtype=bool))

    def _describe_model(self, scored: ScoredRows) -> Served:
        contract, threshold = self._scoring.contract, self._config.reward_threshold
        refused = self._config.refused_reward
        if contract is not None:
            weights, scale = contract.attribute_weights, contract.reward_scale
            return Served(MODEL_NAME, contract.attributes, weights, threshold, scale, refused)
        # No contract: a backend that runs NVIDIA's NeMo-Aligner publishes none, so the attributes
        # have no names.
        columns = scored.rewards.shape[1]
        names = ["reward"] if columns == 1 else [f"reward_{column}" for column in range(columns)]
        return Served(MODEL_NAME, names, None, threshold, refused_reward=refused)


def _field_names(content: bytes) -> Collection[str]:
    """Return the keys of a JSON object; empty for another value, or for invalid JSON."""
    try:
        value = from_json(content)
    except ValueError:
        return ()
    return value.keys() if isinstance(value, dict) else ()


async def _send_answer(answer: KServeAnswer, send: Send) -> None:
    headers = [
        (b"content-length", str(len(answer.body)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in answer.headers.items()),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def respond(answer: HttpAnswer, retry_after_s: float | None = None) -> Response:
    """Build a JSON response.

    A status 503 gets the header ``Retry-After: retry_after_s``, unless that is None.
    """
    headers = dict(answer.headers)
    if retry_after_s is not None and answer.status == 503:
        headers["Retry-After"] = str(retry_after_s)
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    content = to_json(answer.content, inf_nan_mode="constants")
    return Response(content, answer.status, headers, "application/json")


async def _respond_or_refuse(work: Awaitable[Response]) -> Response:
    """Await the answer of a route that returns no rewards; if it raises, build an error answer."""
    try:
        return await work
    except Exception as error:
        failure = public_failure(error)
        return respond(refuse_with_detail(failure, None), failure.retry_after_s)


async def _answer_health() -> Response:
    return respond(HttpAnswer(200, {"status": "ok"}))


def _add_plain_route(app: FastAPI, route: PlainRoute, bodies: RequestBodies) -> None:
    async def answer(request: Request) -> Response:
        with bodies.reserve() as reader:
            body = await reader.read(request.receive, request.headers)
            if route.is_slow:
                return await asyncio.to_thread(lambda: respond(route.answer(body)))
            return respond(await call_by_size(len(body), route.answer, body))

    async def handle(request: Request) -> Response:
        return await _respond_or_refuse(answer(request))

    _add_route(app, route.path, handle, route.summary, route.method)


def _add_model_route(
    app: FastAPI, route: ModelRoute, scoring: ScoringService, config: FrontConfig
) -> None:
    async def answer() -> Response:
        return respond(route.answer(await scoring.find_contract(), config))

    async def handle() -> Response:
        return await _respond_or_refuse(answer())

    _add_route(app, route.path, handle, route.summary)


def _add_get_routes(
    app: FastAPI, routes: Sequence[tuple[str, Callable[[], Awaitable[Response]], str]]
) -> None:
    def with_errors(work: Callable[[], Awaitable[Response]]) -> Callable[[], Awaitable[Response]]:
        @wraps(work)  # wraps: FastAPI uses the function's name
        async def handle() -> Response:
            return await _respond_or_refuse(work())

        return handle

    for path, work, summary in routes:
        _add_route(app, path, with_errors(work), summary)


def _add_route(
    app: FastAPI,
    path: str,
    handle: Callable[..., Awaitable[Response]],
    summary: str,
    method: str = "GET",
) -> None:
    app.add_api_route(
        path,
        handle,
        methods=[method],
        summary=summary,
        response_model=None,
        response_class=PlainTextResponse if path == _METRICS_PATH else JSONResponse,
        responses=_ERROR_RESPONSES,
    )


def _describe_routes(routes: Sequence[Route[Any]]) -> dict[str, Any]:
    """Describe bodies and answers of a path's routes for the OpenAPI page."""

    def content(bodies: Sequence[type]) -> dict[str, Any]:
        schemas = [{"$ref": f"{_SCHEMAS}{body.__name__}"} for body in bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        return {"application/json": {"schema": schema}}

    requests = content([route.request for route in routes])
    answers = content([route.response for route in routes])
    return {
        "requestBody": {"required": True, "content": requests},
        "responses": {
            "200": {"description": "Scored", "content": answers},
            **_ERROR_RESPONSES,
        },
    }
