"""The import rules of the house: one way down through the layers, and foreign libraries only where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("ams", "bridge", "workers", "geartrain")  # from the bottom layer to the top
LEAVES = ("errors", "specs", "messages", "graph_messages", "gear_messages", "hosted", "config", "arrays", "words")
LEAVES += ("failpoints", "aside", "arguments")

# Inside ams: which parts (first folder or file below ams/) a part may use, beside itself and the leaves.
PARTS_BELOW: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(LEAVES, ()),
    "core": (),
    "sampling": ("core",),
    "storage": ("core", "placement"),
    "placement": ("core",),
    "tables": ("storage", "core", "placement"),
    "pb": (),
    "transport": ("placement", "core", "pb"),
    "server": ("tables", "storage", "core", "placement", "transport", "pb"),
    "scheduler": ("tables", "storage", "core", "placement", "transport", "pb"),
    "graph": ("tables", "storage", "core", "placement", "transport", "pb"),
    "gear": ("core", "placement", "transport", "pb"),
    "writes": (),
    "streams": ("transport",),
    "shard_calls": ("transport",),
    "hosted_calls": ("shard_calls", "writes", "transport"),
    "client": ("shard_calls", "hosted_calls", "writes", "placement", "core"),
    # What gt.local embeds: the services on threads of the client's process.
    "embedded": ("server", "scheduler", "storage", "placement", "transport", "core"),
    "snapshot": ("shard_calls", "graph", "storage"),
    "snapshot_restore": ("snapshot", "shard_calls", "graph", "storage"),
    "cluster_status": ("gear", "transport"),
    "cluster": (
        *("client", "shard_calls", "snapshot", "snapshot_restore", "storage", "streams", "writes", "embedded"),
        *("graph", "gear"),
        *("transport", "cluster_status"),
    ),
}

# Foreign top-level module -> the files that may import it. Everything else may be imported anywhere.
SERVICES = ("server", "scheduler", "graph", "gear")
GRPC_FILES = ("ams/rpc/grpc*.py", *(f"ams/{service}/service.py" for service in SERVICES))
HOMES: dict[str, tuple[str, ...]] = {
    "grpc": GRPC_FILES,
    "grpc_health": GRPC_FILES,
    "grpc_reflection": GRPC_FILES,
    "torch": ("bridge/*", "workers/*", "geartrain/*"),
    "fsspec": ("ams/storage/*.py",),
    "lmdb": ("ams/storage/lmdb*.py", "ams/storage/features/lmdb_features.py"),
    "redis": ("ams/storage/redis*.py", "ams/storage/features/redis_features.py"),
    "socket": ("ams/*", "geartrain/*"),
    "pickle": (),
}


def product_files() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            relative = path.relative_to(REPOSITORY)
            is_link = relative.parts[0] == "geartrain" and relative.parts[1] in FOLDERS
            if not is_link and not relative.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield relative


def imported_modules(source: str) -> Iterator[str]:
    """Yield the dotted name of everything imported anywhere in the source, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the full name"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str:
    """The folder that ``geartrain.x.y`` lives in."""
    second = module.split(".")[1] if "." in module else ""
    return second if second in FOLDERS else "geartrain"


def part_of(path: Path) -> str:
    """The part of ams that a file belongs to: its folder or file name below ``ams/``."""
    return path.parts[1].removesuffix(".py")


def violations(path: Path, source: str) -> list[str]:
    """Return what the file imports against the rules."""
    found = []
    for module in imported_modules(source):
        top = module.split(".")[0]
        if top in HOMES and not any(fnmatch(path.as_posix(), home) for home in HOMES[top]):
            found.append(f"{path} imports {top}, which only {HOMES[top] or 'nothing'} may import")
        if top != "geartrain":
            continue
        layer = layer_of(module)
        if FOLDERS.index(layer) > FOLDERS.index(path.parts[0]):
            found.append(f"{path} imports {module}, which lies above it")
        elif path.parts[0] == layer == "ams" and len(path.parts) > 1 and path.name != "__init__.py":
            found += ams_violations(path, module)
        elif layer == "ams" and module.split(".")[2:3] == ["pb"]:
            found.append(f"{path} imports the generated stubs; only {GRPC_FILES} may")
    return found


def ams_violations(path: Path, module: str) -> list[str]:
    part, used = part_of(path), module.split(".")[2]
    if part not in PARTS_BELOW:
        return [f"{path}: say in PARTS_BELOW what {part} may use"]
    found = []
    if used not in {part, *LEAVES, *PARTS_BELOW[part]}:
        found.append(f"{path} imports {module}; inside ams, {part} may use {PARTS_BELOW[part]}")
    if used == "pb" and part != "pb" and not any(fnmatch(path.as_posix(), home) for home in GRPC_FILES):
        found.append(f"{path} imports the generated stubs; only {GRPC_FILES} may")
    return found


@pytest.mark.parametrize("path", list(product_files()), ids=str)
def test_a_product_file_keeps_the_import_rules(path: Path) -> None:
    assert violations(path, (REPOSITORY / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ams/client/table.py", "import torch"),
        ("ams/tables/row_table.py", "def f():\n    from torch import nn"),
        ("ams/client/table.py", "import geartrain"),
        ("ams/client/table.py", "from geartrain import bridge"),
        ("ams/client/table.py", "from geartrain.bridge.head import margins"),
        ("bridge/rows/optimizer.py", "from geartrain.workers import loop"),
        ("bridge/rows/optimizer.py", "import socket"),
        ("workers/job/loop.py", "from geartrain.launch.up import up"),
        ("ams/kernels/ops.py", "from geartrain.ams.tables import row_table"),
        ("ams/storage/log.py", "from geartrain.ams.tables import row_table"),
        ("ams/tables/row_table.py", "from geartrain.ams.server import shard"),
        ("ams/client/table.py", "from geartrain.ams.server import shard"),
        ("ams/client/cluster.py", "from geartrain.ams.server import shard"),
        ("ams/rpc/local.py", "from geartrain.ams.client.table import Table"),
        ("ams/values/errors.py", "from geartrain.ams.kernels import ops"),
        ("ams/server/shard.py", "import grpc"),
        ("ams/client/table.py", "from geartrain.ams.pb.v1 import types_pb2"),
        ("ams/server/shard.py", "from geartrain.ams.pb.v1 import types_pb2"),
        ("bridge/embedding.py", "from geartrain.ams.pb.v1 import types_pb2"),
        ("geartrain/cli/main.py", "import grpc"),
        ("ams/tables/row_table.py", "import lmdb"),
        ("ams/storage/memory.py", "import redis"),
        ("workers/job/loop.py", "import pickle"),
    ],
)
def test_the_rules_catch(path: str, source: str) -> None:
    assert violations(Path(path), source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("geartrain/cli/main.py", "from geartrain.workers import loop\nimport torch"),
        ("bridge/rows/optimizer.py", "import torch\nfrom geartrain.ams.client.table import Table"),
        (
            "ams/client/cluster.py",
            "from geartrain.ams.client.embedded import EmbeddedCluster\nfrom geartrain.ams.client.table import Table",
        ),
        ("ams/rpc/grpc_carrier.py", "import grpc\nfrom geartrain.ams.pb.v1 import types_pb2"),
        ("ams/server/service.py", "from grpc_health.v1 import health\nfrom geartrain.ams.pb.v1 import shard_pb2"),
        ("ams/storage/kv/lmdb_store.py", "import lmdb"),
    ],
)
def test_the_rules_allow(path: str, source: str) -> None:
    assert violations(Path(path), source) == []
