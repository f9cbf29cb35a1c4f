"""The import rules of the house: one way down through the layers, and foreign libraries only where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("ams", "bridge", "workers", "serving", "geartrain")  # from the bottom layer to the top

# Inside ams: which rooms (folders below ams/) a room may use, beside itself.
ROOMS_BELOW: dict[str, tuple[str, ...]] = {
    "pb": (),
    "values": (),
    "kernels": ("values",),
    "observe": ("values", "kernels"),
    "storage": ("values", "kernels", "observe"),
    "tables": ("values", "kernels"),
    "programs": ("values", "kernels"),
    "rpc": ("values", "kernels", "observe", "pb"),
    "server": ("values", "kernels", "observe", "storage", "tables", "programs", "rpc", "pb"),
    "scheduler": ("values", "kernels", "observe", "storage", "rpc", "pb"),
    "graph": ("values", "kernels", "observe", "storage", "rpc", "pb"),
    "gear": ("values", "kernels", "rpc", "pb"),
    "client": ("values", "kernels", "observe", "storage", "programs", "rpc", "graph", "gear"),
}
BRIDGE_USES = ("client", "values", "kernels", "programs")
"""The rooms of ams that bridge may use."""

# Inside bridge: which rooms a room may use, beside itself; only parallel training knows the class head.
BRIDGE_ROOMS: dict[str, tuple[str, ...]] = {
    "kernels": (),
    "collectives": (),
    "rows": ("collectives", "kernels"),
    "dense": ("rows", "placements", "collectives"),
    "embedding": ("rows", "collectives", "placements", "kernels"),
    "pipeline": ("rows", "embedding"),
    "models": ("embedding",),
    "retrieval": ("embedding", "models"),
    "gear": ("rows", "placements", "dense", "kernels"),
    "placements": ("rows", "collectives", "kernels"),
    "head": ("rows", "collectives", "placements", "kernels"),
    "parallel": ("rows", "collectives", "placements", "head", "kernels"),
    "optim": ("collectives",),
    "checkpoint": ("rows", "placements", "collectives", "dense"),
}

# What single files or rooms may use beside that, each for a reason.
ALSO: dict[str, tuple[str, ...]] = {
    "ams/values/placement.py": ("kernels",),  # ids are routed by a kernel
    "ams/values/arrays.py": ("kernels",),  # and looked through by one
    "ams/client/embedded.py": ("server", "scheduler"),  # the services on threads of the client's process
    "ams/client/snapshots/follower.py": ("tables",),  # rows are kept as a shard keeps them
    "bridge/head/*": ("graph", "storage"),  # a head builds graphs of its rows, and knows its rows again by snapshots
    "bridge/placements/*": ("tables", "server", "storage", "observe"),  # it is the shard of the rows that a rank keeps
    "bridge/head/backends/ranks/*": ("tables",),  # steps of such rows, as a checkpoint says them
    "bridge/head/loss/sub_centers.py": ("tables",),  # what rows are before anything is written
    "bridge/checkpoint/*": ("storage", "observe"),  # rows of a saved model are snapshots
    "bridge/parallel/split/first_values.py": ("tables",),  # the same values as rows of tables have
    "bridge/rows/tables.py": ("rpc",),
    "bridge/gear/*": ("storage", "observe"),  # cached features
}

UPWARD = {"workers/models/trained_model.py": "geartrain.serving.http.app"}
"""Methods of objects that people hold, imported when they are called: ``gt.load_model(DIR).serve_app()``."""

# Foreign top-level module -> the files that may import it. Everything else may be imported anywhere.
GRPC_FILES = (
    *("ams/rpc/*", "ams/server/service.py", "ams/scheduler/service.py"),
    "ams/graph/service/role.py",
    "serving/kserve/*",
)
HOMES: dict[str, tuple[str, ...]] = {
    "grpc": GRPC_FILES,
    "grpc_health": GRPC_FILES,
    "grpc_reflection": GRPC_FILES,
    "torch": ("bridge/*", "workers/*", "geartrain/*"),
    "triton": ("bridge/kernels/triton/*",),
    "fsspec": ("ams/storage/snapshot/*", "workers/samples/urls.py"),
    "pyarrow": ("workers/samples/*", "workers/ctr/samples/flights.py", "workers/ctr/predict.py"),
    "confluent_kafka": ("workers/samples/kafka/*",),
    "lmdb": ("ams/storage/*/lmdb*.py",),
    "opentelemetry": ("ams/observe/traces.py",),
    "prometheus_client": ("ams/observe/metrics.py",),
    "redis": ("ams/storage/*/redis*.py",),
    "socket": ("ams/*", "geartrain/*", "serving/*", "workers/loopback.py", "workers/rendezvous.py"),
    "cryptography": ("ams/rpc/*", "geartrain/launch/certificates.py", "geartrain/launch/tokens.py"),
    "ray": ("geartrain/ray/*",),
    "starlette": ("geartrain/watch/*", "serving/http/*"),
    "uvicorn": ("geartrain/watch/*", "serving/http/*"),
    "faiss": ("serving/index/*", "workers/models/trained_model.py"),
    "onnxruntime": ("workers/models/*", "serving/models/*"),
    "pickle": (),
}


def product_files() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            relative = path.relative_to(REPOSITORY)
            is_link = relative.parts[0] == "geartrain" and relative.parts[1] in FOLDERS
            if not is_link and not relative.name.endswith("_pb2.py"):
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
        if FOLDERS.index(layer) > FOLDERS.index(path.parts[0]) and not module.startswith(UPWARD.get(str(path), "no")):
            found.append(f"{path} imports {module}, which lies above it")
        elif layer == path.parts[0] == "bridge" and path.name != "__init__.py":
            found += sibling_violations(path, module)
        elif layer == "ams" and path.name != "__init__.py":
            found += room_violations(path, module)
    return found


def sibling_violations(path: Path, module: str) -> list[str]:
    """What is wrong with an import of something in bridge from bridge."""
    room, used = path.parts[1], module.split(".")[2]
    if room not in BRIDGE_ROOMS:
        return [f"{path}: say in BRIDGE_ROOMS what {room} may use"]
    if used in {room, *BRIDGE_ROOMS[room]}:
        return []
    return [f"{path} imports {module}; inside bridge, {room} may use {BRIDGE_ROOMS[room]}"]


APART = {("client", "service"), ("client", "server"), ("server", "client")}
"""Rooms of one folder: the first does not import the second. A service may call another role by a client of its own."""


def room_violations(path: Path, module: str) -> list[str]:
    """What is wrong with an import of something in ams."""
    used = module.split(".")[2]
    if used == "pb" and path.parts[:2] != ("ams", "pb") and not any(fnmatch(path.as_posix(), h) for h in GRPC_FILES):
        return [f"{path} imports the generated stubs; only {GRPC_FILES} may"]
    also = tuple(room for where, rooms in ALSO.items() if fnmatch(path.as_posix(), where) for room in rooms)
    if path.parts[0] == "bridge":
        allowed = (*BRIDGE_USES, *also)
    elif path.parts[0] == "ams":
        if path.parts[1] not in ROOMS_BELOW:
            return [f"{path}: say in ROOMS_BELOW what {path.parts[1]} may use"]
        allowed = (path.parts[1], *ROOMS_BELOW[path.parts[1]], *also)
    else:
        return []
    found = [] if used in allowed else [f"{path} imports {module}; it may use {allowed} of ams"]
    rooms = path.parts[2:3] + tuple(module.split(".")[3:4])
    if used == path.parts[1] and rooms in APART:
        found.append(f"{path} imports {module}: client and server share what lies beside both, and nothing else")
    return found


def test_product_files_keep_the_import_rules() -> None:
    files = list(product_files())
    assert len(files) > 500
    found = [violations(path, (REPOSITORY / path).read_text(encoding="utf-8")) for path in files]
    assert list(chain(*found)) == []


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
        ("bridge/rows/optimizer.py", "from geartrain.bridge.head.class_head import ClassHead"),
        ("bridge/gear/slow_gear.py", "from geartrain.bridge.head import batch"),
        ("bridge/new/room.py", "from geartrain.bridge.rows import tables"),
        ("workers/job/loop.py", "from geartrain.launch.up import up"),
        ("ams/kernels/ops.py", "from geartrain.ams.tables import row_table"),
        ("ams/storage/log/segments.py", "from geartrain.ams.tables import row_table"),
        ("ams/tables/row_table.py", "from geartrain.ams.server import shard"),
        ("ams/client/table.py", "from geartrain.ams.server import shard"),
        ("ams/client/cluster.py", "from geartrain.ams.server import shard"),
        ("ams/graph/client/remote.py", "from geartrain.ams.graph.service import graphs"),
        ("ams/rpc/server/server.py", "from geartrain.ams.rpc.client.shard import GrpcCarrier"),
        ("ams/rpc/client/shard.py", "from geartrain.ams.rpc.server import waiting"),
        ("bridge/dense/layout.py", "from geartrain.ams.storage.kv import store"),
        ("ams/new/room.py", "from geartrain.ams.values import errors"),
        ("ams/rpc/local.py", "from geartrain.ams.client.table import Table"),
        ("ams/values/errors.py", "from geartrain.ams.kernels import ops"),
        ("ams/server/shard.py", "import grpc"),
        ("ams/client/table.py", "from geartrain.ams.pb.v1 import types_pb2"),
        ("ams/server/shard.py", "from geartrain.ams.pb.v1 import types_pb2"),
        ("bridge/embedding.py", "from geartrain.ams.pb.v1 import types_pb2"),
        ("geartrain/cli/main.py", "import grpc"),
        ("ams/tables/row_table.py", "import lmdb"),
        ("ams/storage/kv/memory.py", "import redis"),
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


def test_no_two_test_files_are_imported_under_one_name() -> None:
    """Outside packages a test file's basename is its module: of two the second is not collected, nor found by ranks."""
    files = [path for path in (REPOSITORY / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    assert len(files) > 200
    names = [path.name for path in files]
    assert sorted({name for name in names if names.count(name) > 1}) == []
