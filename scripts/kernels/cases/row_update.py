"""The update of rows, 512 wide: bfloat16 with momentum, by number; Adam over float32; row-wise Adagrad."""

from __future__ import annotations

from typing import Any

from geartrain.bridge.kernels.triton import row_step, row_update
from scripts.kernels.compile import Case

_TYPES = {"updates": "*i64", "refused": "*i64", "numbers": "*i64", "ids": "*i64"} | dict.fromkeys(
    ("start", "num", "first"), "i32"
)
_TYPES |= {"key": "i64"} | dict.fromkeys(("decay", "a", "b", "eps"), "fp32")
_EIGHT = {"rows": "*u8", "slots": "*i8", "row_scales": "*bf16", "slot_scales": "*bf16", "clock": "*i64"}


def _update(name: str, dim: int, kind: str, types: dict[str, str], **constants: Any) -> Case:
    options = row_update.tile(dim, by_block=types.get("slots") == "*i8")
    launched = {"num_warps": options.pop("num_warps"), "enable_fp_fusion": False}
    scaled = ("row_scales", "slot_scales", "clock")
    constants = dict.fromkeys(() if "clock" in types else scaled) | constants
    constants = {
        "ids": None,
        "num_valid": None,
        "B": 128,
        "D": dim,
        "KIND": getattr(row_step, kind).value,
        "LR_ON_DEVICE": True,
    } | constants
    constants |= options
    signature = {
        argument: "constexpr" if argument in constants else (_TYPES | types).get(argument, "*fp32")
        for argument in row_update.update_rows.arg_names
    }
    return Case(
        name=f"row_update {name}",
        module="row_update",
        kernel="update_rows",
        signature=signature,
        constants=constants,
        options=launched,
        odd=("start", "num", "first", "key"),
    )


CASES = [
    _update("bfloat16 momentum", 512, "MOMENTUM", {"rows": "*bf16", "slots": "*bf16"}),
    _update("8 bits momentum", 512, "MOMENTUM", _EIGHT, updates=None),
    _update("float32 Adam", 512, "ADAM", {}, numbers=None),
    _update("float16 row-wise Adagrad", 64, "ROWWISE_ADAGRAD", {"rows": "*fp16"}),
]
