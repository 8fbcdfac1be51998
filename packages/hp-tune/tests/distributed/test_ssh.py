"""Nodes behind a real ssh: this machine twice, under a server of our own."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hp_tune.torchrun import Launcher

from ._marked import JOBS, Marked, wait_for

PROGRAMS = {
    name: shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    for name in ("sshd", "ssh", "ssh-keygen")
}
MISSING = [name for name, path in PROGRAMS.items() if path is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)} (packages openssh-server, openssh-client)"
)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What runs a command on this machine behind ssh: own server, port, and keys."""
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(
            [str(PROGRAMS["ssh-keygen"]), "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
            check=True,
        )
    if os.geteuid() == 0:  # as the server's own start script does
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for _ in range(9):  # until the port that was free is still free
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\n"
            f"UsePAM no\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\n"
            "PermitRootLogin yes\n"
        )
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [str(PROGRAMS["sshd"]), "-D", "-e", "-f", folder / "config"], stderr=log
            )
        options = (
            f"-p {port} -i {folder}/user -F none -o BatchMode=yes -o IdentitiesOnly=yes "
            "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        )
        found = f"ssh {options} {getpass.getuser()}@127.0.0.1"
        try:
            assert wait_for(lambda: _answers(found) or server.poll() is not None)  # noqa: B023
            if server.poll() is None:
                yield found
                return
        finally:
            server.terminate()
            server.wait(timeout=300)
    raise AssertionError((folder / "log").read_text())


def _answers(prefix: str) -> bool:
    done = subprocess.run(
        [*shlex.split(prefix), "true"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    time.sleep(0.05)
    return done.returncode == 0


def test_two_nodes_behind_ssh_are_one_job(prefix: str, tmp_path: Path) -> None:
    """The first one is asked for its address; both come to one world and end with nothing left."""
    marked = Marked()
    launcher = Launcher(nproc_per_node=2, hosts=(prefix, prefix), env=marked.environment)
    job = launcher.run("toy_job", {"do": "answer"}, folder=tmp_path / "a job", timeout=600)

    assert job.ok, (job.stderr_tail, job.failed_ranks)
    assert job.answer == {"ranks": 4, "backend": "cpu-gloo"}
    assert marked.pids() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_behind_ssh_outlives_its_controller(
    prefix: str, tmp_path: Path, number: signal.Signals
) -> None:
    """No signal goes through ssh: a node ends when the pipe from the controller does."""
    marked = Marked()
    process = subprocess.Popen(
        [sys.executable, str(JOBS / "controller.py"), str(tmp_path / "job"), prefix, prefix],
        env={**os.environ, **marked.environment},
    )
    ranks = [tmp_path / "job" / f"rank{rank}.json" for rank in range(4)]
    assert wait_for(lambda: all(path.exists() for path in ranks))
    states = [json.loads(path.read_text())["state"] for path in ranks]
    assert states == ["running"] * 4
    process.send_signal(number)
    process.wait(timeout=300)

    assert wait_for(lambda: marked.pids() == [])
