"""Values ⇄ protobuf messages, derived: a field of a dataclass goes into the field of the same name.

| a value's field | the message's |
|---|---|
| int, float, bool, str, bytes | the same |
| ``X | None`` | one that may be absent |
| ``X`` with a default | the same; absent, where a message can tell: the default |
| ``Literal["up", ...]`` | an enum of STATE_UP, ... beside STATE_UNSPECIFIED |
| ``tuple[X, ...]`` | repeated; of ``str | None``, "" is None |
| a dataclass or NamedTuple | a message |
| ``Mapping[K, V]`` | a map, or a repeated message: its first field is the key, the others are those of V, or V itself |
| ``Ids`` | bytes: int64, little endian, beside the header (see ``framing.py``) |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.codec import framing
from geartrain.ams.rpc.codec.specs import expiry_from_pb, expiry_to_pb, spec_from_pb, spec_to_pb
from geartrain.ams.values.errors import InvalidArgument, ProtocolError
from geartrain.ams.values.expiry.rules import Expiry
from geartrain.ams.values.gear_messages import GearAccount
from geartrain.ams.values.placement import BucketShards, placement_from_bytes, placement_to_bytes
from geartrain.ams.values.shard_messages import BatchFacts
from geartrain.ams.values.specs import Ids, TableSpec

Convert = Callable[[Any], Any]


class _Conversion(NamedTuple):
    """Conversions between a value and its field in a message; None: they are the same."""

    to_pb: Convert | None = None
    from_pb: Convert | None = None


class _Field(NamedTuple):
    name: str
    conversion: _Conversion
    can_be_absent: bool
    """Whether the message tells absence from the default."""
    is_none_if_absent: bool


class MessageCodec:
    """Codec between values of one type and messages of one type.

    Args:
        kind: A dataclass or NamedTuple.
        descriptor: Descriptor of the message.
        outside_header: Fields of the value that are not in the message, or not in its header: the decoder's caller
            gives them.

    Raises:
        TypeError: A field has no counterpart.
    """

    def __init__(
        self, kind: type, descriptor: Descriptor, outside_header: Collection[str] = (), first_field: int = 0
    ) -> None:
        self.message: type[Message] = GetMessageClass(descriptor)
        self._kind = kind
        self._fields: list[_Field] = []
        self._raw: list[tuple[str, int]] = []
        """Names and numbers of fields beside the header."""
        of_message = {field.name: field for field in descriptor.fields[first_field:]}
        for name, hint, has_default in _fields_of(kind):
            if name in outside_header:
                of_message.pop(name, None)
                continue
            if name not in of_message:
                raise TypeError(f"{kind.__name__}.{name} has no field in the message {descriptor.full_name}")
            field = of_message.pop(name)
            if hint == Ids:
                self._raw.append((name, field.number))
            else:
                self._fields.append(_field(name, hint, has_default, field))
        if not outside_header and (unknown := of_message.keys() - {"context", "padding"}):
            raise TypeError(f"{descriptor.full_name}.{sorted(unknown)[0]} has no field in the value {kind.__name__}")

    def to_message(self, value: Any, **given: Any) -> Message:
        """Encode the header. Raises InvalidArgument for a number that the message cannot hold."""
        for name, conversion, _, _ in self._fields:
            own = getattr(value, name)
            given[name] = own if conversion.to_pb is None or own is None else conversion.to_pb(own)
        try:
            return self.message(**given)
        except (ValueError, TypeError) as exc:
            raise InvalidArgument(f"{self._kind.__name__} cannot be sent: {exc}") from exc

    def from_message(self, message: Any, **given: Any) -> Any:
        """Decode a header; ``given`` are the values of the fields beside it."""
        for name, conversion, can_be_absent, is_none_if_absent in self._fields:
            if not can_be_absent or message.HasField(name):
                own = getattr(message, name)
                given[name] = own if conversion.from_pb is None else conversion.from_pb(own)
            elif is_none_if_absent:
                given[name] = None
        return self._kind(**given)

    def encode(self, value: Any, **given: Any) -> bytes:
        """Encode a value as a whole message."""
        header = self.to_message(value, **given)
        if not self._raw:
            return header.SerializeToString()
        raw = [(number, np.ascontiguousarray(getattr(value, name), "<i8")) for name, number in self._raw]
        return framing.encode_framed(header, raw)

    def split(self, data: bytes) -> tuple[Any, Mapping[int, memoryview]]:
        """Parse a message: its header, and the raw bytes beside it. Raises ProtocolError."""
        return framing.decode_framed(data, self.message) if self._raw else (framing.parse(data, self.message), {})

    def decode(self, data: bytes) -> Any:
        """Decode a whole message. Raises ProtocolError, or what the value's type raises."""
        return self.joined(*self.split(data))

    def joined(self, header: Message, raw: Mapping[int, memoryview]) -> Any:
        """Decode the parts of :meth:`split`."""
        return self.from_message(header, **{name: framing.ids_from(raw.get(number)) for name, number in self._raw})


