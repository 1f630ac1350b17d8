"""The HTTP front as an ASGI application: every protocol on one port, for any scoring service.

A request passes three checks in this order: the limits of its connection (``connection.py``, before
anything is read), the bearer token, and the route. KServe v2 is answered by ``kserve.py``. FastAPI
has the routes of all other protocols (``serving/protocols/``), health, metrics and OpenAPI. All of
them also exist under ``/models/NAME``, for one of several models.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette import routing
from starlette.types import ASGIApp, Receive, Scope, Send

import nemo_aligner
from nemo_aligner.config.describe import suggestion
from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.serving.endpoints import Endpoint, call_by_size
from nemo_aligner.serving.failures import FailureKind, RequestError, failure_of, public_failure
from nemo_aligner.serving.front import kserve
from nemo_aligner.serving.front.bodies import RequestBodies
from nemo_aligner.serving.front.kserve import KServe, KServeAnswer
from nemo_aligner.serving.front.metrics import FrontMetrics, Statistics
from nemo_aligner.serving.front.models import HostedModel, HostedModels
from nemo_aligner.serving.front.notices import RequestNotices
from nemo_aligner.serving.front.routes import MODEL_IN_SCOPE, RouteHandler, model_of, respond
from nemo_aligner.serving.protocols import (
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
    refuse_with_detail,
)
from nemo_aligner.serving.protocols.kserve import split_model_path
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

_REWARD_PATHS = (
    "Rewards are at /v1/rewards, and at a trainer's own path, such as /get_reward (OpenRLHF) or "
    "/remote_rm (slime)."
)


class Front:
    """ASGI application that serves KServe endpoints and the protocols of scoring services.

    Attributes:
        is_ready: whether requests are answered; ``/ready`` and KServe's readiness report it.
        models: the models that score requests; empty if there are only KServe endpoints.
        metrics: counts requests and rows.
    """

    def __init__(
        self,
        models: Sequence[HostedModel],
        endpoints: Sequence[Endpoint],
        config: FrontConfig,
        token: str | None,
        statistics: Callable[[], Awaitable[Statistics]],
        probes: Sequence[Callable[[], Awaitable[Mapping[str, str | None]]]] = (),
    ) -> None:
        """Build the application.

        Args:
            models: the models that score requests, the main one first; empty for a critic.
            endpoints: KServe endpoints outside ``/models/NAME``.
            config: address, access and limits.
            token: bearer token that requests need, except for health, readiness and tensor shapes;
                None if no request needs one.
            statistics: returns the counts of each model server by its name, for ``/metrics``.
            probes: if there are no models, the ``probe`` of each service, for the readiness.
        """
        self.is_ready = True
        self.models = HostedModels(models)
        self.metrics = FrontMetrics()
        self._config, self._token, self._statistics = config, token, statistics
        self._probes = [model.scoring.probe for model in models] or probes
        self._bodies, self._notices = RequestBodies(config), RequestNotices()
        self._kserve = KServe(endpoints, self._has_rewards, self.metrics.count_request)
        self._kserve_of = {model.name: self._build_kserve(model) for model in models}
        self._routes: dict[str, list[Route[Any]]] = {}
        for route in ROUTES if models else ():
            self._routes.setdefault(route.path, []).append(route)
        self._app = self._build_app()
        # Path -> methods of its routes, without HEAD.
        self._methods: dict[str, set[str]] = {}
        for mounted in self._app.routes:
            if isinstance(mounted, routing.Route):
                methods = self._methods.setdefault(mounted.path, set())
                methods.update((mounted.methods or set()) - {"HEAD"})

    def _build_kserve(self, model: HostedModel) -> KServe:
        def count_request(path: str, status: int, seconds: float) -> None:
            self.metrics.count_request(model.name_route(path), status, seconds)

        return KServe(model.endpoints, self._has_rewards, count_request)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI application: check its token, then find its route."""
        if scope["type"] != "http":
            return
        # The checks below compare the path without the prefixes of the model and of NeMo Gym's
        # rollout, which come in either order.
        outer = gym.ROLLOUT_PREFIX.sub("", scope["path"])
        name, path = split_model_path(outer)
        if outer == scope["path"]:
            path = gym.ROLLOUT_PREFIX.sub("", path)
        # FastAPI's routes begin after root_path, and its page /docs uses it to find /openapi.json.
        prefix = scope["path"].removesuffix(path)
        # HEAD is answered like GET; uvicorn then omits the body.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if prefix or method != scope["method"]:
            scope = {**scope, "method": method, "root_path": prefix}
        try:
            if not self._is_open(method, path) and not self._has_token(scope):
                text = "the bearer token is missing or wrong"
                raise RequestError(text, FailureKind.unauthorized)
            if name is not None:
                scope = {**scope, MODEL_IN_SCOPE: self.models[name]}
        except RequestError as failure:
            await self._refuse(name, path, failure)(scope, receive, send)
            return
        if self._is_kserve(path):
            await self._answer_kserve({**scope, "path": path}, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer_kserve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        offered, path = self._kserve_at(scope.get(MODEL_IN_SCOPE)), scope["path"]
        begun = time.monotonic()
        with self._bodies.reserve(path) as reader:
            try:
                body = b""
                if scope["method"] == "POST":
                    body = await reader.read(receive, headers)
            except ServingError as error:
                answer = kserve.refuse(failure_of(error))
                offered.count_rejection(path, answer.status, time.monotonic() - begun)
            else:
                answer = await offered.answer(scope["method"], path, headers, body)
        await _send_answer(answer, send)

    def _kserve_at(self, model: HostedModel | None) -> KServe:
        """Return the endpoints under ``/models/NAME``; None: those at the root."""
        return self._kserve if model is None else self._kserve_of[model.name]

    def _is_open(self, method: str, path: str) -> bool:
        """Return whether a request needs no bearer token."""
        if self._token is None or path in _OPEN_PATHS:
            return True
        # These paths are open because clients of Triton read the names and shapes of tensors first,
        # and pytriton's ModelClient sends its headers only with inference requests.
        return method == "GET" and self._is_kserve(path) and not path.endswith("/stats")

    def _is_kserve(self, path: str) -> bool:
        # /v2/rerank belongs to Cohere's protocol, not to KServe, even with a slash too many.
        is_other = path.rstrip("/") in self._routes
        return path == "/v2" or (path.startswith("/v2/") and not is_other)

    async def _probe(self) -> Mapping[str, str | None]:
        """Map the name of each server to why it gives no answers now, or to None if it does."""
        if not self.is_ready:
            return {}
        # Probe all at the same time, because one model's backends may be slow to answer.
        probed = await asyncio.gather(*(probe() for probe in self._probes))
        return {name: reason for states in probed for name, reason in states.items()}

    async def _has_rewards(self) -> bool:
        return None in (await self._probe()).values()

    def _has_token(self, scope: Scope) -> bool:
        assert self._token is not None
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        return has_token(sent, self._token)

    def _refuse(self, name: str | None, path: str, failure: RequestError) -> ASGIApp:
        """Reject a request whose token or model is wrong; ``name`` is the model that it names.

        It is counted unless its model or path is unknown.
        """
        model = None if name is None else self.models.find(name)
        is_known = name is None or model is not None
        self._notices.note_rejection("the server", failure.kind.status, failure.message)
        if self._is_kserve(path):
            answer, headers = kserve.refuse(failure), {}
            if failure.kind is FailureKind.unauthorized:
                headers = {"WWW-Authenticate": "Bearer"}
            if is_known:
                self._kserve_at(model).count_rejection(path, answer.status, 0.0)
            return Response(answer.body, answer.status, {**answer.headers, **headers})
        if path not in self._routes:
            return respond(refuse_with_detail(failure, None))
        refusal = self._routes[path][0].refuse(failure, None)
        if is_known:
            route = self.models.choose(None, model).name_route(path)
            self.metrics.count_request(route, refusal.status, 0.0)
        return respond(refusal)

    def _build_app(self) -> FastAPI:
        all_routes = [route for routes in self._routes.values() for route in routes]
        app = _App(
            all_routes,
            title="nemo_aligner",
            version=nemo_aligner.__version__,
            description="Rewards of a reward model, by several protocols; KServe v2 is at /v2.",
            # Relative to /openapi.json, so that a page under /models/NAME tries out that model.
            servers=[{"url": "."}],
            root_path_in_servers=False,
            # A redirect would lead a client that posts again to a path without the prefix
            # /models/NAME, and thus to another model.
            redirect_slashes=False,
        )
        app.add_exception_handler(404, self._answer_unknown_path)
        app.add_exception_handler(405, self._answer_wrong_method)
        self._add_status_routes(app)
        if not self._routes:
            return app
        for path, routes in self._routes.items():
            summary = "; ".join(route.summary for route in routes)
            app.add_api_route(
                path,
                RouteHandler(
                    routes,
                    self.models,
                    self._config,
                    self.metrics,
                    self._bodies,
                    self._notices,
                    all_routes,
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
            _add_model_route(app, model_route, self.models, self._config)

        async def contract(request: Request) -> Response:
            scoring = self.models.choose(None, model_of(request)).scoring
            # Read the contract each time, because a backend of the gateway may have been replaced.
            published = (await scoring.read_contract()).to_dict()
            return respond(HttpAnswer(200, {**published, "model_fingerprint": scoring.fingerprint}))

        async def handle(request: Request) -> Response:
            return await _respond_or_refuse(contract(request))

        _add_route(app, "/v1/contract", handle, "The scoring contract: what a reward means")
        return app

    async def _answer_unknown_path(self, request: Request, error: Exception) -> Response:
        prefix, path = request.scope.get("root_path", ""), _route_path(request)
        near = suggestion(path, self._methods)
        meant = f"; did you mean {prefix}{near}?" if near else "."
        if not near and self._routes:
            meant = f". {_REWARD_PATHS}"
        reason = f"this server has no such path{meant} GET /docs lists all paths"
        self._notices.note_unknown_path(shown(_logged_path(request)), reason)
        return respond(HttpAnswer(404, {"detail": f"{shown(prefix + path)}: {reason}"}))

    async def _answer_wrong_method(self, request: Request, error: Exception) -> Response:
        methods = self._methods[_route_path(request)]
        reason = f"got {request.method}, wanted {' or '.join(sorted(methods))}"
        self._notices.note_rejection(_logged_path(request), 405, reason)
        detail = {"detail": f"{request.scope['path']}: {reason}"}
        return respond(HttpAnswer(405, detail, kserve.build_allow_header(methods)))

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
            text, kind = self.metrics.render(self.models, await self._statistics())
            return Response(text, media_type=kind)

        _add_get_routes(
            app,
            [
                ("/health", _answer_health, "200 while the server runs"),
                ("/ready", ready, "200 while rewards are available, else 503"),
                (_METRICS_PATH, scrape, "For Prometheus"),
            ],
        )


def _route_path(request: Request) -> str:
    """Return the path of a request without the prefixes of its model and rollout."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))


def _logged_path(request: Request) -> str:
    """Return the path of a request without its rollout's prefix, which differs for each rollout."""
    model = model_of(request)
    path = _route_path(request)
    return path if model is None else f"/models/{model.name}{path}"


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


async def _send_answer(answer: KServeAnswer, send: Send) -> None:
    headers = [
        (b"content-length", str(len(answer.body)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in answer.headers.items()),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


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
        with bodies.reserve(route.path) as reader:
            body = await reader.read(request.receive, request.headers)
            if route.is_slow:
                return await asyncio.to_thread(lambda: respond(route.answer(body)))
            return respond(await call_by_size(len(body), route.answer, body))

    async def handle(request: Request) -> Response:
        return await _respond_or_refuse(answer(request))

    _add_route(app, route.path, handle, route.summary, route.method)


def _add_model_route(
    app: FastAPI, route: ModelRoute, models: HostedModels, config: FrontConfig
) -> None:
    async def answer(request: Request) -> Response:
        chosen = model_of(request)
        described = models if chosen is None else [chosen]
        contracts = {model.name: await model.scoring.find_contract() for model in described}
        return respond(route.answer(contracts, config))

    async def handle(request: Request) -> Response:
        return await _respond_or_refuse(answer(request))

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
