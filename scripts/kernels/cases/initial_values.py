"""First values of rows, 512 wide."""

from __future__ import annotations

from geartrain.bridge.kernels.triton.initial_values import tile
from scripts.kernels.compile import Case

_OPTIONS = tile(512)
_CONSTANTS = {"D": 512, "N": _OPTIONS["N"], "C": _OPTIONS["C"]}


def _case(name: str, kernel: str, types: dict[str, str], integers: dict[str, str], *, is_normal: bool) -> Case:
    return Case(
        name=f"initial_values {name}",
        module="initial_values",
        kernel=kernel,
        signature={**types, **integers, **dict.fromkeys(("D", "IS_NORMAL", "N", "C"), "constexpr")},
        constants={**_CONSTANTS, "IS_NORMAL": is_normal},
        options={"num_warps": _OPTIONS["num_warps"], "enable_fp_fusion": False},
        odd=tuple(integers),
    )


_ROWS = {"rows": "*bf16"}
_OF_ALL = {"low_bits": "i64", "high_bits": "i64", "below": "fp32", "num": "i32", "first": "i64", "seed": "i64"}
_OF_ALL |= {"table_hash": "i64"}
_NEW = {"tables": "*i64", "like": "*bf16", "key_N": "*i64", "ids_N": "*i64", "numbers_N": "*i64"}
CASES = [
    _case("normal", "write_rows", _ROWS, _OF_ALL, is_normal=True),
    _case("uniform", "write_rows", _ROWS, _OF_ALL, is_normal=False),
    _case("of new rows", "write_new_rows", _NEW, {"num": "i32", "bits": "i32", "seed": "i64"}, is_normal=True),
]
