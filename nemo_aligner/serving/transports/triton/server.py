"""PyTriton on rank 0, follower loop on the others; the only module that starts a Triton server."""

from __future__ import annotations

import glob
import logging
import os
import random
import shutil
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.errors import ServingError
from nemo_aligner.serving.ranks import ModelRanks
from nemo_aligner.serving.services.reward import Failure, RewardEndpoint, Scorer
from nemo_aligner.serving.wire import kserve as protocol
from nemo_aligner.serving.wire.kserve import ScoreReply
from nemo_aligner.text.contract import ScoringContract

logger = logging.getLogger(__name__)

# As the kernel names them, in 15 letters.
_TRITON_PROCESSES = {
    "tritonserver": "Triton's server",
    "triton_python_backend_stub"[:15]: "Triton's Python stub",
}
_WATCH_SECS = 0.2
_ANY_PORT = range(20_000, 32_000)
_LAST_WORDS_SECS = 1.0  # for the requests at hand to get their error, when the server has to die

# PyTriton's proxy answers an exception to every request of a batch; Triton itself has an error per
# response. This is appended to the proxy's model.py in Triton's model store, and uses that.
_PROXY_HOOK = "\ndef _wrap_response("
_PROXY_EXTENSION = """

_wrap_rewards = _wrap_response


def _wrap_response(response, requested_outputs_names, model_outputs_dict):
    if response.data is None or "error" not in response.data:
        return _wrap_rewards(response, requested_outputs_names, model_outputs_dict)
    code, message = bytes(response.data["error"].reshape(-1)[0]).decode().split(" ", 1)
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(output_tensors=[], error=error)
"""


def serve(scorer: Scorer, config: ServerConfig, device: torch.device | str = "cpu") -> int:
    """Answer requests until SIGTERM or SIGINT; every rank calls it.

    Returns:
        The exit code, 0 after a drained stop. A server that cannot go on (a rank, Triton or its
        Python stub died) answers what it holds with an error and ends the process with 1.
    """
    ranks = ModelRanks(
        scorer.score_token_lists, device, config.heartbeat_secs, config.worker_timeout_secs
    )
    if ranks.rank != 0:
        # The launcher signals every rank; rank 0 decides, after it has drained.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        ranks.follow()
        ranks.stop()
        return 0
    return _lead(scorer, ranks, config)


def _lead(scorer: Scorer, ranks: ModelRanks, config: ServerConfig) -> int:
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stopping.append(received))
    port = _free_port(config.host, config.port)
    ranks.execute([[0]])  # the first forward pass is slow, and may show that the model cannot run
    triton = _build_triton(RewardEndpoint(scorer, ranks.execute), scorer.contract, config, port)
    _start(triton)
    processes = _children_of(os.getpid())
    url = f"http://{config.host}:{port}"
    with _ready_file(config.ready_file, url):
        print(f"Serving {protocol.MODEL_NAME} at {url} (pid {os.getpid()})", flush=True)
        print(f"Scoring contract {scorer.contract.hash}", flush=True)
        failure = _watch(triton, processes, ranks, stopping)
        if failure is not None:
            _die(failure, triton, processes)
        print("Draining: in-flight requests are answered, new ones are refused", flush=True)
        triton.stop()
    if ranks.failure is not None:
        _die(ranks.failure, triton, processes)
    ranks.stop()
    print("Stopped", flush=True)
    return 0


def _start(triton: Any) -> None:
    """Run Triton until its model is ready; PyTriton would wait two minutes for one that is dead."""
    started = threading.Event()

    def watch() -> None:
        while not started.wait(_WATCH_SECS):
            server = triton._triton_server
            begun = server is not None and server._tritonserver_running_cmd is not None
            if begun and not server.is_alive():
                _die("Triton did not start, its own words are above", triton, {})

    threading.Thread(target=watch, name="start", daemon=True).start()
    triton.run()
    started.set()


def _watch(
    triton: Any, processes: Mapping[int, str], ranks: ModelRanks, stopping: Sequence[int]
) -> str | None:
    """Wait for a signal; or say what died."""
    while not stopping:
        dead = [f"{name} (pid {pid})" for pid, name in processes.items() if not _is_running(pid)]
        failure = f"{', '.join(dead)} died" if dead else ranks.failure
        if failure is None and not triton.is_alive():
            failure = "Triton is not alive"
        if failure is not None:
            return failure
        time.sleep(_WATCH_SECS)
    return None


def _die(failure: str, triton: Any, processes: Mapping[int, str]) -> NoReturn:
    """Leave at once with exit code 1, and take Triton along; other ranks notice and do the same."""
    print(f"The server cannot go on: {failure}", file=sys.stderr, flush=True)
    time.sleep(_LAST_WORDS_SECS)
    for pid in processes:
        if _is_running(pid):
            os.kill(pid, signal.SIGKILL)
    for segment in glob.glob(f"/dev/shm/pytrtion{os.getpid()}-*"):
        Path(segment).unlink(missing_ok=True)
    shutil.rmtree(triton._workspace.path, ignore_errors=True)
    os._exit(1)


