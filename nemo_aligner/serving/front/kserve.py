"""KServe v2 over HTTP, for the clients pytriton, tritonclient and NeMo-Aligner.

=====================================  ===========================================================
``GET /v2``                            name, version and extensions of the server
``GET /v2/health/live``                200
``GET /v2/health/ready``               200, or 503 until the server is ready
``GET /v2/models/M``                   names, datatypes and shapes of the tensors of model M
``GET /v2/models/M/ready``             200, or 503 until the server is ready
``GET /v2/models/M/config``            Triton's model configuration, which clients read first
``GET /v2/models/M/stats``             counts and durations of requests to M, in Triton's form
``GET /v2/models/stats``               the same for all models
``POST /v2/models/M/infer``            tensors in, tensors out
``POST /v2/repository/index``          names of all models
=====================================  ===========================================================

``/versions/1`` may follow the name of a model. Tensors are JSON, or binary with the binary data
extension; bodies may be compressed. For Triton's other extensions (shared memory, loading models,
tracing, gRPC) use Triton itself: ``server.triton_port``. References: KServe's "predict protocol,
version 2", and ``http_server.cc`` of triton-inference-server/server where its text is unclear.
"""

from __future__ import annotations

import gzip
import math
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic_core import to_json

import nemo_aligner
from nemo_aligner.serving.endpoints import Endpoint, call_by_size
from nemo_aligner.serving.failures import FailureKind, RequestError, public_failure
from nemo_aligner.serving.protocols import TensorSpec
from nemo_aligner.serving.protocols.kserve import ERRORS, UNSCORED
from nemo_aligner.serving.protocols.kserve_body import (
    HEADER_LENGTH,
    KIND,
    PROBE,
    ROW_ERRORS,
    Tensors,
    datatype_of,
    decode_tensors,
    has_mark,
    pack_tensor,
)
from nemo_aligner.serving.protocols.strict_json import read_json
from nemo_aligner.utils.errors import ServingError, shown

