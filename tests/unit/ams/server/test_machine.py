"""What a server takes of its machine: memory for its rows, of the machine or the cgroups that it is in, and CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from geartrain.ams.server.machine import bind_to_cpus, default_row_memory, memory_pool, prefer_memory_of
from geartrain.ams.values.errors import ConfigError

GIB = 1 << 30


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_without_cgroups_it_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    assert memory_pool(tmp_path).num_bytes == psutil.virtual_memory().total
    assert memory_pool(tmp_path).name == memory_pool(tmp_path / "of another container").name


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/pod/box", {"sys/fs/cgroup/pod/box/memory.max": GIB}),
        ("0::/pod/box", {"sys/fs/cgroup/pod/box/memory.max": "max", "sys/fs/cgroup/pod/memory.max": GIB}),
        ("0::/pod/box", {"sys/fs/cgroup/pod/box/memory.max": 2 * GIB, "sys/fs/cgroup/pod/memory.max": GIB}),
        ("0::/", {"sys/fs/cgroup/memory.max": GIB}),
        ("0::/not/mounted/here", {"sys/fs/cgroup/memory.max": GIB}),
        ("5:cpu:/\n4:memory:/box\n0::/", {"sys/fs/cgroup/memory/box/memory.limit_in_bytes": GIB}),
        ("4:memory:/docker/box", {"sys/fs/cgroup/memory/memory.limit_in_bytes": GIB}),
        (
            "4:hugetlb,memory:/a/b",
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 2**63 - 4096,
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": GIB,
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": 2**63 - 4096,
            },
        ),
    ],
)
def test_it_is_the_least_limit_of_the_cgroups_around_the_process(
    tmp_path: Path, cgroup: str, files: dict[str, int | str]
) -> None:
    write(tmp_path, "proc/self/cgroup", f"{cgroup}\n")
    for path, limit in files.items():
        write(tmp_path, path, f"{limit}\n")
    assert memory_pool(tmp_path).num_bytes == GIB


def test_processes_share_a_pool_where_one_cgroup_limits_them(tmp_path: Path) -> None:
    names = {}
    for box, limits in {"a": GIB, "b": GIB, "c": None, "d": None}.items():
        write(tmp_path, "sys/fs/cgroup/pod/memory.max", f"{2 * GIB}\n")
        write(tmp_path, f"sys/fs/cgroup/pod/{box}/memory.max", f"{limits or 'max'}\n")
        write(tmp_path, "proc/self/cgroup", f"0::/pod/{box}\n")
        names[box] = memory_pool(tmp_path).name
    assert names["c"] == names["d"]
    assert len(set(names.values())) == 3


def test_a_share_is_left_for_what_is_not_rows() -> None:
    assert default_row_memory(GIB) == GIB // 2
    assert default_row_memory(100 * GIB) == 90 * GIB - GIB // 2


def test_every_thread_keeps_to_the_cpus_that_are_named() -> None:
    """In a process of its own: there is no way back."""
    program = """
import os, threading
from geartrain.ams.server.machine import bind_to_cpus, threads_per_shard

one = min(os.sched_getaffinity(0))
end, threads = threading.Event(), [threading.Thread(target=lambda: end.wait(10)) for _ in range(2)]
threads[0].start()
bind_to_cpus([one])
threads[1].start()
assert [os.sched_getaffinity(thread.native_id) for thread in threads] == [{one}, {one}]
assert threads_per_shard(1) == 1
end.set()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_cpus_that_are_not_there_are_named() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=r"cpus names 8000-8001,8005, which this process does not have; it has \d"):
        bind_to_cpus([min(before), 8000, 8001, 8005])
    assert os.sched_getaffinity(0) == before


def test_a_node_of_memory_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"memory_node is 63; this machine has \w+"):
        prefer_memory_of(63)
