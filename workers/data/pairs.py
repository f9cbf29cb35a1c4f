"""Pairs of pictures for verification: InsightFace's ``.bin`` files (lfw.bin, cfp_fp.bin, agedb_30.bin).

Such a file is a pickled (list of encoded pictures, list of bool): pictures 2·i and 2·i + 1 are pair i. A pickle is a
program, and a stranger's is not safe to run: here only the opcodes that build tuples, lists, bytes, integers and bools
are interpreted, and any other is refused by name. Protocol 2 of Python 2 and protocols 3 to 5 of Python 3 are read.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.bitmaps import decode_picture


@dataclass(frozen=True)
class Pairs:
    """Pairs of encoded pictures, with whether each shows the same person or thing."""

    path: Path
    images: list[bytes]
    """[2·N], encoded (JPEG, PNG …)."""
    same: npt.NDArray[np.bool_]
    """[N]: whether the pair shows the same."""

    def picture(self, index: int) -> Image.Image:
        """Decode picture ``index`` of 2·N. Raises InvalidArgument naming file and picture."""
        return decode_picture(io.BytesIO(self.images[index]), f"{self.path}, picture {index}")


def read_pairs(path: Path) -> Pairs:
    """Return the pairs in ``path``. Raises InvalidArgument naming the file and the offset of the fault."""
    if not path.is_file():
        raise InvalidArgument(f"{path} is not a file; give a .bin file of pairs, such as lfw.bin")
    value = read_plain_pickle(path)
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(part, list) for part in value):
        raise InvalidArgument(f"{path} holds no pairs: it must be a pickled (list of pictures, list of bool)")
    images, same = value
    wrong = next((place for place, image in enumerate(images) if not isinstance(image, bytes)), None)
    if wrong is not None:
        raise InvalidArgument(f"{path}: picture {wrong} is {type(images[wrong]).__name__}; it must be encoded bytes")
    if not all(isinstance(flag, int) and flag in (0, 1) for flag in same):
        raise InvalidArgument(f"{path}: the second list must hold bools, one for each pair")
    if len(images) != 2 * len(same) or not same:
        raise InvalidArgument(
            f"{path} has {len(images)} pictures for {len(same)} pairs; there must be two for each, and some"
        )
    return Pairs(path, images, np.array(same, np.bool_))


def read_plain_pickle(path: Path) -> Any:
    """Return the value pickled in ``path``, if it is of tuples, lists, bytes, integers and bools alone. Runs no code.

    Raises InvalidArgument naming the file, the offset and the forbidden opcode.
    """
    machine = _Machine()
    position = 0
    try:
        for opcode, argument, at in pickletools.genops(path.read_bytes()):
            position = at or 0
            if opcode.name == "STOP":
                return machine.result()
            act = _ACTIONS.get(opcode.name)
            if act is None:
                raise InvalidArgument(
                    f"{path}, offset {position}: pickle opcode {opcode.name} is not allowed; only tuples, lists, "
                    "bytes, integers and bools are read, and nothing is run"
                )
            act(machine, argument)
    except InvalidArgument:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as exc:
        raise InvalidArgument(f"{path} is damaged at or behind offset {position}: {exc}; copy the file anew") from exc
    raise InvalidArgument(f"{path} is cut: it ends at offset {position} without a STOP; copy the file anew")


_MARK = object()


class _Machine:
    """Stack and memo of the pickle language."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError(f"an opcode needs {count} values, the stack has {len(self.stack)}")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        if any(value is _MARK for value in values):
            raise ValueError("a mark is where a value should be")
        return values

    def pop_to_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise ValueError("there is no mark on the stack")

    def extend(self, values: list[Any]) -> None:
        if not self.stack or not isinstance(self.stack[-1], list):
            raise ValueError("items are appended to what is no list")
        self.stack[-1].extend(values)

    def remember(self, key: int) -> None:
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("there is no value to remember")
        self.memo[key] = self.stack[-1]

    def result(self) -> Any:
        (value,) = self.pop(1)
        if self.stack:
            raise ValueError(f"{len(self.stack)} values are left on the stack")
        return value


Action = Callable[[_Machine, Any], None]


def _pass(machine: _Machine, argument: Any) -> None:
    """Ignore an opcode that does not affect the value."""


def _push_tuple(count: int) -> Action:
    return lambda machine, _: machine.stack.append(tuple(machine.pop(count)))


def _push_value(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _push_python2_bytes(machine: _Machine, argument: str) -> None:
    machine.stack.append(argument.encode("latin-1"))  # pickletools shows str of Python 2 so


_ACTIONS: dict[str, Action] = {
    **dict.fromkeys(("PROTO", "FRAME"), _pass),
    "MARK": lambda machine, _: machine.stack.append(_MARK),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _push_value),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), _push_python2_bytes),
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG1"), _push_value),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "EMPTY_TUPLE": _push_tuple(0),
    "TUPLE1": _push_tuple(1),
    "TUPLE2": _push_tuple(2),
    "TUPLE3": _push_tuple(3),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "LIST": lambda machine, _: machine.stack.append(machine.pop_to_mark()),
    "APPEND": lambda machine, _: machine.extend(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda machine, key: machine.remember(key)),
    "MEMOIZE": lambda machine, _: machine.remember(len(machine.memo)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, key: machine.stack.append(machine.memo[key])),
}