_JSON = "application/json"
_MODEL = re.compile(r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?(?P<suffix>/\w+)?")
_INFER = "/infer"
_MOST_DIGITS = 12  # maximum number of digits in the header with the length of the JSON part
_COMPRESSION_LEVEL = 1  # gzip level 1, the fastest: higher levels hardly shrink floats further
_ALL_STATISTICS = "/v2/models/stats"
_SERVER_PATHS = ("/v2", "/v2/", "/v2/health/live", "/v2/health/ready", _ALL_STATISTICS)
_EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
# Phases of a request that Triton's statistics list. This server measures only whole requests.
_PHASES = ("queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


@dataclass(frozen=True)
class KServeAnswer:
    """An answer: HTTP status, body and headers."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @classmethod
    def of_json(cls, content: Any, status: int = 200) -> KServeAnswer:
        """Create an answer with a JSON body."""
        return cls(status, to_json(content, inf_nan_mode="constants"), {"Content-Type": _JSON})


class _Counts:
    """Counts and total durations of requests to one model, which its path ``/stats`` shows."""

    def __init__(self) -> None:
        self.rows = self.last_ms = 0
        self.requests = {"success": 0, "fail": 0}
        self.nanoseconds = {"success": 0, "fail": 0}

    def count(self, outcome: str, rows: int, begun_ns: int) -> None:
        self.requests[outcome] += 1
        self.nanoseconds[outcome] += time.monotonic_ns() - begun_ns
        self.rows += rows
        self.last_ms = time.time_ns() // 1_000_000


class KServe:
    """Answers the paths under ``/v2`` for a list of endpoints.

    ``is_ready`` is a function that returns whether requests can be answered. ``count_request`` is
    called with the canonical path of each inference request, its HTTP status and its duration in
    seconds.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        is_ready: Callable[[], Awaitable[bool]],
        count_request: Callable[[str, int, float], None],
    ) -> None:
        self._endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self._counts = {name: _Counts() for name in self._endpoints}
        self._is_ready, self._count_request = is_ready, count_request

    async def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> KServeAnswer:
        """Answer a request.

        Header names are in lower case, and the body is decompressed already.
        """
        parts = _MODEL.fullmatch(path)
        if parts is None or path == _ALL_STATISTICS:
            return await self._answer_server(method, path)
        suffix, endpoint = parts["suffix"] or "", self._find_endpoint(parts)
        if endpoint is None:
            name = shown(parts["name"])
            version = "" if parts["version"] is None else f" version {shown(parts['version'])}"
            models = ", ".join(self._endpoints)
            return _error_answer(404, f"unknown model {name}{version}. Models: {models}")
        descriptions: dict[str, Callable[[Endpoint], Any]] = {
            "": _describe_model,
            "/config": _describe_config,
            "/stats": lambda endpoint: {"model_stats": [self._describe_counts(endpoint.name)]},
        }
        if suffix == _INFER:
            if method != "POST":
                return _wrong_method(path, method, "POST")
            return await self._infer(endpoint, headers, body)
        if suffix != "/ready" and suffix not in descriptions:
            return _unknown_path(path)
        if method != "GET":
            return _wrong_method(path, method, "GET")
        if suffix == "/ready":
            return await self._answer_ready()
        return KServeAnswer.of_json(descriptions[suffix](endpoint))

    def count_rejection(self, path: str, status: int, seconds: float) -> None:
        """Count a request that was rejected before it was decoded, if it is for inference."""
        parts = _MODEL.fullmatch(path)
        endpoint = None if parts is None else self._find_endpoint(parts)
        if parts is not None and endpoint is not None and parts["suffix"] == _INFER:
            begun_ns = time.monotonic_ns() - round(seconds * 1e9)
            self._counts[endpoint.name].count("fail", 0, begun_ns)
            self._count_request(_route_of(endpoint), status, seconds)

    def _find_endpoint(self, parts: re.Match[str]) -> Endpoint | None:
        """Return the endpoint that a path names; None if there is none of its name and version."""
        return self._endpoints.get(parts["name"]) if parts["version"] in (None, "1") else None

    async def _answer_server(self, method: str, path: str) -> KServeAnswer:
        """Answer a path under ``/v2`` about the whole server, e.g. its health or list of models."""
        if path == "/v2/repository/index":
            if method != "POST":
                return _wrong_method(path, method, "POST")
            state = {"version": "1", "state": "READY", "reason": ""}
            return KServeAnswer.of_json([{"name": name, **state} for name in self._endpoints])
        if path not in _SERVER_PATHS:
            return _unknown_path(path)
        if method != "GET":
            return _wrong_method(path, method, "GET")
        if path in ("/v2", "/v2/"):
            version = nemo_aligner.__version__
            server = {"name": "nemo_aligner", "version": version, "extensions": _EXTENSIONS}
            return KServeAnswer.of_json(server)
        if path == "/v2/health/live":
            return KServeAnswer(200, b"", {})
        if path == "/v2/health/ready":
            return await self._answer_ready()
        return KServeAnswer.of_json({"model_stats": [*map(self._describe_counts, self._counts)]})

    async def _answer_ready(self) -> KServeAnswer:
        return KServeAnswer(200 if await self._is_ready() else 503, b"", {})

    async def _infer(
        self, endpoint: Endpoint, headers: Mapping[str, str], body: bytes
    ) -> KServeAnswer:
        begun_ns, counts, rows = time.monotonic_ns(), self._counts[endpoint.name], 0
        probe = None
        try:
            request, inputs = await call_by_size(
                len(body), _decode_request, endpoint, headers, body
            )
            by_row = endpoint.answer_by_row if has_mark(request, ROW_ERRORS) else None
            requested = _requested_outputs(endpoint, request, has_errors=by_row is not None)
            # A probe is a request that is not counted in the statistics. It must have one row, like
            # those of our gateway, so that no client can hide large requests.
            is_one_row = all(len(array) == 1 for array in inputs.values())
            probe = endpoint.answer_probe if is_one_row and has_mark(request, PROBE) else None
            outputs = await (probe or by_row or endpoint.answer)(inputs)
            # Choose the thread by the larger of request and answer: e.g. a critic's values are
            # larger than the request.
            size = max(len(body), *(array.nbytes for array in outputs.values()))
            encoding = headers.get("accept-encoding", "")
            answer = await call_by_size(
                size, _encode_answer, endpoint, request, requested, outputs, encoding
            )
            rows = max(map(len, inputs.values()), default=1)
        except Exception as error:
            answer = refuse(public_failure(error))
        if probe is not None:
            return answer
        counts.count("success" if answer.status == 200 else "fail", rows, begun_ns)
        seconds = (time.monotonic_ns() - begun_ns) / 1e9
        self._count_request(_route_of(endpoint), answer.status, seconds)
        return answer

    def _describe_counts(self, name: str) -> dict[str, Any]:
        counts = self._counts[name]
        measured = {
            outcome: {"count": counts.requests[outcome], "ns": counts.nanoseconds[outcome]}
            for outcome in counts.requests
        }
        return {
            "name": name,
            "version": "1",
            "last_inference": counts.last_ms,
            "inference_count": counts.rows,
            "execution_count": counts.requests["success"],
            "inference_stats": {**measured, **{phase: {"count": 0, "ns": 0} for phase in _PHASES}},
            "batch_stats": [],
        }


def _route_of(endpoint: Endpoint) -> str:
    """Return the path under which metrics list the inference requests of an endpoint."""
    return f"/v2/models/{endpoint.name}{_INFER}"


def refuse(failure: RequestError) -> KServeAnswer:
    """Build the error answer to a failed request."""
    content = {"error": failure.message}
    if failure.kind is FailureKind.unscored:  # its status is also that of a rejected row
        content[KIND] = failure.kind.name
    answer = KServeAnswer.of_json(content, failure.kind.status)
    # Only a busy server sends Retry-After, which makes clients wait. They must not wait if the
    # gateway's backends are gone.
    if failure.kind is not FailureKind.busy or failure.retry_after_s is None:
        return answer
    headers = {**answer.headers, "Retry-After": str(failure.retry_after_s)}
    return KServeAnswer(answer.status, answer.body, headers)


def build_allow_header(methods: Collection[str]) -> dict[str, str]:
    """Build the header ``Allow`` of a 405: the path's methods, and HEAD if GET is one of them."""
    with_head = {*methods, "HEAD"} if "GET" in methods else {*methods}
    return {"Allow": ", ".join(sorted(with_head))}


def _wrong_method(path: str, method: str, expected: str) -> KServeAnswer:
    answer = _error_answer(405, f"{path}: got {method}, wanted {expected}")
    headers = {**answer.headers, **build_allow_header([expected])}
    return KServeAnswer(answer.status, answer.body, headers)


def _error_answer(status: int, message: str) -> KServeAnswer:
    return KServeAnswer.of_json({"error": message}, status)


def _unknown_path(path: str) -> KServeAnswer:
    return _error_answer(
        404,
        f"{shown(path)}: this server has no such path. Triton itself has more paths "
        "(server.triton_port)",
    )


# The functions below describe models.


def _describe_model(endpoint: Endpoint) -> dict[str, Any]:
    batch = [-1] if endpoint.max_rows else []

    def tensors(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {
                "name": spec.name,
                "datatype": datatype_of(spec.dtype),
                "shape": [*batch, *spec.shape],
            }
            for spec in specs
        ]

    return {
        "name": endpoint.name,
        "versions": ["1"],
        "platform": "nemo_aligner",
        "inputs": tensors(endpoint.inputs),
        "outputs": tensors(endpoint.outputs),
    }


def _describe_config(endpoint: Endpoint) -> dict[str, Any]:
    """Build Triton's ``ModelConfig``, in which BYTES is called STRING and shapes omit the batch."""

    def tensors(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {
                "name": spec.name,
                "data_type": f"TYPE_{datatype_of(spec.dtype).replace('BYTES', 'STRING')}",
                "dims": [*spec.shape],
                **({"optional": True} if spec.optional else {}),
            }
            for spec in specs
        ]

    return {
        "name": endpoint.name,
        "platform": "",
        "backend": "nemo_aligner",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": endpoint.max_rows,
        "input": tensors(endpoint.inputs),
        "output": tensors(endpoint.outputs),
        "instance_group": [],
        "parameters": {},
        "model_transaction_policy": {"decoupled": False},
    }


# The functions below decode requests and encode answers.


def _decode_request(
    endpoint: Endpoint, headers: Mapping[str, str], body: bytes
) -> tuple[dict[str, Any], Tensors]:
    """Decode a body to its JSON object and the input tensors of the endpoint.

    Raises:
        ServingError: the body is not a request of KServe v2, or does not fit the endpoint.
    """
    header = headers.get(HEADER_LENGTH.lower(), "")
    length = len(body)
    if header:
        if not header.isdecimal() or len(header) > _MOST_DIGITS or int(header) > len(body):
            raise ServingError(
                f"{HEADER_LENGTH}: got {shown(header)}, wanted the length of the JSON part of a "
                f"body of {len(body)} bytes"
            )
        length = int(header)
    try:
        request = read_json(body[:length].decode())
    except UnicodeDecodeError as error:
        raise ServingError(f"body: its JSON is not UTF-8 ({error.reason})") from None
    except ServingError as error:
        raise ServingError(f"body: {error}") from error
    if not isinstance(request, dict):
        raise ServingError(f"body: got {shown(request)}, wanted a JSON object with inputs")
    _check_id(request)
    inputs = decode_tensors(request.get("inputs", []), body[length:])
    _check_inputs(endpoint, inputs)
    return request, inputs


def _check_id(request: Mapping[str, Any]) -> None:
    """Raise ServingError if the request's id is not a string, because the answer repeats it."""
    identifier = request.get("id", "")
    is_text = isinstance(identifier, str)
    if not is_text or identifier.encode(errors="ignore").decode() != identifier:
        raise ServingError(f"id: got {shown(identifier)}, wanted a string")


def _check_inputs(endpoint: Endpoint, inputs: Tensors) -> None:
    """Raise ServingError unless the tensors fit the endpoint and have equally many rows."""
    specs = {spec.name: spec for spec in endpoint.inputs}
    for name, array in inputs.items():
        spec = specs.get(name)
        if spec is None:
            raise ServingError(f"unknown input {shown(name)}. Inputs: {', '.join(specs)}")
        actual, expected = datatype_of(array.dtype), datatype_of(spec.dtype)
        if actual != expected:
            raise ServingError(f"{name}: got the datatype {actual}, wanted {expected}")
        shape = ([-1] if endpoint.max_rows else []) + list(spec.shape)
        fits = len(array.shape) == len(shape) and all(
            size in (-1, length) for size, length in zip(shape, array.shape, strict=True)
        )
        if not fits:
            raise ServingError(f"{name}: got shape {list(array.shape)}, wanted {shape}")
        if 0 in array.shape:
            raise ServingError(f"{name}: got shape {list(array.shape)}, wanted no dimension of 0")
    missing = [name for name, spec in specs.items() if name not in inputs and not spec.optional]
    if missing:
        raise ServingError(f"inputs: {', '.join(missing)} is missing")
    if not endpoint.max_rows:
        return
    counts = {name: len(array) for name, array in inputs.items()}
    if len(set(counts.values())) > 1:
        raise ServingError(f"inputs: got {counts} rows, wanted the same number for all")
    rows = max(counts.values(), default=0)
    if rows > endpoint.max_rows:
        raise ServingError(
            f"got {rows} rows, wanted at most {endpoint.max_rows} (max_batch_size). Send fewer "
            "rows per request"
        )


def _requested_outputs(
    endpoint: Endpoint, request: Mapping[str, Any], has_errors: bool
) -> dict[str, bool] | None:
    """Map the name of each requested output to whether it is to be binary.

    None if the request lists no outputs, which requests all of them. ``has_errors`` is whether the
    answer may have the outputs ``ERRORS`` and ``UNSCORED``.

    Raises:
        ServingError: an output is unknown, or the list is malformed.
    """
    listed = request.get("outputs")
    if not listed:
        return None
    names = [*(spec.name for spec in endpoint.outputs), *[ERRORS, UNSCORED] * has_errors]
    is_binary = _is_binary_by_default(request)
    try:
        requested = {
            output["name"]: bool((output.get("parameters") or {}).get("binary_data", is_binary))
            for output in listed
        }
    except (TypeError, KeyError, AttributeError) as error:
        raise ServingError(
            f"outputs: got {shown(listed)}, wanted a list of objects with a name"
        ) from error
    unknown = [name for name in requested if name not in names]
    if unknown:
        raise ServingError(f"unknown output {shown(unknown[0])}. Outputs: {', '.join(names)}")
    return requested


def _is_binary_by_default(request: Mapping[str, Any]) -> bool:
    parameters = request.get("parameters")
    return isinstance(parameters, dict) and bool(parameters.get("binary_data_output", False))


def _encode_answer(
    endpoint: Endpoint,
    request: Mapping[str, Any],
    requested: dict[str, bool] | None,
    outputs: Tensors,
    encoding: str,
) -> KServeAnswer:
    if requested is None:
        requested = dict.fromkeys(outputs, _is_binary_by_default(request))
    listed, pieces = [], []
    for name, is_binary in requested.items():
        if name not in outputs:  # an optional output that this answer does not have
            continue
        array = outputs[name]
        tensor: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(array.dtype),
            "shape": list(array.shape),
        }
        if is_binary:
            piece = pack_tensor(array)
            pieces.append(piece)
            tensor["parameters"] = {"binary_data_size": len(piece)}
        else:
            tensor["data"] = _json_values(array)
        listed.append(tensor)
    content = {"model_name": endpoint.name, "model_version": "1", "outputs": listed}
    if "id" in request:
        content["id"] = request["id"]
    header = KServeAnswer.of_json(content)
    if not pieces:
        return _compress(header, encoding)
    headers = {
        "Content-Type": "application/octet-stream",
        HEADER_LENGTH: str(len(header.body)),
    }
    return _compress(KServeAnswer(200, b"".join([header.body, *pieces]), headers), encoding)


def _json_values(array: np.ndarray) -> list[Any]:
    values = array.reshape(-1).tolist()
    if array.dtype.kind == "f" and np.isnan(array).any():  # JSON has no NaN
        return [None if math.isnan(value) else value for value in values]
    if array.dtype != np.object_:
        return values
    return [value.decode("utf-8", errors="replace") for value in values]


def _compress(answer: KServeAnswer, accepts: str) -> KServeAnswer:
    """Compress an answer if the client accepts exactly one encoding, like tritonclient.

    Clients that list several encodings also accept an answer without compression, which is faster.
    """
    packers: dict[str, Callable[[bytes, int], bytes]] = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
    }
    pack = packers.get(accepts.strip().lower())
    if pack is None:
        return answer
    encoding = {"Content-Encoding": accepts.strip().lower()}
    return KServeAnswer(
        answer.status, pack(answer.body, _COMPRESSION_LEVEL), {**answer.headers, **encoding}
    )
