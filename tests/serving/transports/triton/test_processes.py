"""Ports, the ready file, and which processes are there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_aligner.errors import ServingError
from nemo_aligner.serving.transports.triton.processes import (
    free_port,
    is_running,
    triton_processes,
)


def test_a_port_is_the_one_asked_for_or_a_free_one() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        with pytest.raises(ServingError, match=rf"server.port: 127.0.0.1:{taken} is not free: "):
            free_port("127.0.0.1", taken)
    assert free_port("127.0.0.1", taken) == taken
    assert 20_000 <= free_port("127.0.0.1", 0) < 32_000


def test_a_host_of_another_machine_has_no_free_port() -> None:
    with pytest.raises(ServingError, match=r"server.host: 192.0.2.1: no free port was found"):
        free_port("192.0.2.1", 0)


def test_a_process_runs_until_it_ends() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_running(child.pid)
    assert triton_processes(child.pid) == {}
    child.communicate(b"\n")
    assert not is_running(child.pid)


def test_tritons_processes_are_found_by_name_among_descendants(tmp_path: Path) -> None:
    program = tmp_path / "tritonserver"
    program.symlink_to("/bin/sleep")
    shell = subprocess.Popen(["/bin/sh", "-c", f"{program} 60 & echo $!; wait"], stdout=-1)
    try:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        while (name := Path(f"/proc/{pid}/comm").read_text().strip()) != "tritonserver":
            assert name == "sh"  # not yet replaced by the program
        assert triton_processes(shell.pid) == {pid: "Triton's server"}
        assert pid in triton_processes(os.getpid())
        assert triton_processes(pid + 1) == {}
    finally:
        os.kill(pid, 9)
        shell.communicate()
