"""Ranks for a bench: processes of this machine over gloo, on loopback or each behind a link of a given rate.

A bench writes a class. Every rank makes one object of it, in a process of its own, when ``torch.distributed`` is up;
the bench then calls methods of all these objects at once, and takes turns by calling one method after the other::

    class Side:                                            # in the file of the bench
        def __init__(self, size: int) -> None:             # dist.get_rank() works here
            self.tensor = torch.ones(size)

        def turn(self, steps: int) -> float:               # arguments and results are JSON
            ...

    with rank_group(Side, 2, {"size": 10}, bits_per_second=1e9) as group:    # without a rate: loopback
        for _ in range(rounds):
            seconds = group.call("turn", steps=8)          # what rank 0 and rank 1 returned
        received = [one.received for one in group.interface_bytes()]

Links need root, ``ip``, ``tc``, ``unshare`` and ``nsenter``: ``why_no_links()`` says what is missing. Each rank then
has a network namespace with one interface on a common bridge; ``tc tbf`` limits both directions of it. The namespaces
have no names: they end with the processes in them, also when the bench is killed.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import selectors
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from geartrain.ams.values.errors import ConfigError, GeartrainError

BURST_BYTES = 128 << 10
"""Burst of a link: at least the largest packet of a virtual interface, 64 KiB."""
QUEUE_MILLISECONDS = 500
"""Longest time in a link's queue. Packets of several ranks that send to one at once are queued rather than dropped."""
INTERFACE = "uplink"
END_SECONDS = 10.0
"""Time for a process to end before it is killed."""
TELL_SECONDS = 1.0
"""Wait for the others' errors once a rank has failed: the first to fail may only miss another one."""


class InterfaceBytes(NamedTuple):
    """Bytes through a rank's interface since its creation, headers included."""

    received: int
    sent: int


class RankFailed(GeartrainError):
    """A rank of a bench raised, or its process ended."""


class RankGroup:
    """Running ranks; made by :func:`rank_group`."""

    def __init__(self, ranks: list[subprocess.Popen[str]], namespaces: list[int]) -> None:
        """``namespaces``: for each rank the id of a process in its namespace; empty on loopback."""
        self._ranks = ranks
        self._namespaces = namespaces

    def call(self, method: str, /, **arguments: Any) -> list[Any]:
        """Call a method of every rank's object; return each result, by rank.

        Raises:
            RankFailed: it raised somewhere, or a process ended. The other ranks are still in the call then, so that the
                group takes no further calls.
        """
        for rank in self._ranks:
            _write(rank, [method, arguments])
        return _replies(self._ranks)

    def limit(self, bits_per_second: float) -> None:
        """Set another rate for each rank from now on, at most the initial one."""
        for spoke in self._namespaces:
            _run_inside(spoke, f"tc qdisc change dev {INTERFACE} {_limit(bits_per_second)}")

    def interface_bytes(self) -> list[InterfaceBytes]:
        """Return the counters of every rank's interface; the difference of two reads is the traffic of a call.

        Raises:
            ConfigError: the ranks are on loopback, which all share.
        """
        if not self._namespaces:
            raise ConfigError("interfaces of ranks are counted where bits_per_second is given; loopback is shared")
        return [_counters(process) for process in self._namespaces]


