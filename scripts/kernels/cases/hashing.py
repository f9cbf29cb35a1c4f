"""The hash table of ids without a bound, whatever its size."""

from __future__ import annotations

from typing import Any

from geartrain.bridge.kernels.triton import hashing
from scripts.kernels.compile import Case

_TYPES = {
    **dict.fromkeys(("ids_N", "ids_C", "slots_N", "found_N", "place_N"), "*i64"),
    **dict.fromkeys(("slots", "fill", "first"), "*i32"),
    "digests": "*u8",
    "is_new_N": "*i1",
}


def _case(kernel: str, **constants: Any) -> Case:
    names = getattr(hashing, kernel).arg_names
    return Case(
        name=f"hashing {kernel}",
        module="hashing",
        kernel=kernel,
        signature={name: "constexpr" if name in constants else _TYPES.get(name, "i32") for name in names},
        constants=constants,
        options={"num_warps": 4},
        odd=("num_ids",),
    )


CASES = [
    _case("find", BLOCK=hashing.FOUND),
    _case("claim", BLOCK=hashing.INSERTED),
    _case("insert", BLOCK=hashing.INSERTED),
]
