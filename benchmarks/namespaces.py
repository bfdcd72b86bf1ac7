"""Hosts joined by a slow link, on one machine: network namespaces. Needs root and iproute2.

Each host has one interface, `eth0`, the end of a veth pair whose other end is on a bridge. A token bucket at both ends
keeps what the host sends, and what it receives, to the link's rate.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from interrupts import interrupt

NAME = "hvdsparse"  # of the bridge, and the beginning of all other names
DIRECTORY = Path("/run", NAME)  # for temporary files
NETWORK = "198.18.71"  # out of the range that RFC 2544 sets aside for benchmarks
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# A bucket holds so many seconds of the link's rate, which may pass at once. Little, for a whole step of a compression
# may fit in a large bucket, and would then be as fast as if there were no limit.
BURST_S = 250e-6
# The kernel hands packets over in batches of so many bytes; smaller ones cost processor time, larger ones than a bucket
# are taken apart, which costs more.
BATCH_MIN, BATCH_MAX = 16384, 65536

# Open MPI runs this for each host, with the host's name and the words of a shell command. Its daemons would otherwise
# all make the same directory for temporary files: now and then, one of them ends, as another has just made it.
AGENT = f'''host=$1; shift
export TMPDIR="{DIRECTORY}/$host"
mkdir -p "$TMPDIR"
exec ip netns exec "$host" sh -c "$*"
'''


class Hosts(NamedTuple):
    """The names of the namespaces."""

    launcher: str
    """One more host, whose link has no limit: mpirun runs there, to be found, and ended, with all that it starts."""
    names: list[str]

    def set_rate(self, bits_per_s: float | None) -> None:
        """Limit each host's link, in each direction; None: no limit. For connections that are made from now on."""
        burst = BATCH_MAX * 2 if bits_per_s is None else round(bits_per_s / 8 * BURST_S)
        batch = min(max(burst // 2, BATCH_MIN), BATCH_MAX)
        for name in self.names:
            for where, interface in ((["ip", "netns", "exec", name], "eth0"), ([], name)):
                run(*where, "ip", "link", "set", interface, "gso_max_size", str(batch))
                if bits_per_s is None:
                    subprocess.run([*where, "tc", "qdisc", "del", "dev", interface, "root"], capture_output=True)
                else:
                    bucket = ["tbf", "rate", f"{bits_per_s:.0f}bit", "burst", f"{burst}b", "latency", "100ms"]
                    run(*where, "tc", "qdisc", "replace", "dev", interface, "root", *bucket)

    def mpirun(self) -> list[str]:
        """The beginning of a command that runs a program on all hosts, one process on each, with one thread."""
        settings = {
            "plm_rsh_agent": f"sh {DIRECTORY / 'agent'}",
            "plm_rsh_no_tree_spawn": 1,
            "btl": "tcp,self",
            "btl_tcp_if_include": f"{NETWORK}.0/24",
            "oob_tcp_if_include": f"{NETWORK}.0/24",
            "rtc": "^hwloc",  # several daemons on one machine would collide in it
            "mpi_yield_when_idle": 1,  # there may be fewer cores than hosts
        }
        hosts = ",".join(f"{name}:1" for name in self.names)
        command = ["ip", "netns", "exec", self.launcher, "env", f"TMPDIR={DIRECTORY}", f"{sys.prefix}/bin/mpirun"]
        command += ["--allow-run-as-root", "--prefix", sys.prefix, "--bind-to", "none", "-H", hosts]
        command += ["-x", "OMP_NUM_THREADS=1"]
        for name in os.environ:
            if name.startswith("HOROVOD_"):
                command += ["-x", name]
        return command + [word for name, value in settings.items() for word in ("--mca", name, str(value))]


def bytes_sent() -> int:
    """Bytes that this host has sent so far, by its interface's counter. For processes that run on a host."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


@contextmanager
def make_hosts(n: int) -> Iterator[Hosts]:
    """Make n hosts without a limit; remove them in the end, with all that runs on them, also after a signal.

    Raises:
        RuntimeError: hosts cannot be made here, or others are in use.
    """
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        raise RuntimeError("hosts in network namespaces need root, and ip and tc (Debian: the package iproute2)")
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0{NAME}")  # gone with this process, however it ends
        except OSError:
            raise RuntimeError("another process uses hosts in network namespaces: wait for its end") from None
        try:
            for number in SIGNALS:
                signal.signal(number, interrupt)
            remove_hosts()
            DIRECTORY.mkdir()
            (DIRECTORY / "agent").write_text(AGENT)
            run("ip", "link", "add", NAME, "type", "bridge")
            run("ip", "link", "set", NAME, "up")
            names = [f"{NAME}{i}" for i in range(n + 1)]
            for i, name in enumerate(names, 1):
                run("ip", "netns", "add", name)
                run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
                run("ip", "link", "set", name, "master", NAME, "up")
                run("ip", "-n", name, "addr", "add", f"{NETWORK}.{i}/24", "dev", "eth0")
                for interface in ("lo", "eth0"):
                    run("ip", "-n", name, "link", "set", interface, "up")
                # Not the machine's own choice: it may pace by what it believes the link to be. Every kernel has this.
                congestion_control = "/proc/sys/net/ipv4/tcp_congestion_control"
                run("ip", "netns", "exec", name, "sh", "-c", f"echo reno > {congestion_control}")
            yield Hosts(names[0], names[1:])
        finally:
            for number in SIGNALS:  # nothing may cut the removal short
                signal.signal(number, signal.SIG_IGN)
            remove_hosts()
            for number, handler in handlers.items():
                signal.signal(number, handler)


def remove_hosts() -> None:
    """Remove all hosts, the bridge and the files, if there are any: also what a killed process has left."""
    for name in run("ip", "netns", "list").split():
        if name.startswith(NAME):
            for pid in run("ip", "netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            run("ip", "netns", "del", name)
            # The namespace lives until its last process has ended, and the other end of its interface with it.
            subprocess.run(["ip", "link", "del", name], capture_output=True)
    subprocess.run(["ip", "link", "del", NAME], capture_output=True)
    shutil.rmtree(DIRECTORY, ignore_errors=True)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
