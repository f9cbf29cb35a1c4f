"""Checks of ``geartrain doctor``: each yields a finding and, where something is wrong, the remedy.

The only change on disk is one small file, written and removed in the folder whose disk is measured.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from geartrain.ams.observe.failpoints import VARIABLE
from geartrain.ams.values.config import ClientConfig, ClusterConfig, split_address
from geartrain.ams.values.errors import AccessDenied, GeartrainError
from geartrain.ams.values.text import counted
from geartrain.launch.ports import is_taken, role_at, user_of
from geartrain.launch.roles import ROLES

Verdict = Literal["ok", "warn", "fail"]

DISK_GIB = 10.0
"""Free space required by default."""
NUM_SYNCS, SYNC_BYTES = 20, 4096
SLOW_SYNC_SECONDS = 0.05
OPEN_FILES = 1024
SHARED_MEMORY_MIB = 128
MEMORY_GIB = 2.0
CLOCK_SECONDS = 1.0
_ANSWER_SECONDS = 1.0
_SHARED_MEMORY = Path("/dev/shm")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    state: Verdict
    found: str
    remedy: str = ""
    """Remedy; empty where all is well."""


def _judged(check: str, well: bool, found: str, remedy: str, otherwise: Verdict = "warn") -> Finding:
    return Finding(check, "ok", found) if well else Finding(check, otherwise, found, remedy)


def examine(
    config: ClusterConfig,
    folder: Path,
    *,
    scheduler: str | None = None,
    disk_gib: float = DISK_GIB,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """Yield every finding; takes about a second. ``scheduler`` is the address of a running cluster, or None."""
    yield check_versions()
    yield check_core()
    yield check_gpu()
    for name in ROLES:
        yield check_port(f"{name} port", getattr(config, name).listen)
    yield from check_cluster(scheduler)
    yield from check_disk(folder, disk_gib)
    yield check_open_files()
    yield check_shared_memory()
    yield check_huge_pages()
    yield check_machine()
    yield check_cpus()
    yield check_failpoints(environ)


def check_versions() -> Finding:
    """Check Python and the packages that Geartrain needs, with their versions."""
    wrong = []
    for text in importlib.metadata.requires("geartrain") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} is {installed}, not {requirement.specifier}")
    names = ("geartrain", "torch", "grpcio", "numpy")
    found = ", ".join([f"python {platform.python_version()}", *(f"{name} {_version(name)}" for name in names)])
    found = "; ".join([found, *wrong])
    return _judged("versions", not wrong, found, f"{sys.executable} -m pip install geartrain", "fail")


def check_core() -> Finding:
    """Check that the compiled kernels load; report the processor features they use."""
    try:
        from geartrain.ams.kernels import ops

        uses = f"{ops.isa()}, rows ahead in {ops.lookahead()}"
    except (ImportError, AttributeError) as exc:  # or the core is of an earlier version
        return Finding("core", "fail", f"the compiled core does not load: {exc}", "build it anew: pip install -e .")
    names = [name for name in ("GEARTRAIN_ISA", "GEARTRAIN_LOOKAHEAD") if os.environ.get(name)]
    found = f"built for {platform.machine()}, uses {uses}"
    forced = " and ".join(f"{name}={os.environ[name]}" for name in names)
    return _judged("core", not names, f"{found}, forced by {forced}" if names else found, f"unset {' '.join(names)}")


def check_gpu() -> Finding:
    """Check for a GPU, and that torch is built for it. (Training on a CPU is no fault.)"""
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        return Finding("gpu", "ok", "none: workers train on the CPU")
    torch = _version("torch")
    is_cpu = torch.endswith("+cpu")
    found = f"{', '.join(devices)}, {f'but torch {torch} is a CPU build' if is_cpu else f'torch {torch}'}"
    return _judged("gpu", not is_cpu, found, "install a CUDA build of torch")


def check_port(check: str, listen: str) -> Finding:
    """Check that a role could listen at ``listen``, or name the role that does."""
    _, port = split_address(listen)
    if port == 0:
        return Finding(check, "ok", f"{listen}: any free port")
    elsewhere = "choose another address (--listen)"
    try:
        if not is_taken(listen):
            return Finding(check, "ok", f"{listen}: free")
    except OSError as exc:
        return Finding(check, "fail", f"{listen}: {(exc.strerror or str(exc)).lower()}", elsewhere)
    if (pong := role_at(listen)) is not None:
        return Finding(check, "ok", f"{listen}: a {pong.role} of Geartrain serves there (process {pong.pid})")
    return Finding(check, "fail", f"{listen}: {user_of(port)} uses it", f"end that process, or {elsewhere}")


def check_cluster(scheduler: str | None) -> Iterator[Finding]:
    """Check that the cluster answers and is complete, and the difference of its clocks to this machine's."""
    if scheduler is None:
        yield Finding("cluster", "ok", "skipped: no --scheduler HOST:PORT was given")
        return
    from geartrain.ams.client.cluster_status import cluster_status
    from geartrain.ams.client.scheduler_calls import remedy_for_absent

    try:
        status = cluster_status(scheduler, config=ClientConfig(connect_timeout_seconds=_ANSWER_SECONDS))
    except GeartrainError as exc:
        remedy = "start it ('geartrain up'), or correct --scheduler"
        if isinstance(exc, AccessDenied):
            remedy = "the cluster is up: look at the log of its scheduler, which says why"
        yield Finding("cluster", "fail", str(exc), remedy)
        return
    states = [entry.state for entry in status.shards]
    absent = [f"shard {entry.shard} is {entry.state}" for entry in status.shards if entry.state != "up"]
    found = f"scheduler {scheduler}, {counted(status.num_shards, 'shard')}, version {status.cluster_version}"
    if absent:
        yield Finding("cluster", "fail", f"{found}; {', '.join(absent)}", remedy_for_absent(states, scheduler))
    elif lost := status.incomplete_tables:
        found = f"{found}, all up; incomplete tables: {', '.join(map(repr, lost))}"
        yield Finding(
            "cluster",
            "warn",
            found,
            "a shard with rows of them was restarted, or their making or drop was cut off, or they are being restored "
            "just now: wait, or 'geartrain table drop' them, or restore a snapshot in their place",
        )
    else:
        yield Finding("cluster", "ok", f"{found}, all up")
    ahead = {shard.shard: shard.clock_ahead_seconds for shard in status.shards if shard.clock_ahead_seconds is not None}
    if not ahead:
        yield Finding("clock", "ok", "skipped: no shard told its time (the scheduler never does)")
        return
    worst = max(ahead, key=lambda shard: abs(ahead[shard]))
    found = f"that of shard {worst} is {abs(ahead[worst]):.3f} s {'ahead of' if ahead[worst] > 0 else 'behind'} ours"
    remedy = "run an NTP client on all machines: logs and ages of snapshots mislead (leases do not use this clock)"
    yield _judged("clock", abs(ahead[worst]) <= CLOCK_SECONDS, found, remedy)


