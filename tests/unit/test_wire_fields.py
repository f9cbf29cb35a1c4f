"""A field of a wire message is written somewhere and read somewhere, or it is not a field."""

from __future__ import annotations

import ast
import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType

from google.protobuf.descriptor import Descriptor

from geartrain.ams.pb.v1 import gear_pb2, graph_pb2, scheduler_pb2, shard_pb2, types_pb2
from geartrain.ams.rpc.codec import specs
from geartrain.ams.rpc.codec.messages import FieldCodec
from geartrain.ams.rpc.services import GEAR, GRAPH, SCHEDULER, SHARD
from geartrain.ams.values.expiry.rules import Rule, SmallerThan, Unseen
from tests.unit.test_imports import REPOSITORY, product_files

PADDING = "padding"
"""Lets what follows it begin at a multiple of 8 bytes. A message that has it carries its other fields of bytes beside
its header, where they are known by their numbers."""
READ_BY_NOBODY_BUT_USERS = {
    *("built_unix_seconds", "map_version"),
    *("refused_ids", "refused_occurrences", "refused_gradients"),
    *("hold_seconds", "steps_lost"),
}
"""Printed, with all of their message, by ``graph list``, ``status`` and ``events`` of ``geartrain`` with ``--json``."""
WRITTEN_BY_NOBODY_BUT_FOREIGN_CLIENTS = {"with_present", "row_dtype", "gradient_dtype"}
"""Of messages of rows: our client's rows go in frames. ``tests/support/message_rows.py`` writes them."""
REPLIES_OF_ONE_FIELD = {
    method.reply.message.DESCRIPTOR.full_name
    for service in (SHARD, SCHEDULER, GRAPH, GEAR)
    for _, method in service.items()
    if isinstance(method.reply, FieldCodec)
}
"""A reply's value is their field, and has no name."""
OF_A_VALUE = {kind.__name__: {field.name for field in dataclasses.fields(kind)} for kind in specs._PARTS.values()}
"""Messages that have the fields of their values, by which they are written and read."""
OF_A_VALUE["Expiry"] = {"kind"}.union(
    *({f.name for f in dataclasses.fields(kind)} for kind in (Unseen, SmallerThan, Rule))
)
CHANGES = ("append", "extend", "add", "update", "CopyFrom", "MergeFrom")


def fields(modules: Iterable[ModuleType]) -> Iterator[tuple[str, str]]:
    """Yield message and name of all fields but those that travel beside headers."""
    for module in modules:
        for message in module.DESCRIPTOR.message_types_by_name.values():
            yield from fields_of(message)


def fields_of(message: Descriptor) -> Iterator[tuple[str, str]]:
    names = {field.name for field in message.fields}
    if message.full_name in REPLIES_OF_ONE_FIELD or names == OF_A_VALUE.get(message.name):
        return
    for field in message.fields:
        is_a_part = message.name == "TableSpec" and field.name in specs._PARTS
        if not is_a_part and not (PADDING in names and field.type == field.TYPE_BYTES):
            yield message.name, field.name
    for nested in message.nested_types:
        yield from fields_of(nested)


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class only holds values: a dataclass or a NamedTuple."""
    return any("dataclass" in ast.unparse(item) for item in node.decorator_list) or any(
        "NamedTuple" in ast.unparse(base) for base in node.bases
    )


class Uses(ast.NodeVisitor):
    """The names that a program writes and reads as fields. What a record is made of is not read there."""

    def __init__(self, trees: Iterable[ast.Module], messages: Iterable[str]) -> None:
        self.written: set[str] = set()
        self.read: set[str] = set()
        self._handed_on: list[str] = []
        trees = list(trees)
        classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self._records: dict[str, list[list[str]]] = {message: [] for message in messages}
        """Fields in order, of each class of a name."""
        for class_ in filter(is_record, classes):
            names = [
                s.target.id for s in class_.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
            ]
            self._records.setdefault(class_.name, []).append(names)
        for tree in trees:
            self.visit(tree)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_open = any(isinstance(argument, ast.Starred) for argument in node.args) or None in (
            keyword.arg for keyword in node.keywords
        )
        num_given = None if is_open else len(node.args)
        for names in self._records.get(called, []):
            self.written.update(names[:num_given])
        if called in CHANGES and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Attribute):
            self.written.add(node.func.value.attr)
        if called == "HasField" and isinstance(node.args[0], ast.Constant):
            self.read.add(node.args[0].value)
        for item in (node.func, *node.args):
            self.visit(item)
        for keyword in node.keywords:
            self._handed_on.append(keyword.arg if keyword.arg and called in self._records else "")
            self.written.add(keyword.arg or "")
            self.visit(keyword.value)
            self._handed_on.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.written.add(node.attr)
        elif node.attr not in self._handed_on:
            self.read.add(node.attr)
        self.visit(node.value)


def unused(wire: Iterable[tuple[str, str]], sources: Mapping[str, str]) -> list[str]:
    """Return the fields, given as (message, name), that nobody writes, or nobody reads, by name."""
    wire = list(wire)
    uses = Uses((ast.parse(source) for source in sources.values()), {message for message, _ in wire})
    return [
        f"{message}.{name} is never {what}"
        for message, name in wire
        for what, names in (
            ("written", uses.written | WRITTEN_BY_NOBODY_BUT_FOREIGN_CLIENTS),
            ("read", uses.read | READ_BY_NOBODY_BUT_USERS),
        )
        if name not in names
    ]


def test_every_field_on_the_wire_is_written_and_read() -> None:
    wire = list(fields((gear_pb2, graph_pb2, scheduler_pb2, shard_pb2, types_pb2)))
    assert len(wire) > 200
    sources = {str(path): (REPOSITORY / path).read_text(encoding="utf-8") for path in product_files()}
    assert unused(wire, sources) == []


def test_a_field_that_is_never_sent_or_never_read_is_found() -> None:
    planted = {
        "server.py": """
            class Made(NamedTuple):
                spec: object
                existed: bool

            def create(request):
                made = Made(request.spec, existed=True)
                return CreateReply(spec=made.spec, existed=made.existed)
        """,
        "client.py": "reply = call(CreateRequest(spec=1))\nprint(reply.spec, reply.silent)",
    }
    sources = {name: textwrap.dedent(source) for name, source in planted.items()}
    wire = [("CreateRequest", "spec"), ("CreateReply", "existed"), ("CreateReply", "silent"), ("CreateReply", "spec")]
    assert unused(wire, sources) == ["CreateReply.existed is never read", "CreateReply.silent is never written"]
