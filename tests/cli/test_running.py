"""Parsing of options; exit codes and error messages of verbs."""

from __future__ import annotations

import argparse
import json
import logging
import re
import runpy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.cli.data import inspect_parser
from nemo_aligner.cli.evaluate import compare_parser
from nemo_aligner.cli.main import main, run_verb
from nemo_aligner.cli.parser import (
    Parser,
    fraction,
    names,
    positive,
    start_ranks,
    starts_ranks,
    whole,
)
from nemo_aligner.cli.serve import run_score, score_parser
from nemo_aligner.config.serving import ServeConfig
from nemo_aligner.contract.scorer import StepRewards
from nemo_aligner.contract.steps import StepSpan
from nemo_aligner.distributed import launch
from nemo_aligner.serving.failures import failure_of
from nemo_aligner.utils.errors import CheckpointError, ConfigError, DataError
from nemo_aligner.utils.processes import show_command
from tests.harness import tiny
from tests.harness.launching import ROOT, TORCHRUN, run_local_ranks
from tests.serving.client.misbehaving import Misbehaving, output
from tests.serving.fake_server import CONTRACT

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def same_log_level(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Restore the level of a server's log, which ``--debug`` sets, for the tests that follow."""
    with caplog.at_level(logging.NOTSET, "nemo_aligner.serving"):
        yield


def options_of(*argv: str) -> argparse.Namespace:
    parser = Parser("try", "Tries.")
    parser.add_argument("--gpu-memory", type=int, default=3)
    parser.add_argument("--processes", type=positive)
    parser.add_argument("things", nargs="*")
    return parser.parse(argv)


def test_option_that_is_wrong_is_two_lines_and_exit_code_2(capsys: Captured) -> None:
    wanted = {
        ("--gpu-memry=3",): "got --gpu-memry=3, which is not an option; did you mean --gpu-memory?",
        ("--wholly-other",): "got --wholly-other, which is not an option",
        ("--gpu-memory", "x"): "argument --gpu-memory: invalid int value: 'x'",
    }
    for argv, said in wanted.items():
        with pytest.raises(SystemExit) as end:
            options_of(*argv)
        assert end.value.code == 2
        assert capsys.readouterr().err == (
            f"nemo-aligner try: {said}\nnemo-aligner try --help lists the options\n"
        )


def test_arguments_may_begin_with_dashes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of("--gpu-memory is a flag", "a").things == ["--gpu-memory is a flag", "a"]
    options = options_of("--gpu-memory=5", "--", "--verbose is a flag", "--debug", "--verbose")
    assert options.things == ["--verbose is a flag", "--debug", "--verbose"]
    assert (options.gpu_memory, options.debug) == (5, False)
    options.processes, commands = 2, []
    monkeypatch.setattr(launch, "run_ranks", lambda command, *unused: commands.append(command))
    start_ranks("try", options)
    assert options_of(*commands[0][3:]).things == options.things


def test_options_may_stand_between_arguments() -> None:
    options = options_of("a=1", "--gpu-memory", "5", "b=2", "--debug")
    assert (options.things, options.gpu_memory, options.debug) == (["a=1", "b=2"], 5, True)


def test_option_values_are_read_and_checked(capsys: Captured) -> None:
    assert names("help, style ,length") == ("help", "style", "length")
    assert names("a,,b") == ("a", "", "b")
    assert names(" ") == ()
    assert (fraction("0.25"), positive("12")) == (0.25, 12)
    for text in ("0", "1", "-0.5"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"got {text}, wanted"):
            fraction(text)
    for text in ("0", "-1", "2.5", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"got '{text}', wanted"):
            positive(text)
    assert [whole(text) for text in ("0", "12")] == [0, 12]
    for parser, argv in ((inspect_parser(), ["a"]), (compare_parser(), ["a", "b"])):
        with pytest.raises(SystemExit):
            parser.parse([*argv, "--show=-1"])
        error = capsys.readouterr().err
        assert "argument --show: got '-1', wanted a whole number, 0 or more" in error


# What Slurm sets in the shell of ``srun --pty bash``, which is the only task of its step.
SLURM_SHELL = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "gpu003",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_JOB_ID": "71002",
}


def test_processes_start_ranks_unless_a_launcher_has_started_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*SLURM_SHELL, *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    launched_twice = "processes: got 2, but torchrun or srun has started this process already"
    for launcher, error in (
        ({}, None),
        (SLURM_SHELL, None),
        ({**SLURM_SHELL, "SLURM_STEP_NUM_TASKS": "8"}, launched_twice),
        (TORCHRUN, launched_twice),
    ):
        with monkeypatch.context() as patch:
            for name, value in launcher.items():
                patch.setenv(name, value)
            assert not starts_ranks(argparse.Namespace(processes=1))
            if error is None:
                assert starts_ranks(argparse.Namespace(processes=2))
            else:
                with pytest.raises(ConfigError, match=error):
                    starts_ranks(argparse.Namespace(processes=2))


