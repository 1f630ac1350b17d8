"""The gateway: its protocols as a FastAPI application, and uvicorn around it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic_core import from_json, to_json
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

import nemo_aligner
from nemo_aligner.config.serving import GatewayConfig
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.failures import FailureKind, RequestError, public_failure
from nemo_aligner.serving.gateway_metrics import GatewayMetrics
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
    too_large,
    unpack_body,
)
from nemo_aligner.serving.protocols.kserve import MODEL_NAME
from nemo_aligner.serving.tokens import has_token
from nemo_aligner.serving.triton import ready_file
from nemo_aligner.serving.upstream import FOREIGN_ADVICE, UpstreamService, unreachable
from nemo_aligner.utils.errors import ServingError, one_line

# Every protocol that the gateway speaks has its line here.
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

# Probes of Kubernetes and load balancers send no token.
_OPEN_PATHS = ("/health", "/ready")
_SCHEMAS = "#/components/schemas/"
# For the OpenAPI page; 500 is not on it, as no client should expect one.
_ERRORS = {
    FailureKind.bad_request: "A body that cannot be read, or a text that cannot be scored",
    FailureKind.unauthorized: "The bearer token is missing or wrong",
    FailureKind.too_large: "A body of more than gateway.max_request_bytes",
    FailureKind.busy: (
        "No backend answers, or the queue is full; Retry-After says when to come again"
    ),
}

Handler = Callable[[Request], Awaitable[Response]]


def build_app(client: RewardClient, config: GatewayConfig, token: str | None) -> ASGIApp:
    """Build the application; with a ``token``, every path but health and readiness needs it.

    It ends the client when all is answered.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        startup_check = asyncio.ensure_future(upstream.say_missing_backends())
        yield
        startup_check.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await startup_check
        finally:
            await client.aclose()

    app = _App(
        ROUTES,
        lifespan=lifespan,
        title="nemo_aligner gateway",
        version=nemo_aligner.__version__,
        description="Rewards of a reward model, by several protocols.",
    )
    # One for all routes: the limit of rows in flight, and the drift, are of all protocols together.
    upstream = UpstreamService(client, config)
    metrics = GatewayMetrics()
    at_path: dict[str, list[Route[Any]]] = {}
    for route in ROUTES:
        at_path.setdefault(route.path, []).append(route)
    for path, several in at_path.items():
        about = "; ".join(route.about for route in several)
        app.add_api_route(
            path,
            _Endpoint(several, upstream, config, metrics).handle,
            methods=["POST"],
            summary=about,
            description=about,  # else the handler's docstring is on the page
            operation_id=path.strip("/").replace("/", "_"),
            openapi_extra=_described(several),
        )
    for plain in PLAIN_ROUTES:
        _add_plain_route(app, plain, config.max_request_bytes)
    for of_model in MODEL_ROUTES:
        _add_model_route(app, of_model, upstream, config)
    _add_own_routes(app, upstream, client, metrics)
    first = {path: several[0] for path, several in at_path.items()}
    return _Plain(app if token is None else _Guarded(app, token, first, metrics))


class _App(FastAPI):
    """FastAPI whose OpenAPI page has the protocols' bodies, which it neither reads nor knows."""

    def __init__(self, protocols: Sequence[Route[Any]], **settings: Any) -> None:
        super().__init__(**settings)
        self._bodies = {model for each in protocols for model in (each.request, each.response)}

    def openapi(self) -> dict[str, Any]:
        """The page, made at the first request for it."""
        if self.openapi_schema is None:
            page = super().openapi()
            schemas = page.setdefault("components", {}).setdefault("schemas", {})
            for model in self._bodies:
                schema = model.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")
                schemas.update({**schema.pop("$defs", {}), model.__name__: schema})
        return self.openapi_schema or {}


