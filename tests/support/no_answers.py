"""What must not wait for a device, run on a CPU."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NoAnswers(TorchDispatchMode):
    """Refuse what a host would wait for a device by, or what has a shape that only the device knows."""

    WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal", "_to_copy")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        converts = name == "_to_copy" and (kwargs or {}).get("device") is None
        assert converts or not name.startswith(self.WAITS), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))