def _build_triton(
    endpoint: RewardEndpoint, contract: ScoringContract, config: ServerConfig, port: int
) -> Any:
    # The stub loads the libpython of the running interpreter, and finds it only by this variable.
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))

    import sh
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.model_config.common import QueuePolicy
    from pytriton.triton import Triton, TritonConfig

    # torchrun ends a process group as one: in a session of its own, Triton can drain.
    sh.Command._call_args["new_session"] = True

    triton = Triton(
        config=TritonConfig(
            http_address=config.host,
            http_port=port,
            allow_grpc=False,
            allow_metrics=False,
            exit_timeout_secs=config.exit_timeout_secs,
        )
    )
    triton.bind(
        model_name=protocol.MODEL_NAME,
        infer_func=_infer_function(endpoint),
        inputs=[Tensor(**vars(spec)) for spec in protocol.INPUTS],
        outputs=[Tensor(**vars(spec)) for spec in protocol.OUTPUTS],
        config=ModelConfig(
            max_batch_size=config.max_batch_size,
            batcher=DynamicBatcher(
                max_queue_delay_microseconds=config.max_queue_delay_microseconds,
                default_queue_policy=QueuePolicy(max_queue_size=config.max_queue_size),
            ),
        ),
    )
    for model in triton._model_manager.models:
        _extend(model)
    published = protocol.encode_contract(contract)
    triton.bind(
        model_name=protocol.CONTRACT_MODEL_NAME,
        infer_func=lambda requests: [published for _ in requests],
        inputs=[Tensor(**vars(spec)) for spec in protocol.CONTRACT_INPUTS],
        outputs=[Tensor(**vars(spec)) for spec in protocol.CONTRACT_OUTPUTS],
        config=ModelConfig(batching=False),
    )
    return triton


def _extend(model: Any) -> None:
    """What Triton can do and PyTriton does not offer: ragged batches, an error per request."""
    plain_config, plain_files = model.get_model_config, model.get_proxy_model_files

    def get_model_config() -> dict[str, Any]:
        config = plain_config()
        for tensor in config["input"]:
            tensor["allow_ragged_batch"] = True
        return config

    def get_proxy_model_files() -> dict[str, bytes]:
        files = plain_files()
        name = next(name for name in files if name.endswith("/model.py"))
        if _PROXY_HOOK.encode() not in files[name]:
            raise ServingError(f"nvidia-pytriton: its {name} is not that of version 0.7")
        return {**files, name: files[name] + _PROXY_EXTENSION.encode()}

    model.get_model_config, model.get_proxy_model_files = get_model_config, get_proxy_model_files


def _infer_function(endpoint: RewardEndpoint) -> Callable[[list[Any]], list[dict[str, np.ndarray]]]:
    def infer(requests: list[Any]) -> list[dict[str, np.ndarray]]:
        answers = endpoint.answer([dict(request.items()) for request in requests])
        return [_to_outputs(answer) for answer in answers]

    return infer


def _to_outputs(answer: ScoreReply | Failure) -> dict[str, np.ndarray]:
    if isinstance(answer, ScoreReply):
        return protocol.encode_reply(answer)
    code = "INVALID_ARG" if answer.bad_request else "INTERNAL"
    return {"error": np.array([f"{code} {answer.message}".encode()], dtype=np.object_)}


def _free_port(host: str, port: int) -> int:
    """``port``, or any free one for 0; Triton itself would wait two minutes for a taken one."""
    if port != 0:
        reason = _why_taken(host, port)
        if reason is not None:
            raise ServingError(f"server.port: {host}:{port} is not free: {reason}")
        return port
    # Not one that the kernel hands out to connections: it could be gone before Triton has it.
    for candidate in random.SystemRandom().sample(_ANY_PORT, 100):
        if _why_taken(host, candidate) is None:
            return candidate
    raise ServingError(f"server.host: {host}: no free port was found for server.port 0")


def _why_taken(host: str, port: int) -> OSError | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


@contextmanager
def _ready_file(path: str | None, url: str) -> Iterator[None]:
    """While the server answers, ``path`` holds its URL."""
    if path is None:
        yield
        return
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(url + "\n")
    partial.replace(target)
    try:
        yield
    finally:
        target.unlink(missing_ok=True)


def _children_of(root: int) -> dict[int, str]:
    """Triton's processes among the descendants of ``root``: pid -> name."""
    parents, names = {}, {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = status.read_text().rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        pid, _, name = head.partition(" (")
        parents[int(pid)], names[int(pid)] = int(tail.split()[1]), name
    return {
        child: _TRITON_PROCESSES[name]
        for child, name in names.items()
        if name in _TRITON_PROCESSES and _descends(child, root, parents)
    }


def _descends(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
