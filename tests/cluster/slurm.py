"""A Slurm of two nodes on this machine: Debian's own daemons, in one folder, for as long as a ``with`` block.

Each node's slurmd, and so all of its jobs' processes, has a namespace of process ids of its own: ranks of different
nodes cannot reach each other's memory, as on two machines, and what is left of a node ends with its slurmd. That takes
root. Node names are addresses of the loopback interface, since jobs connect to the name of their first node.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

NODES = ("127.0.0.1", "127.0.0.2")
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "unshare")
START_S = 60.0

#: ``cred_expire`` is also how long a job waits between being requeued and starting again; 5 s is the least.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SlurmdTimeout=20
KillWait=5
ReturnToService=2
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}\n"
PARTITION = "PartitionName=all Nodes=ALL Default=YES State=UP\n"


def find_missing_tools() -> str:
    """What this machine lacks for it, or ""."""
    absent = [tool for tool in TOOLS if shutil.which(tool, path=_daemon_search_path()) is None]
    if absent:
        return f"no {', '.join(absent)}: on Debian, apt install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "not root, which namespaces take"


class SlurmCluster:
    """Submit jobs and watch them; made by ``run_slurm_cluster``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _daemon_search_path()}

    def ask(self, *command: str, **variables: str) -> str:
        """What a command of Slurm's says; it gets half a minute."""
        asked = subprocess.run(
            command, env=self.variables | variables, capture_output=True, text=True, timeout=30, check=False
        )
        assert asked.returncode == 0, f"{' '.join(command)}: {asked.stderr}"
        return asked.stdout

    def submit(self, *arguments: str, **variables: str) -> str:
        """The number of a new job."""
        return self.ask("sbatch", "--parsable", *arguments, **variables).strip()

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, timeout_s: float) -> str:
        """The state that a job ends in."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_until_met(lambda: self.facts(job)["JobState"] in ended, timeout_s, lambda: str(self.facts(job)))
        return self.facts(job)["JobState"]


def wait_until_met(met: Callable[[], bool], timeout_s: float, state: Callable[[], str]) -> None:
    """Wait until ``met()``; fail with ``state()`` where it takes longer."""
    deadline_s = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {state()}"
        time.sleep(0.2)


@contextmanager
def run_slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Run a Slurm whose nodes are idle; ``folder`` must be reachable by all users (munge asks for it)."""
    for path in (folder / "state", *(folder / f"spool.{name}" for name in NODES)):
        path.mkdir(parents=True)
    host, ports = socket.gethostname(), free_ports(1 + len(NODES))
    nodes = "".join(
        NODE.format(name=name, host=host, port=port, cpus=os.cpu_count())
        for name, port in zip(NODES, ports[1:], strict=True)
    )
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, ports=ports, folder=folder) + nodes + PARTITION)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    slurm = SlurmCluster(folder)
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munged.seed"}
    munged = ["munged", "--foreground", *(f"--{option}={folder / name}" for option, name in files.items())]
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with ExitStack() as stack:
        stack.enter_context(_run_daemon(slurm, "munged", munged))
        _await_slurm(slurm, "munged", (folder / "munge.socket").exists)
        stack.enter_context(_run_daemon(slurm, "slurmctld", ["slurmctld", "-D", "-i"]))
        for name in NODES:
            # The end of unshare is that of all in its namespace; SIGTERM it would hand on, and wait.
            stack.enter_context(_run_daemon(slurm, f"slurmd.{name}", [*alone, "slurmd", "-D", "-N", name], kill=True))

        def idle() -> bool:
            seen = subprocess.run(
                ["sinfo", "--noheader", "--format=%T %D"], env=slurm.variables, capture_output=True, text=True
            )
            return seen.stdout.split() == ["idle", str(len(NODES))]

        _await_slurm(slurm, "the nodes", idle)
        yield slurm


@contextmanager
def _run_daemon(slurm: SlurmCluster, name: str, command: list[str], kill: bool = False) -> Iterator[None]:
    with (
        (slurm.folder / f"{name}.log").open("wb") as log,
        subprocess.Popen(
            command, env=slurm.variables, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        ) as process,
    ):
        try:
            yield
        finally:
            if not kill:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            process.kill()


def _await_slurm(slurm: SlurmCluster, what: str, there: Callable[[], bool]) -> None:
    def said() -> str:
        logs = sorted(slurm.folder.glob("*.log"))
        return "\n".join(f"{what} did not come; {log.name}:\n{log.read_text()[-2000:]}" for log in logs)

    wait_until_met(there, START_S, said)


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _daemon_search_path() -> str:
    """Where daemons are as well, of which a user's path may not know."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