class FieldCodec:
    """Codec of values that are the only field of their message; None is a message without fields."""

    def __init__(self, kind: Any, descriptor: Descriptor) -> None:
        self.message: type[Message] = GetMessageClass(descriptor)
        names = [field.name for field in descriptor.fields]
        if len(names) != (0 if kind is NoneType else 1):
            raise TypeError(f"{descriptor.full_name} has the fields {names}; a reply of type {kind} has another number")
        self._field = None if kind is NoneType else _field(names[0], kind, False, descriptor.fields[0])

    def encode(self, value: Any) -> bytes:
        """Encode a value as a whole message."""
        if self._field is None:
            return b""
        to_pb = self._field.conversion.to_pb
        return self.message(**{self._field.name: value if to_pb is None else to_pb(value)}).SerializeToString()

    def decode(self, data: bytes) -> Any:
        """Decode a whole message. Raises ProtocolError."""
        message = framing.parse(data, self.message)
        if self._field is None:
            return None
        value, from_pb = getattr(message, self._field.name), self._field.conversion.from_pb
        return value if from_pb is None else from_pb(value)


def is_record(kind: Any) -> bool:
    """Return whether values of a type are messages with the names of its fields."""
    return kind not in _BY_HAND and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))


def _fields_of(kind: Any) -> list[tuple[str, Any, bool]]:
    """Return name, type, and whether there is a default, of each field."""
    hints = get_type_hints(kind)
    if not dataclasses.is_dataclass(kind):
        return [(name, hints[name], name in kind._field_defaults) for name in kind._fields]
    missing = dataclasses.MISSING
    return [
        (field.name, hints[field.name], not (field.default is missing and field.default_factory is missing))
        for field in dataclasses.fields(kind)
    ]


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return the type, and whether it may be None."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    (kind,) = (kind_ for kind_ in get_args(hint) if kind_ is not NoneType)
    return kind, True


def _field(name: str, hint: Any, has_default: bool, field: FieldDescriptor) -> _Field:
    kind, is_optional = _without_none(hint)
    if is_optional and not field.has_presence:
        raise TypeError(f"{field.full_name} cannot be absent, and {name} can be None")
    can_be_absent = field.has_presence and (is_optional or has_default)
    return _Field(name, _conversion(kind, field), can_be_absent, is_optional)


