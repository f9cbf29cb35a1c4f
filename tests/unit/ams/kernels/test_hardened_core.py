"""How the core is compiled and linked, read from its file."""

from __future__ import annotations

import struct
from pathlib import Path

from geartrain.ams.kernels import _core

DYNAMIC, RELRO, FLAGS, FLAGS_1 = 2, 0x6474E552, 30, 0x6FFFFFFB
BIND_NOW, NOW = 8, 1


def test_the_core_checks_its_stack_and_leaves_no_table_of_functions_to_write() -> None:
    image = Path(_core.__file__).read_bytes()
    assert image[:6] == b"\x7fELF\x02\x01"
    assert b"\0__stack_chk_fail\0" in image
    (first,) = struct.unpack_from("<Q", image, 32)
    size, number = struct.unpack_from("<HH", image, 54)
    headers = [struct.unpack_from("<IIQQQQ", image, first + place * size) for place in range(number)]
    by_kind = {kind: (offset, length) for kind, _, offset, _, _, length in headers}
    assert RELRO in by_kind
    offset, length = by_kind[DYNAMIC]
    entries = dict(struct.iter_unpack("<qQ", image[offset : offset + length]))
    assert entries.get(FLAGS, 0) & BIND_NOW and entries.get(FLAGS_1, 0) & NOW