def check_disk(folder: Path, disk_gib: float = DISK_GIB) -> Iterator[Finding]:
    """Check the free space of the snapshot disk, and its time for a small synced write."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = psutil.disk_usage(str(existing)).free / _GIB
    found = f"{free:.1f} GiB free in {existing}"
    remedy = f"free space there, or put snapshots elsewhere ({disk_gib:g} GiB are asked for; --disk-gib changes it)"
    yield _judged("disk", free >= disk_gib, found, remedy, "fail")
    try:
        seconds = sorted(_sync_seconds(existing))
    except OSError as exc:
        yield Finding("fsync", "fail", f"{existing}: {exc.strerror or exc}", "give a folder that can be written")
        return
    median, p99 = statistics.median(seconds), seconds[min(len(seconds) - 1, round(0.99 * len(seconds)))]
    found = f"median {median * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms of {len(seconds)} writes of {SYNC_BYTES} bytes"
    remedy = "snapshots will take long: use a local disk, or a faster one"
    yield _judged("fsync", median <= SLOW_SYNC_SECONDS, found, remedy)


def check_open_files() -> Finding:
    """Check how many files and connections a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"at most {soft} (hard limit {hard})"
    return _judged("open files", soft >= OPEN_FILES, found, f"ulimit -n {min(hard, 65536)}")


def check_shared_memory() -> Finding:
    """Check the shared memory in which DataLoader workers pass batches."""
    if not _SHARED_MEMORY.is_dir():
        return Finding("shared memory", "warn", f"there is no {_SHARED_MEMORY}", "mount a tmpfs there")
    free = psutil.disk_usage(str(_SHARED_MEMORY)).free / 2**20
    remedy = "DataLoader workers may die of it: docker run --shm-size=1g, or remove old files there"
    return _judged("shared memory", free >= SHARED_MEMORY_MIB, f"{free:.0f} MiB free in {_SHARED_MEMORY}", remedy)


def check_huge_pages() -> Finding:
    """Check that row slabs can use huge pages."""
    try:
        text = _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return Finding("huge pages", "ok", "skipped: this system does not tell")
    chosen = text.partition("[")[2].partition("]")[0]
    remedy = f"as root: echo madvise > {_HUGE_PAGES}; random reads of rows are slower without"
    return _judged("huge pages", chosen != "never", chosen, remedy)


def check_machine() -> Finding:
    """Check cores and memory, and whether other processes use them."""
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory()
    load = psutil.getloadavg()[0]
    gib = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    found = f"{counted(cores, 'core')} (load {load:.1f}), {gib}"
    if memory.available < MEMORY_GIB * _GIB:
        return Finding("machine", "warn", found, "end other programs: little memory is left for rows")
    return _judged("machine", load <= 2 * cores, found, "others use the cores: figures taken now mean little")


def check_cpus() -> Finding:
    """Check the CPUs of this machine's shards: two should not be bound to the same one."""
    on: dict[str, list[str]] = {}
    for pid in psutil.pids():
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError):  # the process has ended
                if (task / "comm").read_text().strip() == "geartrain-data":
                    status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                    on.setdefault(status["Cpus_allowed_list"].strip(), []).append(str(pid))
    if not on:
        return Finding("cpus", "ok", "no shard works here")
    found = "; ".join(
        f"{counted(len(pids), 'shard')} on {cpus} (process {', '.join(pids)})" for cpus, pids in on.items()
    )
    is_shared = any(cpus.isdigit() and len(pids) > 1 for cpus, pids in on.items())
    return _judged("cpus", not is_shared, found, "give each process CPUs of its own, as many as shards: server --cpus")


def check_failpoints(environ: Mapping[str, str]) -> Finding:
    """Check that no fault injection is armed for roles started from here."""
    text = environ.get(VARIABLE)
    found = f"{VARIABLE}={text}" if text else "none armed"
    return _judged("failpoints", not text, found, f"unset {VARIABLE}, unless this is a test")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _sync_seconds(folder: Path, clock: Callable[[], float] = time.perf_counter) -> Iterator[float]:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".geartrain-doctor-") as file:
        for _ in range(NUM_SYNCS):
            started = clock()
            file.write(bytes(SYNC_BYTES))
            file.flush()
            os.fsync(file.fileno())
            yield clock() - started
