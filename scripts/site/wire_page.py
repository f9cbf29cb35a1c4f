"""The page of the wire, from the comments of the ``.proto`` files as the compiler understands them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

INTRODUCTION = """# The wire

```sh
python -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. proto/geartrain/ams/pb/v1/*.proto
```

Any language that has gRPC can create a table, pull, push and take snapshots with stubs of these files. Rows and ids are
raw little-endian bytes beside a small header.
"""
# Field numbers of descriptor.proto, of which the paths of its comments are made.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE, _SYNTAX = 4, 5, 6, 12
_FIELD, _NESTED, _NESTED_ENUM, _SERVICE_METHOD, _ENUM_VALUE = 2, 3, 4, 2, 2
DescriptorPath = tuple[int, ...]
Comments = dict[DescriptorPath, str]


def render(proto: Path) -> str:
    """Return the page: for each file its services, messages and enums with their comments."""
    parts = [INTRODUCTION]
    for file in _compiled(proto):
        comments = {tuple(place.path): _joined(place.leading_comments) for place in file.source_code_info.location}
        opening = next(
            (
                p.leading_detached_comments or [p.leading_comments]
                for p in file.source_code_info.location
                if tuple(p.path) == (_SYNTAX,)
            ),
            [""],
        )
        parts += [f"## `{Path(file.name).name}`", *(_prose(text) for text in opening)]
        for number, service in enumerate(file.service):
            parts += [f"### Service `{service.name}`", comments.get((_FILE_SERVICE, number), "")]
            rows = [
                f"| `{m.name}` | {_type(m.input_type)} | {_stream(m.server_streaming)}{_type(m.output_type)} "
                f"| {comments.get((_FILE_SERVICE, number, _SERVICE_METHOD, at), '')} |"
                for at, m in enumerate(service.method)
            ]
            parts.append("\n".join(["| RPC | Takes | Answers | |", "|---|---|---|---|", *rows]))
        for number, enum in enumerate(file.enum_type):
            parts += _enum(enum, (_FILE_ENUM, number), comments, enum.name)
        for number, message in enumerate(file.message_type):
            parts += _message(message, (_FILE_MESSAGE, number), comments, message.name)
    return "\n\n".join(part for part in parts if part) + "\n"


def _compiled(proto: Path) -> Iterator[FileDescriptorProto]:
    from grpc_tools import protoc

    sources = sorted(str(path) for path in proto.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "all"
        arguments = [
            "protoc",
            f"--proto_path={proto}",
            "--include_source_info",
            f"--descriptor_set_out={out}",
            *sources,
        ]
        if protoc.main(arguments) != 0:
            raise RuntimeError(f"protoc does not take {', '.join(sources)}; its complaint is above")
        yield from FileDescriptorSet.FromString(out.read_bytes()).file


def _message(message: DescriptorProto, path: DescriptorPath, comments: Comments, name: str) -> list[str]:
    parts = [f"### `{name}` {{ #{name} }}", comments.get(path, "")]
    rows = [
        f"| {field.number} | `{field.name}` | {_field_type(field, message)} | {comments.get((*path, _FIELD, at), '')} |"
        for at, field in enumerate(message.field)
    ]
    if rows:
        parts.append("\n".join(["| Number | Field | Type | |", "|---|---|---|---|", *rows]))
    for at, enum in enumerate(message.enum_type):
        parts += _enum(enum, (*path, _NESTED_ENUM, at), comments, f"{name}.{enum.name}")
    for at, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            parts += _message(nested, (*path, _NESTED, at), comments, f"{name}.{nested.name}")
    return parts


def _enum(enum: EnumDescriptorProto, path: DescriptorPath, comments: Comments, name: str) -> list[str]:
    rows = [
        f"| `{value.name}` | {value.number} | {comments.get((*path, _ENUM_VALUE, at), '')} |"
        for at, value in enumerate(enum.value)
    ]
    table = "\n".join(["| Value | Number | |", "|---|---|---|", *rows])
    return [f"### Enum `{name}` {{ #{name} }}", comments.get(path, ""), table]


def _field_type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{nested.name}"):
            key, value = nested.field
            return f"map of {_plain_type(key)} to {_plain_type(value)}"
    many = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    one_of = " (one of)" if field.HasField("oneof_index") and not field.proto3_optional else ""
    optional = "optional " if field.proto3_optional else ""
    return f"{many}{optional}{_plain_type(field)}{one_of}"


def _plain_type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _type(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _type(full: str) -> str:
    name = full.removeprefix(".geartrain.ams.v1.")
    return f"[`{name}`](#{name})" if name != full else f"`{full.lstrip('.')}`"


def _stream(is_stream: bool) -> str:
    return "stream of " if is_stream else ""


def _joined(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


def _prose(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines()).replace("<", "\\<")