class _Endpoint:
    """Handler of a path's routes: body, request, rewards and answer, or a route's own failure."""

    def __init__(
        self,
        routes: Sequence[Route[Any]],
        upstream: UpstreamService,
        config: GatewayConfig,
        metrics: GatewayMetrics,
    ) -> None:
        self._route, *self._others = routes
        self._upstream, self._config, self._metrics = upstream, config, metrics
        self._foreign_paths: set[str] = set()

    async def handle(self, request: Request) -> Response:
        """Answer by the route's protocol, and count the answer."""
        begun = time.monotonic()
        answer, retry_after_s = await self._answer(request)
        seconds = time.monotonic() - begun
        self._metrics.answered(self._route.path, answer.status, seconds)
        return respond(answer, retry_after_s)

    async def _answer(self, request: Request) -> tuple[HttpAnswer, float | None]:
        route, body = self._route, None
        try:
            content = await _read(request, self._config.max_request_bytes)
            route, body = self._route_of(content)
            if body is None:
                body = route.parse(content)
            scored = await self._score(route, body)
            content = route.answer(body, scored, self._served(scored))
            self._metrics.scored(route.path, scored)
            return HttpAnswer(200, content, row_headers(scored)), None
        except Exception as error:
            failure = public_failure(error)
        return route.refuse(failure, body), failure.retry_after_s

    def _route_of(self, content: bytes) -> tuple[Route[Any], Any]:
        """The path's first route, unless fields that it does not know mark another one's body.

        Returns:
            The route, and the body if the first route has read it; None if another one is to.

        Raises:
            ServingError: the first route cannot read it, and it is no other one's.
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

    async def _score(self, route: Route[Any], body: Any) -> ScoredRows:
        """Have the backends score a body.

        Raises:
            Exception: any failure of it; see ``public_failure``.
        """
        asked = route.read(body)
        if route.completes_turns:
            asked, completed = await self._upstream.complete_turns(asked)
            self._metrics.count_rows(route.path, "completed", completed)
        foreign = await self._upstream.find_foreign_rows(asked)
        self._metrics.count_rows(route.path, "foreign_template", len(foreign))
        if foreign:
            asked = self._note_foreign_rows(route, asked, foreign)
        try:
            scored = await self._upstream.answer(asked, route.sets_rows_aside)
            if not foreign:
                return scored
            is_foreign = np.isin(np.arange(len(scored.rewards)), [*foreign])
            return replace(scored, foreign_template=is_foreign)
        except RequestError as refusal:
            if refusal.row is None or route.with_other_reply is None:
                raise
            return await self._whose_fault(refusal, route.with_other_reply(body))

    def _note_foreign_rows(
        self, route: Route[Any], request: ScoreRequest, foreign: Mapping[int, str]
    ) -> ScoreRequest:
        """Log rows that are in another chat template, once a route, and reject them if asked to.

        Raises:
            RequestError: they are rejected, and the route sets no rows aside.
        """
        row, fault = next(iter(foreign.items()))
        if route.path not in self._foreign_paths:
            self._foreign_paths.add(route.path)
            print(
                f"Warning: {route.path}: {len(foreign)} of {request.num_rows} texts are not "
                f"written in the model's chat template; row {row}: {fault}. {FOREIGN_ADVICE}. "
                "The metrics count the further ones (foreign_template)",
                flush=True,
            )
        if not self._config.reject_foreign_templates:
            return request
        if not route.sets_rows_aside:
            text = f"row {row}: {fault} (gateway.reject_foreign_templates). {FOREIGN_ADVICE}"
            raise RequestError(text, FailureKind.bad_request, row=row)
        return request.without_rows(foreign)

    async def _whose_fault(self, refusal: RequestError, other: ScoreRequest) -> ScoredRows:
        """Ask with another reply: the refusal becomes a row's error, or the prompt's failure."""
        found = await self._upstream.answer(other, False, is_probe=True)
        reason = refusal.message.removeprefix(f"row {refusal.row}: ")
        # The reward of the other reply says how many attributes there are, and is not used.
        nothing = np.full_like(found.rewards, np.nan)
        return ScoredRows(nothing, {0: reason}, np.zeros(1, dtype=bool))

    def _served(self, scored: ScoredRows) -> Served:
        contract, threshold = self._upstream.contract, self._config.reward_threshold
        if contract is not None:
            weights, scale = contract.attribute_weights, contract.reward_scale
            return Served(MODEL_NAME, contract.attributes, weights, threshold, scale)
        # A backend of NeMo-Aligner, which publishes no contract with the names of its attributes.
        columns = scored.rewards.shape[1]
        names = ["reward"] if columns == 1 else [f"reward_{column}" for column in range(columns)]
        return Served(MODEL_NAME, names, None, threshold)


def _field_names(content: bytes) -> Collection[str]:
    """Names of a JSON object's fields; none of another value, or of what is no JSON."""
    try:
        value = from_json(content)
    except ValueError:
        return ()
    return value.keys() if isinstance(value, dict) else ()