def test_ranks_started_in_a_shell_of_slurm_do_not_read_its_variables(tmp_path: Path) -> None:
    program = """
import pathlib, sys
from nemo_aligner.distributed.launch import launch
with launch() as world:
    numbers = f"{world.local_rank} {world.world_size}"
    pathlib.Path(sys.argv[1], str(world.rank)).write_text(numbers)
"""
    variables = tiny.environment(**SLURM_SHELL)
    done = run_local_ranks(["-c", program, str(tmp_path)], variables)
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"0": "0 2", "1": "1 2"}


def failing(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        raise error

    return run


def test_error_is_one_line_and_exit_code_1(capsys: Captured) -> None:
    assert run_verb(failing(DataError("got a")), options_of()) == 1
    assert capsys.readouterr().err == "DataError: got a\n"
    assert run_verb(lambda options: 7, options_of()) == 7


def test_error_with_debug_shows_the_traceback(capsys: Captured) -> None:
    for error in (DataError("got a"), ZeroDivisionError("by zero")):
        assert run_verb(failing(error), options_of("--debug")) == 1
        told = capsys.readouterr().err
        assert told.startswith("Traceback")
        assert told.endswith(f"{type(error).__name__}: {error}\n")


def test_request_that_a_server_refuses_is_in_its_log_with_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def serve(options: argparse.Namespace) -> int:
        failure_of(DataError("got a"))
        return 0

    for more, told in ((), False), (("--debug",), True):
        assert run_verb(serve, options_of(*more)) == 0
        assert ("DataError: got a" in caplog.text) is told


def test_error_that_nobody_foresaw_is_one_screen_and_a_file(capsys: Captured) -> None:
    assert run_verb(failing(ZeroDivisionError("by zero")), options_of()) == 1
    error = capsys.readouterr().err
    assert error.startswith("unexpected ZeroDivisionError: by zero\n")
    assert error.count("\n") == 2
    assert "test_running.py:" in error
    (path,) = re.findall(r"traceback is in (\S+)", error)
    assert Path(path).read_text().startswith("Traceback")
    Path(path).unlink()


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 8 bytes. Error code 12 (Cannot allocate memory)",
    ],
)
def test_full_memory_is_told_with_what_to_lower(capsys: Captured, said: str) -> None:
    assert run_verb(failing(RuntimeError(said)), options_of()) == 1
    error = capsys.readouterr().err
    assert "allocate 2.00 GiB" in error or "allocate 8 bytes" in error
    assert "enforce" not in error
    assert "to use less: a smaller model.micro_batch_tokens" in error


