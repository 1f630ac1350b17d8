"""Handle requests to the protocols' routes: parse a body, score it, and build answer or error."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import Request, Response
from pydantic_core import from_json, to_json

from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.serving.endpoints import call_by_size
from nemo_aligner.serving.failures import NO_ROWS, FailureKind, RequestError, public_failure
from nemo_aligner.serving.front.bodies import BodyReader, RequestBodies
from nemo_aligner.serving.front.metrics import FrontMetrics
from nemo_aligner.serving.front.models import HostedModel, HostedModels
from nemo_aligner.serving.front.notices import RequestNotices
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.protocols.base import HttpAnswer, Route, Served, row_headers
from nemo_aligner.serving.scoring import check_num_rows
from nemo_aligner.utils.errors import ServingError

# Key of a request's ASGI scope with the ``HostedModel`` that its path names.
MODEL_IN_SCOPE = "nemo_aligner.model"


class _ForeignTemplateError(RequestError):
    """A sample in another chat template, which is rejected even with a ``refused_reward``."""


class RouteHandler:
    """Handles requests for all routes of a path: parses, scores, and builds answer or error."""

    def __init__(
        self,
        routes: Sequence[Route[Any]],
        models: HostedModels,
        config: FrontConfig,
        metrics: FrontMetrics,
        bodies: RequestBodies,
        notices: RequestNotices,
        all_routes: Sequence[Route[Any]],
    ) -> None:
        self._route, *self._others = routes
        self._all_routes = all_routes
        self._models, self._config, self._metrics = models, config, metrics
        self._bodies, self._notices = bodies, notices

    async def handle(self, request: Request) -> Response:
        """Answer a request in the form of its route, and count it."""
        begun = time.monotonic()
        with self._bodies.reserve(self._route.path) as reader:
            model, response = await self._answer(request, reader)
        path, seconds = model.name_route(self._route.path), time.monotonic() - begun
        self._metrics.count_request(path, response.status_code, seconds)
        return response

    async def _answer(self, request: Request, reader: BodyReader) -> tuple[HostedModel, Response]:
        route, body, content, size = self._route, None, b"", 0
        of_path = model_of(request)
        model = self._models.choose(None, of_path)
        try:
            content = await reader.read(request.receive, request.headers)
            size = len(content)
            route, body = await call_by_size(size, self._choose_route, content)
            if body is None:
                body = await call_by_size(size, route.parse, content)
            # Bodies keep undeclared fields, so every protocol may name a model.
            model = self._models.choose(getattr(body, "model", None), of_path)
            scored = await self._score(model, route, body, size)
            served = self._describe_model(model, scored)
            response = await call_by_size(size, _respond, route, body, scored, served)
            self._metrics.count_scored(model.name_route(route.path), scored)
            return model, response
        except Exception as error:
            failure = public_failure(error)
        if body is None:
            failure = await call_by_size(size, self._name_other_route, failure, content)
        # An error answer may repeat the whole body, so if that is large, build it in a thread.
        response = await call_by_size(size, _refuse, route, failure, body)
        path = model.name_route(route.path)
        advice = ""
        is_foreign = isinstance(failure, _ForeignTemplateError)
        may_help = self._config.refused_reward is None and not is_foreign
        if failure.row is not None and route.takes_refused_reward and may_help:
            advice = (
                f". With {self._config.section}.refused_reward the sample would get that reward"
            )
        self._notices.note_rejection(path, response.status_code, failure.message + advice)
        return model, response

    def _name_other_route(self, failure: RequestError, content: bytes) -> RequestError:
        """Add to the failure of an unreadable body the route that has such fields, if one has."""
        names = set(_field_names(content))
        fitting = [route for route in self._all_routes if _takes_fields(route, names)]
        if not fitting or self._route.path in {route.path for route in fitting}:
            return failure
        text = f"{failure.message}. A body with these fields belongs to {fitting[0].path}"
        return RequestError(text, failure.kind, failure.retry_after_s, failure.row)

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
        marked = (route for route in self._others if unknown & set(route.marks))
        return next(marked, self._route)

    async def _score(
        self, model: HostedModel, route: Route[Any], body: Any, size: int
    ) -> ScoredRows:
        """Score the samples of a parsed body.

        Args:
            model: the model that scores them.
            route: the route that the body belongs to.
            body: the body, parsed by ``route.parse``.
            size: its length in bytes; a large body is converted in a thread.

        Raises:
            Exception: any failure, which the caller converts with ``public_failure``.
        """
        request = await call_by_size(size, self._read_samples, route, body)
        if route.completes_turns:
            request, completed = await model.scoring.complete_turns(request)
            self._metrics.count_rows(model.name_route(route.path), "completed", completed)
        foreign = await model.scoring.find_foreign_rows(request)
        self._metrics.count_rows(model.name_route(route.path), "foreign_template", len(foreign))
        if foreign:
            request = self._note_foreign_rows(model, route, request, foreign)
        try:
            scored = await self._score_rows(model, route, request)
            if not foreign:
                return scored
            is_foreign = np.isin(np.arange(len(scored.rewards)), [*foreign])
            return replace(scored, foreign_template=is_foreign)
        except RequestError as refusal:
            if refusal.row is None or route.with_other_reply is None:
                raise
            return await _blame(model, refusal, route.with_other_reply(body))

    def _read_samples(self, route: Route[Any], body: Any) -> ScoreRequest:
        """Read the samples of a body.

        Raises:
            RequestError: there are more rows than may ever be in flight.
            ServingError: the samples cannot be scored.
        """
        if route.count_rows is not None:
            check_num_rows(route.count_rows(body), self._config)
        request = route.read(body)
        check_num_rows(request.num_rows, self._config)
        return request

    async def _score_rows(
        self, model: HostedModel, route: Route[Any], request: ScoreRequest
    ) -> ScoredRows:
        """Score a request; rows that are to get ``refused_reward`` have NaN and the reason.

        Only rejected samples get it. If a judge or a server fails, the request fails, because the
        trainer can send it again.
        """
        reward = self._config.refused_reward
        scored = await model.scoring.answer(request, route.rows_aside(reward))
        if scored.errors and not route.sets_rows_aside:
            row, status = min(scored.errors), FailureKind.bad_request.status
            message, path = f"row {row}: {scored.errors[row]}", model.name_route(route.path)
            self._notices.note_rejection(path, status, message, reward)
        return scored

    def _note_foreign_rows(
        self,
        model: HostedModel,
        route: Route[Any],
        request: ScoreRequest,
        foreign: Mapping[int, str],
    ) -> ScoreRequest:
        """Log the first row that is not in the model's chat template.

        Reject such rows if configured.

        Raises:
            _ForeignTemplateError: such rows are rejected, and the answer of this protocol has no
                place for errors of single rows.
        """
        row, fault = next(iter(foreign.items()))
        self._notices.note_template(model.name_route(route.path), row, fault)
        if not self._config.reject_foreign_templates:
            return request
        if not route.sets_rows_aside:
            setting = f"{self._config.section}.reject_foreign_templates"
            raise _ForeignTemplateError(
                f"row {row}: {fault} ({setting}). Send messages, which the server writes in the "
                "model's template, or write the texts in that template (field template of "
                "/v1/contract)",
                FailureKind.bad_request,
                row=row,
            )
        return request.without_rows(foreign)

    def _describe_model(self, model: HostedModel, scored: ScoredRows) -> Served:
        contract, threshold = model.scoring.contract, self._config.reward_threshold
        refused = self._config.refused_reward
        if contract is not None:
            weights, scale = contract.attribute_weights, contract.reward_scale
            return Served(model.name, contract.attributes, weights, threshold, scale, refused)
        # No contract: a backend that runs NVIDIA's NeMo-Aligner publishes none, so the attributes
        # have no names.
        columns = scored.rewards.shape[1]
        names = ["reward"] if columns == 1 else [f"reward_{column}" for column in range(columns)]
        return Served(model.name, names, None, threshold, refused_reward=refused)


def model_of(request: Request) -> HostedModel | None:
    """Return the model that the path of a request names; None without ``/models/NAME``."""
    model: HostedModel | None = request.scope.get(MODEL_IN_SCOPE)
    return model


async def _blame(
    model: HostedModel, refusal: RequestError, with_valid_reply: ScoreRequest
) -> ScoredRows:
    """Find out whether the prompt or the reply is at fault in a rejected request.

    If the same request ``with_valid_reply`` can be scored, the reply is at fault: return
    ``refusal`` as the error of row 0. Otherwise the prompt is at fault, so raise the error of
    ``with_valid_reply``.
    """
    scored = await model.scoring.answer(with_valid_reply, NO_ROWS, is_probe=True)
    reason = refusal.message.removeprefix(f"row {refusal.row}: ")
    # The valid reply's reward is not used, only the number of attributes, for a row of NaN, and the
    # parts, because an answer names them also for a rejected reply.
    return ScoredRows(
        np.full_like(scored.rewards, np.nan),
        {0: reason},
        np.zeros(1, dtype=bool),
        part_names=scored.part_names,
        parts=scored.parts,
        components=scored.components,
    )


def _refuse(route: Route[Any], failure: RequestError, body: Any) -> Response:
    return respond(route.refuse(failure, body), failure.retry_after_s)


def _respond(route: Route[Any], body: Any, scored: ScoredRows, served: Served) -> Response:
    return respond(HttpAnswer(200, route.answer(body, scored, served), row_headers(scored)))


def _takes_fields(route: Route[Any], names: set[str]) -> bool:
    """Tell if a body with the fields ``names`` has all that the route needs, and no others."""
    fields = route.request.model_fields
    required = {name for name, field in fields.items() if field.is_required()}
    return bool(required) and required <= names <= fields.keys()


def _field_names(content: bytes) -> Collection[str]:
    """Return the keys of a JSON object; empty for another value, or for invalid JSON."""
    try:
        value = from_json(content)
    except ValueError:
        return ()
    return value.keys() if isinstance(value, dict) else ()


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