async def _read(request: Request, most: int) -> bytes:
    """Read the body, unpacked, and no more of it than is allowed.

    Raises:
        RequestError: it has more bytes than ``most``, or its sender leaves before it is whole.
        ServingError: see ``unpack_body``.
    """
    # The header spares reading a body that says its size; one in chunks has none, or may lie.
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > most:
        raise too_large(most)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise too_large(most)
            parts.append(part)
    except ClientDisconnect as error:
        raise RequestError("the body is not whole", FailureKind.bad_request) from error
    return unpack_body(b"".join(parts), request.headers.get("content-encoding", ""), most)


def respond(answer: HttpAnswer, retry_after_s: float | None = None) -> Response:
    """Make a JSON response; a 503 gets ``Retry-After``."""
    headers = dict(answer.headers)
    if retry_after_s is not None and answer.status == 503:
        headers["Retry-After"] = str(retry_after_s)
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    content = to_json(answer.content, inf_nan_mode="constants")
    return Response(content, answer.status, headers, "application/json")


class _Plain:
    """Middleware that removes the prefix of NeMo Gym's observed rollouts from paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Before the token is asked for: routes, and the paths that need none, are known without it.
        path = gym.OF_ROLLOUT.sub("", scope["path"]) if scope["type"] == "http" else None
        if path is not None and path != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


class _Guarded:
    """Middleware that asks for a bearer token before anything of a request is read."""

    def __init__(
        self, app: ASGIApp, token: str, routes: dict[str, Route[Any]], metrics: GatewayMetrics
    ) -> None:
        self._app, self._routes, self._metrics = app, routes, metrics
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._has_token(scope):
            await self._app(scope, receive, send)
            return
        failure = RequestError("the bearer token is missing or wrong", FailureKind.unauthorized)
        route = self._routes.get(scope["path"])
        if route is None:
            answer = refuse_with_detail(failure, None)
        else:
            answer = route.refuse(failure, None)
            self._metrics.answered(route.path, answer.status, 0.0)
        await respond(answer)(scope, receive, send)

    def _has_token(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        return has_token(sent, self._token)


async def _answered(answer: Awaitable[Response]) -> Response:
    """An answer that is no protocol's, or why there is none."""
    try:
        return await answer
    except Exception as error:
        failure = public_failure(error)
        return respond(refuse_with_detail(failure, None), failure.retry_after_s)


def _add_plain_route(app: FastAPI, route: PlainRoute, max_request_bytes: int) -> None:
    async def answer(request: Request) -> Response:
        return respond(route.answer(await _read(request, max_request_bytes)))

    async def handle(request: Request) -> Response:
        return await _answered(answer(request))

    about, method = route.about, route.method
    app.add_api_route(route.path, handle, methods=[method], summary=about, response_model=None)


def _add_model_route(
    app: FastAPI, route: ModelRoute, upstream: UpstreamService, config: GatewayConfig
) -> None:
    async def answer() -> Response:
        try:
            contract = await upstream.find_contract()
        except ServingError as error:
            raise unreachable(error) from error
        return respond(route.answer(contract, config))

    async def handle() -> Response:
        return await _answered(answer())

    about = route.about
    app.add_api_route(route.path, handle, methods=["GET"], summary=about, response_model=None)