@contextmanager
def rank_group(
    kind: type,
    num_ranks: int,
    arguments: Mapping[str, Any] | None = None,
    *,
    bits_per_second: float | None = None,
    threads: int = 1,
    timeout_seconds: float = 120.0,
) -> Iterator[RankGroup]:
    """Processes with an object ``kind(**arguments)`` each, which know each other by torch.distributed over gloo.

    Args:
        kind: a class at the top of a file, which every rank imports from there.
        num_ranks: how many; the environment of each is as torchrun makes it.
        arguments: JSON, the same for every rank.
        bits_per_second: of each rank's interface, in each direction; None: loopback.
        threads: of torch, in each rank.
        timeout_seconds: how long a collective waits for a rank.

    Raises:
        ConfigError: a rate is given, and this machine cannot make such links.
        RankFailed: a rank could not be made.
    """
    if num_ranks < 1:
        raise ConfigError(f"num_ranks is {num_ranks}; it must be at least 1")
    if bits_per_second is not None and (why := why_no_links()):
        raise ConfigError(f"ranks behind links of {bits_per_second:g} bits/s cannot be had here: {why}")
    with ExitStack() as ends:
        namespaces, addresses = [], ["127.0.0.1"] * num_ranks
        if bits_per_second is not None:
            namespaces = linked_namespaces(ends, num_ranks, bits_per_second)
            addresses = [address_of(rank) for rank in range(num_ranks)]
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        environ |= {"MASTER_ADDR": addresses[0], "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        environ |= {"GLOO_SOCKET_IFNAME": INTERFACE if namespaces else "lo", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = []
        for rank in range(num_ranks):
            prefix = [*inside(namespaces[rank])] if namespaces else []
            own = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(ends.enter_context(_process([*prefix, sys.executable, __file__], own)))
        (port,) = _replies(ranks[:1])
        what = {"file": inspect.getfile(kind), "name": kind.__qualname__, "arguments": dict(arguments or {})}
        for item in ranks:
            _write(item, {**what, "port": port, "timeout_seconds": timeout_seconds})
        _replies(ranks)
        yield RankGroup(ranks, namespaces)


def why_no_links() -> str:
    """Return why this machine cannot put ranks behind links of a given rate; empty if it can."""
    for program in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"there is no {program!r} (of iproute2 and util-linux)"
    links = "ip link add end1 type veth peer name end2 && ip link add hub type bridge"
    tried = f"{links} && tc qdisc add dev end1 root tbf rate 1mbit burst 128kb latency 1ms"
    done = subprocess.run(["unshare", "--net", "sh", "-c", tried], capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    return f"network namespaces need root and a kernel with tbf: {said}" if done.returncode else ""


def linked_namespaces(ends: ExitStack, num_ranks: int, bits_per_second: float) -> list[int]:
    """Return ids of processes, each alone in a namespace whose interface, at :func:`address_of`, leads to one
    bridge."""
    hub, *spokes = [ends.enter_context(_namespace()) for _ in range(num_ranks + 1)]
    _run_inside(hub, "ip link add bridge type bridge", "ip link set bridge up")
    limit = _limit(bits_per_second)
    for rank, spoke in enumerate(spokes):
        port = f"port{rank}"
        _run_inside(
            hub,
            f"ip link add {port} type veth peer name {INTERFACE} netns {spoke}",
            f"ip link set {port} master bridge up",
            f"tc qdisc add dev {port} {limit}",
        )
        _run_inside(
            spoke,
            "ip link set lo up",
            f"ip address add {address_of(rank)}/16 dev {INTERFACE}",
            f"ip link set {INTERFACE} up",
            f"tc qdisc add dev {INTERFACE} {limit}",
        )
    return spokes


def _limit(bits_per_second: float) -> str:
    return f"root tbf rate {round(bits_per_second)}bit burst {BURST_BYTES} latency {QUEUE_MILLISECONDS}ms"


@contextmanager
def _namespace() -> Iterator[int]:
    """The id of a process in a new network namespace; it ends with its input, so also when this process is killed."""
    with _process(["unshare", "--net", "sh", "-c", "echo && exec cat"], dict(os.environ)) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RankFailed("'unshare --net' failed; what it said is on stderr")
        yield process.pid


@contextmanager
def _process(command: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with its input, or is killed if it does not."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdin is not None
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()


def inside(process: int) -> list[str]:
    """Return the command prefix that runs a command in the namespace of a process."""
    return ["nsenter", f"--target={process}", "--net"]


def _run_inside(process: int, *commands: str) -> None:
    for command in commands:
        subprocess.run([*inside(process), *command.split()], check=True)


def address_of(rank: int) -> str:
    """Return the host of a rank, or of another process in a namespace of its own."""
    return f"10.201.{rank // 250}.{rank % 250 + 1}"


def _counters(process: int) -> InterfaceBytes:
    lines = Path(f"/proc/{process}/net/dev").read_text(encoding="ascii").splitlines()
    (numbers,) = [line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{INTERFACE}:")]
    return InterfaceBytes(received=int(numbers[0]), sent=int(numbers[8]))


def _write(rank: subprocess.Popen[str], message: Any) -> None:
    assert rank.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, which its missing reply will tell
        print(json.dumps(message), file=rank.stdin, flush=True)


def _replies(ranks: list[subprocess.Popen[str]]) -> list[Any]:
    """A reply of each; raises soon after one of them has failed, for the others may be waiting for it."""
    replies: dict[int, Any] = {}
    failures: dict[int, str] = {}
    with selectors.DefaultSelector() as arriving:
        for number, rank in enumerate(ranks):
            assert rank.stdout is not None
            arriving.register(rank.stdout, selectors.EVENT_READ, number)
        while arriving.get_map():
            ready = arriving.select(TELL_SECONDS if failures else None)
            for key, _ in ready:
                arriving.unregister(key.fileobj)
                line = key.fileobj.readline()  # type: ignore[union-attr]
                reply = json.loads(line) if line else {"failure": "its process ended"}
                if "failure" in reply:
                    failures[key.data] = reply["failure"]
                else:
                    replies[key.data] = reply["result"]
            if failures and not ready:
                break
    if failures:
        raise RankFailed("; ".join(f"rank {number} failed: {failures[number]}" for number in sorted(failures)))
    return [replies[number] for number in range(len(ranks))]


def _serve() -> None:
    """A rank: makes its object, then answers each line [method, arguments]; what it prints goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def reply(**what: Any) -> None:
            print(json.dumps(what), file=answers, flush=True)

        try:
            _serve_calls(reply)
        except Exception:  # of any kind: the bench is to hear of it
            reply(failure=traceback.format_exc())
    # Other ranks may be gone or still in a collective: nothing is left to tidy up, and to wait for them would not end.
    sys.stderr.flush()
    os._exit(0)


def _serve_calls(reply: Any) -> None:
    import torch
    import torch.distributed as dist

    store = None
    if os.environ["RANK"] == "0":
        store = dist.TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
        reply(result=store.port)
    asked = json.loads(sys.stdin.readline())
    os.environ["MASTER_PORT"] = str(asked["port"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=asked["timeout_seconds"]))
    made = getattr(_module(Path(asked["file"])), asked["name"])(**asked["arguments"])
    reply(result=None)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        reply(result=getattr(made, method)(**arguments))
    del store


def _module(path: Path) -> Any:
    """The file of a bench, which finds its helpers as it does in the bench."""
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(path.parent), str(here), str(here.parent / "examples")]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _serve()