def _conversion(kind: Any, field: Any) -> _Conversion:
    if kind in _BY_HAND:
        return _BY_HAND[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (int, float, bool, str, bytes):
        return _Conversion()
    if origin is Literal:
        return _enum(arguments, field)
    if origin is tuple and arguments[1:] == (...,):
        return _repeated(arguments[0], field)
    if origin in (dict, Mapping):
        return _mapping(arguments[1], field)
    if is_record(kind):
        codec = MessageCodec(kind, field.message_type, _NOT_SENT.get(kind, ()))
        return _Conversion(codec.to_message, codec.from_message)
    raise TypeError(f"{field.full_name} is a {kind} here, which has no place in a message")


def _enum(names: Collection[str], field: Any) -> _Conversion:
    unspecified = field.enum_type.values_by_number[0].name
    prefix = unspecified.removesuffix("UNSPECIFIED")
    numbers = {name: field.enum_type.values_by_name[prefix + name.upper()].number for name in names}
    by_number = {number: name for name, number in numbers.items()}

    def from_pb(number: int) -> str:
        if number not in by_number:
            raise ProtocolError(f"{field.full_name} has code {number}; known are {sorted(by_number)}")
        return by_number[number]

    return _Conversion(numbers.__getitem__, from_pb)


def _repeated(hint: Any, field: FieldDescriptor) -> _Conversion:
    kind, is_optional = _without_none(hint)
    if is_optional:  # of strings: a repeated field has no gaps
        return _Conversion(
            lambda values: [text or "" for text in values], lambda values: tuple(text or None for text in values)
        )
    to_pb, from_pb = _conversion(kind, field)
    return _Conversion(
        None if to_pb is None else lambda values: list(map(to_pb, values)),
        tuple if from_pb is None else lambda values: tuple(map(from_pb, values)),
    )


def _mapping(kind: Any, field: Any) -> _Conversion:
    if field.message_type.GetOptions().map_entry:
        return _Conversion(None, dict)
    entry, key = GetMessageClass(field.message_type), field.message_type.fields[0].name
    if len(field.message_type.fields) == 2 and not hasattr(kind, "_fields"):
        other = field.message_type.fields[1]
        to_pb, from_pb = _conversion(kind, other)
        name = other.name
        return _Conversion(
            lambda values: [
                entry(**{key: k, name: value if to_pb is None else to_pb(value)}) for k, value in values.items()
            ],
            lambda entries: {
                getattr(each, key): getattr(each, name) if from_pb is None else from_pb(getattr(each, name))
                for each in entries
            },
        )
    codec = MessageCodec(kind, field.message_type, first_field=1)
    return _Conversion(
        lambda values: [codec.to_message(value, **{key: k}) for k, value in values.items()],
        lambda entries: {getattr(each, key): codec.from_message(each) for each in entries},
    )


def _bucket_shards_from_pb(data: bytes) -> BucketShards:
    try:
        return placement_from_bytes(data)
    except ValueError as exc:
        raise ProtocolError(f"this is no bucket map: {exc}") from exc


def _batch_to_pb(batch: BatchFacts) -> Message:
    occurrences = b"" if batch.occurrences is None else np.ascontiguousarray(batch.occurrences, "<u4").tobytes()
    return shard_pb2.BatchFacts(
        occurrences=occurrences, step=batch.step, unix_seconds=batch.unix_seconds, pulled_at=batch.pulled_at
    )


def _batch_from_pb(pb: Any) -> BatchFacts:
    if len(pb.occurrences) % 4:
        raise ProtocolError(f"occurrences take {len(pb.occurrences)} bytes, which is not a multiple of 4 (uint32)")
    told = {name: getattr(pb, name) for name in ("step", "unix_seconds", "pulled_at") if pb.HasField(name)}
    return BatchFacts(occurrences=np.frombuffer(pb.occurrences, "<u4") if pb.occurrences else None, **told)


_BY_HAND: dict[Any, _Conversion] = {
    BatchFacts: _Conversion(_batch_to_pb, _batch_from_pb),
    TableSpec: _Conversion(spec_to_pb, spec_from_pb),
    Expiry: _Conversion(expiry_to_pb, expiry_from_pb),
    BucketShards: _Conversion(placement_to_bytes, _bucket_shards_from_pb),
}
_NOT_SENT: dict[type, Collection[str]] = {GearAccount: ("lost",)}
"""Fields of a value that its message lacks: only a caller that waits for replies knows them."""