def _add_own_routes(
    app: FastAPI, upstream: UpstreamService, client: RewardClient, metrics: GatewayMetrics
) -> None:
    async def health() -> Response:
        return respond(HttpAnswer(200, {"status": "ok"}))

    async def ready() -> Response:
        backends = await client.probe_async()
        status = 200 if None in backends.values() else 503
        words = {url: "ready" if why is None else one_line(why) for url, why in backends.items()}
        content = {"status": "ready" if status == 200 else "no backend answers", "backends": words}
        return respond(HttpAnswer(status, content), 1)

    async def contract() -> Response:
        # Asked anew each time, as a backend may have been replaced since the last reward.
        try:
            return respond(HttpAnswer(200, (await upstream.ask_contract()).to_dict()))
        except ServingError as error:
            raise unreachable(error) from error

    async def scrape() -> Response:
        # The backends' own counts come with the gateway's: Triton's metrics have none of ours.
        text, kind = metrics.render(upstream, await client.statistics_async())
        return Response(text, media_type=kind)

    own: list[tuple[str, Callable[[], Awaitable[Response]], str]] = [
        ("/v1/contract", contract, "The scoring contract: what a reward means"),
        ("/health", health, "200 while the gateway runs"),
        ("/ready", ready, "200 while a backend answers, else 503"),
        ("/metrics", scrape, "For Prometheus"),
    ]

    def answering(work: Callable[[], Awaitable[Response]]) -> Callable[[], Awaitable[Response]]:
        @wraps(work)  # the OpenAPI page calls it by this name
        async def handle() -> Response:
            return await _answered(work())

        return handle

    for path, work, about in own:
        handle = answering(work)
        app.add_api_route(path, handle, methods=["GET"], summary=about, response_model=None)


def _described(routes: Sequence[Route[Any]]) -> dict[str, Any]:
    """Body and answers of a path's routes for the OpenAPI page (``_App``)."""

    def content(bodies: Sequence[type]) -> dict[str, Any]:
        schemas = [{"$ref": f"{_SCHEMAS}{body.__name__}"} for body in bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        return {"application/json": {"schema": schema}}

    asked, answered = ([getattr(each, side) for each in routes] for side in ("request", "response"))
    return {
        "requestBody": {"required": True, "content": content(asked)},
        "responses": {
            "200": {"description": "Scored", "content": content(answered)},
            **{str(kind.status): {"description": about} for kind, about in _ERRORS.items()},
        },
    }


# uvicorn: socket, TLS and shutdown.

_WAITING_CONNECTIONS = 2048  # as uvicorn's own sockets have it


def open_socket(config: GatewayConfig) -> socket.socket:
    """Open the socket that the gateway listens on.

    Raises:
        ServingError: the port is taken, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server(
            (config.host, config.port), family=family, backlog=_WAITING_CONNECTIONS
        )
    except OSError as error:
        raise ServingError(
            f"gateway.port: {config.host}:{config.port} is not free: {error}"
        ) from error


def run_app(app: ASGIApp, listening: socket.socket, config: GatewayConfig) -> int:
    """Answer requests until SIGTERM or SIGINT, then what is in flight; the exit code.

    Raises:
        ServingError: the certificate or its key cannot be used.
    """
    try:
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ssl_certfile=config.certificate_file,
            ssl_keyfile=config.key_file,
            timeout_graceful_shutdown=config.exit_timeout_secs,
            timeout_keep_alive=config.keep_alive_secs,
            server_header=False,
        )
        settings.load()  # here a certificate that cannot be used ends the start
    except OSError as error:  # ssl's errors are among them
        files = f"{config.certificate_file}, {config.key_file}"
        raise ServingError(f"gateway.certificate_file, key_file: {files}: {error}") from error
    url = _url(listening, config)
    with closing(listening), _ends_quietly():
        server = _Gateway(settings, url, config.ready_file)
        server.run(sockets=[listening])
    print("Stopped", flush=True)
    return 0


def _url(listening: socket.socket, config: GatewayConfig) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.certificate_file is None else "https"
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


class _Gateway(uvicorn.Server):
    """uvicorn's server, which says when it answers and when it drains."""

    def __init__(self, settings: uvicorn.Config, url: str, ready: str | None) -> None:
        super().__init__(settings)
        self._url, self._ready = url, ready

    async def main_loop(self) -> None:
        """Until it shall stop."""
        with ready_file(self._ready, self._url):
            print(f"Gateway at {self._url} (pid {os.getpid()})", flush=True)
            await super().main_loop()
        print("Draining: in-flight requests are answered, new ones are refused", flush=True)


@contextmanager
def _ends_quietly() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again once it has drained; the exit code is 0."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
