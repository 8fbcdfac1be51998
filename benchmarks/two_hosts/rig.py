"""Two hosts on one machine: network namespaces joined by a veth pair whose bandwidth is set.

::

    hpov-<pid>-0                                hpov-<pid>-1
    lo    ranks 0 and 1, not limited            lo    ranks 2 and 3, not limited
    slow  10.255.203.1/24  <------ veth ------> slow  10.255.203.2/24
          tbf, rate R                                 tbf, rate R

Both ends of the link are made inside the namespaces, so nothing of it is ever seen outside. The
names carry the process id: namespaces of a run that is dead are found and deleted by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

DEVICE = "slow"
ADDRESSES = ("10.255.203.1", "10.255.203.2")
PORT = 29511  # each run has a network of its own
PREFIX = "hpov"
# twice the largest packet: below it, the kernel cuts packets at the cost of much CPU; near it, a
# timer that is late by a moment loses bandwidth; far above, small exchanges pass for free
BURST = "128kb"


class Unavailable(RuntimeError):
    """This machine has no two hosts, for the reason given."""


def namespaces(pid: int) -> tuple[str, str]:
    """Return the names of the two hosts of process ``pid``."""
    return f"{PREFIX}-{pid}-0", f"{PREFIX}-{pid}-1"


def setup_commands(hosts: tuple[str, str]) -> list[list[str]]:
    """Return what makes the two hosts and the link between them."""
    a, b = hosts
    link = f"ip link add {DEVICE} netns {a} type veth peer name {DEVICE} netns {b}"
    commands = [f"ip netns add {a}", f"ip netns add {b}", link]
    for host, address in zip(hosts, ADDRESSES, strict=True):
        commands += [
            f"ip -n {host} link set lo up",
            f"ip -n {host} addr add {address}/24 dev {DEVICE}",
            f"ip -n {host} link set {DEVICE} up",
        ]
    return [command.split() for command in commands]


def rate_command(mbit: float, host: str | None = None) -> list[str]:
    """Return what sets the rate that leaves a host; inside of it ``host`` is not needed."""
    namespace = [] if host is None else ["-n", host]
    rate = f"qdisc replace dev {DEVICE} root tbf rate {mbit:g}mbit burst {BURST} latency 50ms"
    return ["tc", *namespace, *rate.split()]


def delete_command(host: str) -> list[str]:
    """Return what deletes a host; its end of the link goes with it, and so the other end."""
    return ["ip", "netns", "del", host]


def stale(listing: str, is_alive: Callable[[int], bool]) -> list[str]:
    """Return the hosts in the output of ``ip netns list`` whose run is dead."""
    found = re.findall(rf"(?m)^({PREFIX}-(\d+)-[01])\b", listing)
    return [host for host, pid in found if not is_alive(int(pid))]


def is_alive(pid: int) -> bool:
    """Say whether there is a process ``pid``."""
    return Path(f"/proc/{pid}").exists()


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise Unavailable(f"`{' '.join(command)}` failed: {lines[-1]}")
    return done.stdout


def _delete(hosts: Iterable[str]) -> None:
    """End what still runs in the hosts, all of it started by a run of this rig; delete them."""
    for host in hosts:
        try:
            for pid in _call(["ip", "netns", "pids", host]).split():
                os.kill(int(pid), signal.SIGKILL)
        except (Unavailable, ProcessLookupError):
            pass  # it was never made, or its processes have just ended
        subprocess.run(delete_command(host), capture_output=True, timeout=30, check=False)


class TwoHosts:
    """The two hosts, for as long as the context lasts."""

    def __init__(self) -> None:
        self.hosts = namespaces(os.getpid())
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> TwoHosts:
        """Make the hosts, or raise `Unavailable`."""
        if os.geteuid() != 0:
            raise Unavailable("network namespaces need root")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise Unavailable(f"there is no `{tool}` (iproute2)")
        _delete(stale(_call(["ip", "netns", "list"]), is_alive))
        try:
            for command in setup_commands(self.hosts):
                _call(command)
            self.set_rate(1000)
        except BaseException:  # Ctrl-C too: __exit__ does not run for what __enter__ left half made
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Delete the hosts."""
        self.close()

    def close(self) -> None:
        """End the run and delete the hosts; a second signal does not interrupt it."""
        ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, signal.SIG_IGN) for number in ends}
        try:
            for process in self.processes:
                if process.poll() is None:
                    process.terminate()
            _delete(self.hosts)
            for process in self.processes:
                process.wait(timeout=30)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def set_rate(self, mbit: float) -> None:
        """Set what may leave each host, in megabits per second."""
        for host in self.hosts:
            _call(rate_command(mbit, host))

    def run(self, program: Sequence[str], *, python: str, limit: float) -> None:
        """Run ``program`` under torchrun, two ranks on each host, for ``limit`` seconds at most."""
        deadline = time.monotonic() + limit
        with ExitStack() as files:
            logs = [files.enter_context(tempfile.TemporaryFile()) for _ in self.hosts]
            for node, host in enumerate(self.hosts):
                self.processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", host, *torchrun(python, node), *program],
                        env={**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"},
                        stdout=None if node == 0 else subprocess.DEVNULL,
                        stderr=logs[node],
                        start_new_session=True,  # a Ctrl-C is for this process, which cleans up
                    )
                )
            while any(process.poll() is None for process in self.processes):
                if any(process.poll() for process in self.processes):
                    break  # the other host would wait for this one until its timeout
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the run took more than {limit:g} s")
                time.sleep(0.2)
            if any(process.poll() != 0 for process in self.processes):
                raise RuntimeError("a rank failed:\n" + "\n".join(_tail(log) for log in logs))


def torchrun(python: str, node: int) -> list[str]:
    """Return the command that starts the two ranks of host ``node``."""
    options = f"--nnodes 2 --nproc-per-node 2 --node-rank {node} --master-addr {ADDRESSES[0]}"
    return [python, "-m", "torch.distributed.run", *options.split(), "--master-port", str(PORT)]


def _tail(log: IO[Any], size: int = 3000) -> str:
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - size))
    return str(log.read().decode(errors="replace"))