@pytest.mark.parametrize("where", ["load", "run_verb"])
def test_interruption_has_its_exit_code(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """While a verb is imported, and while it runs."""

    def interrupt(*unused: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"nemo_aligner.cli.main.{where}", interrupt)
    assert main(["plan", "--params=8B", "--gpus=8"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_first_process_of_a_container_ends_at_sigterm_before_a_verb_handles_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a pod that is stopped while it loads its model waits for SIGKILL."""
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    monkeypatch.setattr("os.getpid", lambda: 1)
    monkeypatch.setattr(
        "nemo_aligner.cli.main.load", lambda verb: signal.raise_signal(signal.SIGTERM)
    )
    try:
        with pytest.raises(SystemExit) as ended:
            main(["serve"])
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert ended.value.code == 143


def test_error_of_a_missing_module_comes_with_its_command(capsys: Captured) -> None:
    for name, brings in (
        ("pytriton.client", f"install it: pip install -e '{ROOT}[triton]'"),
        ("omegaconf", "activate the environment"),
    ):
        assert run_verb(failing(ModuleNotFoundError("no", name=name)), options_of()) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"the module {name.partition('.')[0]} is not installed in ")
        assert brings in error


def test_error_names_the_flag_where_the_key_has_one(capsys: Captured) -> None:
    shown = {
        "gpu_memory: got 3": "--gpu-memory: got 3",
        "model.optim.lr: got 3": "model.optim.lr: got 3",
        "things: got 3": "things: got 3",
        "other: got 3": "other: got 3",
        "nothing fits": "nothing fits",
    }
    for said in shown:
        for kind in (ConfigError, CheckpointError):
            assert run_verb(failing(kind(said)), options_of()) == 1
            assert capsys.readouterr().err == f"{kind.__name__}: {shown[said]}\n"


def test_score_refuses_what_is_no_conversation_before_it_asks_a_server() -> None:
    wanted = {
        "{": r"got '\{', wanted JSON",
        "[" * 200_000: "wanted JSON",
        '"a text"': "got 'a text', wanted a list of messages",
        "5": "got 5, wanted a sample: a string, or a list of messages",
        "null": "got null, wanted",
        '{"role": "user"}': "got an object with keys 'role', wanted",
        "[]": "got an empty conversation",
        "[5]": r"messages\[0\]: got 5, wanted an object with role and content",
        '[{"role": "assistant", "content": [1]}]': r"messages\[0\].content\[0\]: got a part of",
        '[{"role": "user", "content": "a"}]': "got role 'user', wanted 'assistant'",
    }
    for given, said in wanted.items():
        with pytest.raises(ConfigError, match=f"^--conversation: .*{said}"):
            run_score(score_parser().parse(["--conversation", given]))


def test_score_limits_the_time_of_a_request_and_not_of_a_file(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_aligner.cli.serve._REQUEST_S", 1.0)
    hold = threading.Event()
    server = Misbehaving(lambda texts: time.sleep(0.15)).come()
    server.limit = 1
    command = ["--url", server.url]
    started_at = time.monotonic()
    assert run_score(score_parser().parse(["a"] * 144 + command)) == 0
    assert time.monotonic() - started_at > 1.0
    assert capsys.readouterr().out.count(" -97.0000") == 144
    monkeypatch.setattr("nemo_aligner.cli.serve._REQUEST_S", 0.5)
    server.answer = lambda texts: hold.wait(30) and None if texts == ["b"] else None
    assert run_verb(run_score, score_parser().parse(["a", "b", *command])) == 1
    hold.set()
    server.go()
    assert capsys.readouterr().err == (
        f"ServingError: {server.url}, reward_model: timed out: no answer to a request within "
        "0.5 s; 1 of 2 rows were answered\n"
    )


def test_score_tells_a_rejected_sample_from_one_that_a_judge_fails_on(capsys: Captured) -> None:
    server = Misbehaving().come()
    values = {
        "rewards": ("FP32", [3, 1], [1.0, 0.0, 0.0]),
        "errors": ("BYTES", [3, 1], ["", "it is empty", "judge: no"]),
        "unscored": ("INT32", [3, 1], [0, 0, 1]),
    }
    outputs = [output(name, *value) for name, value in values.items()]
    server.answer = lambda texts: (200, {"outputs": outputs})
    assert run_score(score_parser().parse(["a", "b", "c", "--url", server.url])) == 1
    server.go()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["1.0000 a", "rejected b: it is empty", "unscored c: judge: no"]


def test_score_shows_the_text_that_each_step_reward_is_for(capsys: Captured) -> None:
    """Steps are ranges of the reply alone, whose parts are joined by the contract's separator."""
    steps = StepRewards(
        np.array([[1.0, 0], [2, 0]], np.float32), (StepSpan(1, 0, 3), StepSpan(1, 5, 8))
    )
    values = {"rewards": ("FP32", [1, 2], [2, 0]), "steps": ("BYTES", [1, 1], [steps.to_json()])}
    server = Misbehaving().come()
    server.contract = replace(CONTRACT, scored_position="step_ends", step_separator="\n\n")
    values["contract_hash"] = ("BYTES", [1, 1], [server.contract.hash])
    outputs = [output(name, *value) for name, value in values.items()]
    server.answer = lambda texts: (200, {"outputs": outputs})
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    reply = {"role": "assistant", "content": parts, "reasoning_content": "hidden"}
    conversation = json.dumps([{"role": "user", "content": "why"}, reply])
    command = ["--url", server.url, "--steps", "--conversation", conversation]
    assert run_score(score_parser().parse(command)) == 0
    server.go()
    assert re.findall("step .*", capsys.readouterr().out) == ["step 1: one", "step 2: two"]


def test_serve_example_turns_triton_on_unless_a_setting_or_file_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = []

    def run_server(config: ServeConfig) -> int:
        ports.append(config.server.triton_port)
        return 0

    monkeypatch.setattr("nemo_aligner.serving.run.run_server", run_server)
    file = tmp_path / "serve.yaml"
    file.write_text("server: {triton_port: null}\n")
    for argument in ("server.port=5555", "server.triton_port=7000", f"--config={file}"):
        monkeypatch.setattr("sys.argv", ["serve", "rm_model_file=rm.nemo", argument])
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / "examples/serve_reward_model.py"), run_name="__main__")
    assert ports == [5600, 7000, None]


def test_score_says_which_hash_it_expects(capsys: Captured) -> None:
    assert run_verb(run_score, score_parser().parse(["a", "--expect", "1234"])) == 1
    assert capsys.readouterr().err == (
        "ConfigError: --expect: got '1234', wanted the 64 hexadecimal characters that the server "
        "prints\n"
    )


def test_command_is_shown_as_one_would_type_it() -> None:
    assert show_command("score", ["a b"], "$ ") == "$ nemo-aligner score 'a b'"
    long = 70 * "x"
    assert show_command("train", ["a=1", f"b={long}"], "$ ") == (
        f"$ nemo-aligner train \\\n      a=1 \\\n      b={long}"
    )
    # An option and its value share a line.
    assert show_command("export", ["--input", long, "--merge"]) == (
        f"nemo-aligner export \\\n    --input {long} \\\n    --merge"
    )
