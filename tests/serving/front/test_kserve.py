"""KServe v2 with other projects' clients: tritonclient, and pytriton's as NeMo-Aligner uses it."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

import nemo_aligner
from nemo_aligner.config.gateway import GatewayConfig
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.front.limits import ConnectionLimits
from nemo_aligner.serving.front.listen import FrontServer, open_socket, url_of
from nemo_aligner.serving.protocols import kserve, kserve_body
from nemo_aligner.utils.errors import ServingError
from tests.harness.environments import package
from tests.harness.launching import free_port
from tests.serving.fake_server import CONTRACT, total
from tests.serving.gateway_calls import FakeClient, call, gateway_front

MAX_ROWS = 16  # the limit of gateway_front
TEXTS = ["ab", "", "Grüße \N{SNOWMAN}"]


@contextmanager
def fronted(token: str | None = None, **settings: Any) -> Iterator[str]:
    """The address (host:port) of a front in a thread of this process."""
    config = GatewayConfig(port=0, **settings)
    client = FakeClient()
    client.aclose = lambda: asyncio.sleep(0)  # type: ignore[attr-defined]
    front = gateway_front(client, token, port=0, **settings)
    server = FrontServer(front, config)
    listener = open_socket(config)
    url = url_of(listener, config)
    server.start(listener)
    try:
        yield url.removeprefix("http://")
    finally:
        server.stop()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with fronted() as address:
        yield address


def column(values: list[Any], dtype: Any = np.object_) -> np.ndarray:
    return np.array([[value] for value in values], dtype=dtype)


def triton_input(name: str, array: np.ndarray, is_binary: bool = True) -> Any:
    made = triton.InferInput(name, list(array.shape), kserve_body.datatype_of(array.dtype))
    made.set_data_from_numpy(array, binary_data=is_binary)
    return made


def good_inputs(is_binary: bool = True) -> list[Any]:
    """Two texts: as binary data, or as JSON."""
    texts = ["ab", TEXTS[2]]
    values = [text.encode() for text in texts] if is_binary else texts
    return [triton_input("sentences", column(values), is_binary)]


EXPECTED = np.array([[total(text), -total(text)] for text in ("ab", TEXTS[2])], np.float32)


def test_tritonclient_reads_what_the_server_is(address: str) -> None:
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        about = client.get_server_metadata()
        assert about["version"] == nemo_aligner.__version__
        assert "binary_tensor_data" in about["extensions"]
        for model in ("reward_model", "contract"):
            for version in ("", "1"):
                assert client.is_model_ready(model, version)
                assert client.get_model_metadata(model, version)["name"] == model
        assert not client.is_model_ready("other")
        assert not client.is_model_ready("reward_model", "2")
        described = client.get_model_metadata("reward_model")
        tensors = {tensor["name"]: tensor for tensor in described["inputs"]}
        assert tensors["tokens"] == {"name": "tokens", "datatype": "INT64", "shape": [-1, -1]}
        assert described["outputs"][0]["name"] == "rewards"
        config = client.get_model_config("reward_model")
        assert config["max_batch_size"] == MAX_ROWS
        assert {"name": "sentences", "data_type": "TYPE_STRING", "dims": [1], "optional": True} in (
            config["input"]
        )
        names = [model["name"] for model in client.get_model_repository_index()]
        assert names == ["contract", "reward_model"]
        with pytest.raises(InferenceServerException, match="unknown model 'other'"):
            client.get_model_metadata("other")
        with pytest.raises(InferenceServerException, match=r"server\.triton_port"):
            client.get_system_shared_memory_status()


def test_tritonclient_counts_requests(address: str) -> None:
    with triton.InferenceServerClient(address) as client:

        def counts() -> tuple[int, int, int]:
            (statistics,) = client.get_inference_statistics("reward_model")["model_stats"]
            phases = statistics["inference_stats"]
            fails, successes = phases["fail"]["count"], phases["success"]["count"]
            return successes, fails, statistics["inference_count"]

        successes, fails, rows = counts()
        client.infer("reward_model", good_inputs())
        with pytest.raises(InferenceServerException):
            client.infer("reward_model", [triton_input("sentences", column([b""]))])
        assert counts() == (successes + 1, fails + 1, rows + 2)
        assert len(client.get_inference_statistics()["model_stats"]) == 2


def test_a_probe_of_one_row_is_counted_nowhere() -> None:
    """A parameter of the request marks a probe; other KServe servers ignore it.

    A request of more rows is counted, because otherwise a client could hide its traffic.
    """
    client = FakeClient()
    app = gateway_front(client)
    for texts in (["ab"], ["ab", "c"]):
        is_counted = len(texts) > 1
        body, headers = kserve_body.encode_body(kserve.encode_sentences(texts), [kserve_body.PROBE])
        answer = call(app, "/v2/models/reward_model/infer", body, headers)
        length = int(answer.headers[kserve_body.HEADER_LENGTH.lower()])
        listed = json.loads(answer.body[:length])["outputs"]
        outputs = kserve_body.decode_tensors(listed, answer.body[length:])
        assert outputs["rewards"][:, 0].tolist() == [total(text) for text in texts]
        (counted,) = call(app, "/v2/models/reward_model/stats").json["model_stats"]
        assert counted["inference_stats"]["success"]["count"] == int(is_counted)
        assert counted["inference_count"] == 2 * is_counted
        shown = call(app, "/metrics").body
        assert (b"nemo_aligner_http_requests_total{" in shown) == is_counted
        assert (b"nemo_aligner_reward_rows{" in shown) == is_counted
        # A gateway passes it on to its backends.
        assert client.probes == 1


def test_reasons_of_rejected_rows_are_an_output_that_can_be_requested() -> None:
    tensor = {"name": "sentences", "shape": [2, 1], "datatype": "BYTES", "data": ["ab", ""]}
    body = {"inputs": [tensor], "outputs": [{"name": "rewards"}, {"name": "errors"}]}
    app, path = gateway_front(FakeClient()), "/v2/models/reward_model/infer"
    answer = call(app, path, {**body, "parameters": {"row_errors": True}}).json
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    assert outputs["errors"] == ["", "the text is empty"]
    assert outputs["rewards"] == [total("ab"), -total("ab"), None, None]
    # Without the parameter there is no such output.
    assert "unknown output 'errors'" in call(app, path, body).json["error"]


@pytest.mark.parametrize("packing", [None, "gzip", "deflate"])
@pytest.mark.parametrize("is_binary", [True, False])
def test_tritonclient_gets_the_same_rewards_by_every_form(
    address: str, is_binary: bool, packing: str | None
) -> None:
    outputs = [
        triton.InferRequestedOutput(name, binary_data=is_binary)
        for name in ("rewards", "contract_hash")
    ]
    with triton.InferenceServerClient(address) as client:
        for requested in (None, outputs):
            answer = client.infer(
                "reward_model",
                good_inputs(is_binary),
                model_version="1",
                outputs=requested,
                request_id="seven",
                request_compression_algorithm=packing,
                response_compression_algorithm=packing,
            )
            assert answer.as_numpy("rewards").tobytes() == EXPECTED.tobytes()
            hashes = answer.as_numpy("contract_hash").reshape(-1).tolist()
            assert {bytes(value) if is_binary else value for value in hashes} <= {
                CONTRACT.hash.encode(),
                CONTRACT.hash,
            }
            assert answer.get_response()["id"] == "seven"
            assert (answer.as_numpy("exceeded") is None) == (requested is not None)


def test_tritonclient_asks_at_once_by_threads_and_by_asyncio(address: str) -> None:
    with triton.InferenceServerClient(address, concurrency=8) as client:
        waiting = [client.async_infer("reward_model", good_inputs()) for _ in range(32)]
        for future in waiting:
            assert future.get_result().as_numpy("rewards").tobytes() == EXPECTED.tobytes()

    async def score() -> None:
        async with triton_aio.InferenceServerClient(address) as client:
            assert await client.is_model_ready("reward_model")
            requests = [client.infer("reward_model", good_inputs()) for _ in range(32)]
            for answer in await asyncio.gather(*requests):
                assert answer.as_numpy("rewards").tobytes() == EXPECTED.tobytes()

    asyncio.run(score())


def test_pytritons_clients_work_as_nemo_aligner_uses_them(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package("nvidia-pytriton==0.7.0")))
    from pytriton.client import FuturesModelClient, ModelClient
    from pytriton.client.exceptions import PyTritonClientInferenceServerError

    url, seconds = f"http://{address}", {"init_timeout_s": 60, "inference_timeout_s": 60}
    sentences = np.char.encode(np.array([["ab"], [TEXTS[2]]]), "utf-8")
    tokens = np.zeros((2, 48), dtype=np.int64)
    tokens[0, :3], tokens[1, :40] = 5, 2
    lengths = np.array([[3], [40]], dtype=np.int64)
    with FuturesModelClient(url, "reward_model", **seconds) as futures:
        answer = futures.infer_batch(sentences=sentences).result()
        assert answer["rewards"].tobytes() == EXPECTED.tobytes()
        answer = futures.infer_batch(tokens=tokens, sequence_lengths=lengths).result()
        assert answer["rewards"].dtype == np.float32
        assert answer["rewards"][:, 0].tolist() == [15, 80]
    with ModelClient(url, "reward_model", **seconds) as client:
        assert client.model_config.max_batch_size == MAX_ROWS
        assert client.infer_batch(sentences)["rewards"].tobytes() == EXPECTED.tobytes()
        with pytest.raises(PyTritonClientInferenceServerError, match="sequence_lengths, row 0"):
            client.infer_batch(tokens=tokens, sequence_lengths=lengths + 100)
    with ModelClient(url, "contract", **seconds) as client:
        contract = client.infer_sample(np.zeros(1, dtype=np.int64))["contract"][0]
        assert json.loads(contract) == json.loads(json.dumps(CONTRACT.to_dict()))


def post(url: str, body: bytes, **headers: str) -> tuple[int, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body, named)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_bad_request_is_one_line_that_says_what_was_wanted(address: str) -> None:
    url = f"http://{address}/v2/models/reward_model/infer"
    shape = {"shape": [1, 1], "datatype": "BYTES"}
    good = {"name": "sentences", **shape, "data": ["ab"]}
    hidden = {"name": "rewards", "parameters": 5}
    cases: list[tuple[Any, str]] = [
        (b"{", "body: not JSON"),
        ([], "body: got [], wanted a JSON object with inputs"),
        ({"inputs": 5}, "wanted a list of tensors"),
        ({"inputs": [{**good, "name": "other"}]}, "unknown input 'other'. Inputs: sentences, "),
        ({"inputs": [{**good, "datatype": "FP32", "data": [1.0]}]}, "got the datatype FP32"),
        ({"inputs": [{**good, "shape": [1, 2], "data": ["a", "b"]}]}, "wanted [-1, 1]"),
        ({"inputs": [{**good, "shape": [0, 1], "data": []}]}, "wanted no dimension of 0"),
        ({"inputs": [{**good, "shape": [17, 1], "data": ["a"] * 17}]}, "wanted at most 16"),
        ({"inputs": [good], "outputs": [{"name": "other"}]}, "unknown output 'other'"),
        ({"inputs": [good], "outputs": [hidden]}, "wanted a list of objects with a name"),
        ({"inputs": [{**good, "data": [""]}]}, "row 0: the text is empty"),
        (b'{"id": "\\ud800", "inputs": []}', "id: got "),
        ({"id": 5, "inputs": [good]}, "id: got 5, wanted a string"),
        (
            {"inputs": [good, {**good, "name": "add_EOS", "shape": [2, 1], "datatype": "BOOL",
                               "data": [True, True]}]},
            "wanted the same number for all",
        ),
    ]  # fmt: skip
    for body, message in cases:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = post(url, content)
        assert (status, message in answer["error"]) == (400, True), answer
    content = json.dumps({"inputs": [good]}).encode()
    for length in ("-1", "99999", "many", "1" * 5000):
        status, answer = post(url, content, Inference_Header_Content_Length=length)
        assert (status, "Inference-Header-Content-Length" in answer["error"]) == (400, True)
    nulls = {"inputs": [{**good, "parameters": None}], "parameters": None, "outputs": None}
    for same in (content, json.dumps(nulls).encode()):
        answer = post(url, same)[1]
        assert answer["outputs"][0]["data"] == [total("ab"), -total("ab")]
    assert post(url.partition("/v2")[0] + "/v2", content)[0] == 405
    assert post(url.replace("reward_model", "other"), content)[0] == 404
    assert post(url.replace("/infer", "/ready"), content)[0] == 405
    assert post(url.replace("/v2/models/reward_model", "/v2/nowhere"), content)[0] == 404


def test_wrong_method_is_a_405_and_an_unknown_path_a_404() -> None:
    app, model = gateway_front(FakeClient()), "/v2/models/reward_model"
    cases = [
        ("GET", f"{model}/infer", "POST", "POST"),
        ("PUT", f"{model}/versions/1/infer", "POST", "POST"),
        ("GET", "/v2/repository/index", "POST", "POST"),
        ("POST", f"{model}/config", "GET", "GET, HEAD"),
        ("POST", "/v2/health/ready", "GET", "GET, HEAD"),
    ]
    for method, path, expected, allowed in cases:
        answer = call(app, path, {}, method=method)
        assert (answer.status, answer.headers["allow"]) == (405, allowed), path
        assert answer.json["error"] == f"{path}: got {method}, wanted {expected}"
    for method in ("GET", "POST"):
        answer = call(app, f"{model}/generate", {}, method=method)
        assert (answer.status, "no such path" in answer.json["error"]) == (404, True)


def test_clients_connect_again_if_a_connection_ends_with_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifetimes: list[float] = []

    def draw_lifetime(limits: ConnectionLimits) -> float:
        lifetimes.append(-1.0)
        return lifetimes[-1]

    monkeypatch.setattr(ConnectionLimits, "draw_lifetime", draw_lifetime)
    with fronted() as address:
        with triton.InferenceServerClient(address, concurrency=4) as client:
            waiting = [client.async_infer("reward_model", good_inputs()) for _ in range(8)]
            for future in waiting:
                assert future.get_result().as_numpy("rewards").tobytes() == EXPECTED.tobytes()
        assert len(lifetimes) == 8
        # Without retries, so that a connection that has ended is not used again unnoticed.
        with RewardClient(f"http://{address}", retry_s=0.0) as own:
            for _ in range(3):
                futures = [own.score_future(["ab"]) for _ in range(8)]
                assert {float(future.result()[0, 0]) for future in futures} == {total("ab")}
        assert len(lifetimes) >= 8 + 3 * 8
        connection = HTTPConnection(address, timeout=10)
        for _ in range(3):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            assert (answer.read(), answer.getheader("connection")) == (b'{"status":"ok"}', "close")


def test_token_is_needed_for_all_but_health_and_a_large_body_is_refused() -> None:
    with fronted("s3cret", max_request_bytes=1000) as address:
        headers = {"Authorization": "Bearer s3cret"}
        with triton.InferenceServerClient(address) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            with pytest.raises(InferenceServerException, match="bearer token is missing") as error:
                client.infer("reward_model", good_inputs())
            assert error.value.status() == "401"
            answer = client.infer("reward_model", good_inputs(), headers=headers)
            assert answer.as_numpy("rewards").tobytes() == EXPECTED.tobytes()
            large = [triton_input("sentences", column([b"a" * 2000]))]
            with pytest.raises(InferenceServerException, match="the limit is 1000") as error:
                client.infer("reward_model", large, headers=headers)
            assert error.value.status() == "413"


def test_gateway_whose_backends_are_gone_is_not_ready_and_no_client_waits_for_it() -> None:
    client = FakeClient()
    app = gateway_front(client)
    paths = ("/ready", "/v2/health/ready", "/v2/models/reward_model/ready")
    body = {"inputs": [{"name": "sentences", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}]}
    infer = "/v2/models/reward_model/infer"
    assert {call(app, path).status for path in paths} == {200}
    client.failure = ServingError("nobody listens")
    assert {call(app, path).status for path in paths} == {503}
    answer = call(app, infer, body)
    assert (answer.status, "nobody listens" in answer.json["error"]) == (503, True)
    # With Retry-After, RewardClient would take the gateway for busy, and wait until its deadline.
    assert "retry-after" not in answer.headers
    for path in ("/v2//", "/v2/models/other/infer", infer):
        call(app, path, body)
    routes = set(re.findall(r'route="(/v2[^"]*)"', call(app, "/metrics").body.decode()))
    assert routes == {infer}


def test_port_is_held_from_before_the_model_is_loaded_and_a_bad_certificate_is_told_then(
    tmp_path: Path,
) -> None:
    first = open_socket(GatewayConfig(port=0))
    port = first.getsockname()[1]
    with closing(first), pytest.raises(ServingError, match=rf"gateway\.port: 127.0.0.1:{port} is "):
        open_socket(GatewayConfig(port=port))
    with pytest.raises(
        ServingError, match=r"gateway\.host: got 192\.0\.2\.1, which is not an address"
    ):
        open_socket(GatewayConfig(host="192.0.2.1"))
    stale = tmp_path / "ready"
    stale.write_text("of a server that was killed")
    open_socket(GatewayConfig(port=port, ready_file=str(stale))).close()
    assert not stale.exists()
    assert list(tmp_path.iterdir()) == []
    files = {"certificate_file": str(tmp_path / "none.pem"), "key_file": str(tmp_path / "none.key")}
    with pytest.raises(
        ServingError, match=r"gateway\.certificate_file: .*none.pem: the file does not exist"
    ):
        open_socket(GatewayConfig(port=0, **files))


def test_limit_of_open_files_is_raised_or_a_warning_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits, needed = [512, -1], 4096 + 512 + 8 + 512  # connections, and other files; -1: no limit

    def set_limit(kind: int, values: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_NOFILE
        limits[:] = values

    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    config = GatewayConfig(port=0)
    for soft, hard in ((1024, -1), (1024, needed), (needed + 1, needed + 1), (-1, -1)):
        limits[:] = soft, hard
        open_socket(config).close()
        assert limits == [needed if soft == 1024 else soft, hard]
    assert capsys.readouterr().out == ""
    limits[:] = 1024, 4096
    open_socket(config).close()
    assert limits == [4096, 4096]
    warning = capsys.readouterr().out
    assert "4096 connections need 5128 open files, but this process may have only 4096" in warning
    assert "LimitNOFILE= of systemd" in warning
    limits[:] = 1024, 4096
    (fitting,) = re.findall(r"set at most (\d+) connections", warning)
    open_socket(GatewayConfig(port=0, max_open_connections=int(fitting))).close()
    assert capsys.readouterr().out == ""


def test_ready_file_that_cannot_be_written_is_told_with_the_port_and_leaves_it_free(
    tmp_path: Path,
) -> None:
    port = free_port()
    for path, reason in {tmp_path: "Is a dir", tmp_path / "none" / "ready": "No such file"}.items():
        config = GatewayConfig(port=port, ready_file=str(path))
        beginning = re.escape(f"gateway.ready_file: {path}: cannot be written: {reason}")
        with pytest.raises(ServingError, match=beginning) as caught:  # it keeps the socket alive
            open_socket(config)
        open_socket(GatewayConfig(port=port)).close()
        assert "Name a file in a folder that exists" in str(caught.value)
