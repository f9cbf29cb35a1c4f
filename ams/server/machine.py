"""Memory and CPUs of a server process."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from geartrain.ams.kernels.memory import set_memory_limit
from geartrain.ams.values.config import MIB
from geartrain.ams.values.errors import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 256 << 20
_MAX_THREADS = 4
_BESIDE_ROWS_BYTES = 512 * MIB
_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call by machine."""
_MPOL_PREFERRED = 1


def threads_per_shard(num_shards: int) -> int:
    """Return how many threads a very large request to one of ``num_shards`` shards of this process may use."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // num_shards))


def bind_to_cpus(cpus: Collection[int]) -> None:
    """Bind every present and future thread of this process to ``cpus``.

    Raises:
        ConfigError: the process may not run on one of them, or there is no such CPU.
    """
    allowed = os.sched_getaffinity(0)
    missing = sorted(set(cpus) - allowed)
    if missing:
        raise ConfigError(
            f"cpus names {_ranges(missing)}, which this process does not have; it has {_ranges(sorted(allowed))}"
        )
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cpus)


@contextmanager
def threads_bound_to(cpus: Collection[int]) -> Iterator[None]:
    """Bind threads that start in the block to ``cpus``; none: as this thread."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def prefer_memory_of(node: int) -> None:
    """Allocate memory of this thread, and of those that it starts, on one NUMA node while it has some.

    Raises:
        ConfigError: there is no such node, or the process may not choose.
    """
    nodes = sorted(int(path.name.removeprefix("node")) for path in _NODES.glob("node[0-9]*"))
    if node not in nodes:
        raise ConfigError(f"memory_node is {node}; this machine has {_ranges(nodes) or 'no nodes of memory'}")
    libc, mask = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(1 << node)
    call = ctypes.c_long(_SET_MEMPOLICY.get(platform.machine(), -1))
    if libc.syscall(call, _MPOL_PREFERRED, ctypes.byref(mask), ctypes.c_ulong(8 * ctypes.sizeof(mask) + 1)):
        raise ConfigError(
            f"memory of node {node} cannot be preferred: {os.strerror(ctypes.get_errno())}; leave memory_node out, or "
            "let the container call set_mempolicy (docker run --cap-add SYS_NICE)"
        )


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as ``0-3,6``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def recycle_large_buffers() -> bool:
    """Make malloc recycle message-sized buffers instead of mapping fresh pages for each; return whether it agreed.

    Otherwise a reply of 5 MB costs more in page faults than in copying. glibc only; the process keeps up to 256 MiB
    that it no longer uses. Row slabs are mapped separately and not affected.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def limit_row_memory(memory_bytes: int | None, share: float = 1.0) -> int:
    """Set and return the memory limit of this process's rows, in bytes. None: its ``share`` of
    :func:`default_row_memory` of the container, or else the machine.
    """
    if memory_bytes is None:
        memory_bytes = int(default_row_memory(memory_pool().num_bytes) * share)
    set_memory_limit(memory_bytes)
    return memory_bytes


def default_row_memory(total: int) -> int:
    """Return the part of ``total`` bytes for rows: the rest is for the interpreter, messages and the system."""
    return max(total // 2, total * 9 // 10 - _BESIDE_ROWS_BYTES)


class MemoryPool(NamedTuple):
    """Memory shared by processes."""

    num_bytes: int
    name: str
    """Name of the memory, the same for all processes that share it, in any container, and for no others."""


def memory_pool(root: Path = Path("/")) -> MemoryPool:
    """Return the memory of this process: that of the machine, or the least limit of a cgroup that it is in.

    ``root`` is the folder of ``proc`` and ``sys``.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        machine = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = socket.gethostname()
    return min([MemoryPool(physical, machine), *_cgroup_limits(root, machine)], key=lambda pool: pool.num_bytes)


def _cgroup_limits(root: Path, machine: str) -> list[MemoryPool]:
    """Return the limits of the memory cgroups (v1 and v2) of this process and of all their parents."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits: list[MemoryPool] = []
    mounts = root / "sys/fs/cgroup"
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if not controllers:
            folders, file = [mounts, mounts / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            folders, file = [mounts / "memory"], "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, of which only the last group is mounted, as the root.
        inner = Path(path.lstrip("/"))
        for folder in folders:
            for group in [inner, *inner.parents]:
                with suppress(OSError, ValueError):  # no such file, or "max"
                    limit, inode = int((folder / group / file).read_text()), (folder / group).stat().st_ino
                    limits.append(MemoryPool(limit, f"{machine}/{inode}"))  # paths differ between containers
    return limits
