"""Any language can use a table: stubs compiled afresh from proto/, no line of Geartrain on the client's side."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc

from geartrain.ams.client.factory import connect

ROOT = Path(__file__).parents[3]

FOREIGN = """
import struct, sys
import grpc
from geartrain.ams.pb.v1 import scheduler_pb2, scheduler_pb2_grpc, shard_pb2, shard_pb2_grpc, types_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

scheduler_channel = grpc.insecure_channel(sys.argv[1])
scheduler = scheduler_pb2_grpc.SchedulerStub(scheduler_channel)
sgd = types_pb2.Optimizer(name="sgd", scalars={"lr": 1.0})
spec = types_pb2.TableSpec(name="foreign", dim=2, optimizer=sgd, constant=types_pb2.Constant(value=0.5))
scheduler.CreateClusterTable(scheduler_pb2.CreateClusterTableRequest(spec=spec))
shard_address = scheduler.DescribeCluster(scheduler_pb2.DescribeClusterRequest()).shards[0].address
channel = grpc.insecure_channel(shard_address)
shard = shard_pb2_grpc.ShardStub(channel)

ids = struct.pack("<3q", 7, 8, 7)
push = shard_pb2.PushRequest(
    context=types_pb2.CallContext(stream="foreign", sequence=1),
    table="foreign", ids=ids, gradients=struct.pack("<6f", 1, 1, 2, 2, 3, 3),
)
first, retried = shard.Push(push), shard.Push(push)
assert (first.created, first.duplicate, retried.duplicate) == (2, False, True), (first, retried)
pull = shard_pb2.PullRequest(table="foreign", ids=struct.pack("<3q", 8, 7, 9), with_present=True)
reply = shard.Pull(pull)
assert struct.unpack("<6f", reply.rows) == (-1.5, -1.5, -3.5, -3.5, 0.5, 0.5), reply
assert reply.present == bytes([1, 1, 0])
assign = shard_pb2.AssignRequest(
    context=types_pb2.CallContext(stream="foreign", sequence=2), table="foreign",
    ids=struct.pack("<q", 9), rows=struct.pack("<2f", 4, 5),
)
shard.Assign(assign)

try:
    shard.Pull(shard_pb2.PullRequest(table="nowhere"))
except grpc.RpcError as error:
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert dict(error.trailing_metadata())["geartrain-error"] == "TableNotFound"
else:
    raise AssertionError("a pull from an unknown table was answered")

for target, service in ((channel, "geartrain.ams.v1.Shard"), (scheduler_channel, "geartrain.ams.v1.Scheduler")):
    answer = health_pb2_grpc.HealthStub(target).Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    try:
        list(reflection_pb2_grpc.ServerReflectionStub(target).ServerReflectionInfo(ask))
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    else:
        raise AssertionError("nobody asked for reflection")
print("the foreign client is content")
"""


def test_stubs_compiled_from_the_published_protos_use_a_table(tmp_path: Path, served: Callable[..., object]) -> None:
    protos = sorted(str(path) for path in (ROOT / "proto").rglob("*.proto"))
    compile_stubs = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    subprocess.run(
        [*compile_stubs, f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", *protos], check=True, timeout=60
    )
    script = tmp_path / "foreign.py"
    script.write_text(FOREIGN)
    cluster = served(1)
    # -S keeps the installed package and its committed stubs out; the path brings the libraries in.
    libraries = Path(grpc.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-S", str(script), cluster.address],  # type: ignore[attr-defined]
        env={"PYTHONPATH": f"{tmp_path}:{libraries}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "content" in done.stdout
    with connect(cluster.address) as ours:  # type: ignore[attr-defined]
        assert ours.table("foreign").pull([9]).tolist() == [[4.0, 5.0]]
