"""Tensors of a module in a dense table: its trained parameters, and the tensors beside them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument, NonFinite, SpecMismatch
from geartrain.bridge.rows.stand_in import named_dense_parameters

_LARGEST_INTEGER = 2**24


class ModuleTensors:
    """Tensors of ``module`` by name, each once however often it is used (tied parameters).

    ``trained`` are the parameters that required a gradient at construction. ``others`` are the parameters that did not,
    and the buffers of the module's state_dict; buffers that are not persistent are ignored.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = dict(named_dense_parameters(module))
        for name, parameter in parameters.items():
            if nn.parameter.is_lazy(parameter):
                raise InvalidArgument(f"parameter {name!r} has no shape yet; run the module once, then attach it")
        self._module = module
        self.trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        kept = module.state_dict(keep_vars=True)
        self._buffers = [name for name, _ in module.named_buffers() if name in kept]
        if not self.trained:
            raise InvalidArgument(
                f"{type(module).__name__} has no parameter that requires a gradient; there is nothing to train"
            )
        for name, tensor in {**self.trained, **self.others()}.items():
            _require_whole(name, tensor)

    @property
    def num_frozen(self) -> int:
        """Number of frozen parameters, which come first in :meth:`others`."""
        return len(self._frozen)

    def others(self) -> Mapping[str, Tensor]:
        """Return the current tensors that are not trained; read anew, as modules may replace their buffers."""
        buffers = dict(self._module.named_buffers())
        return {**self._frozen, **{name: buffers[name] for name in self._buffers}}

    def check(self) -> None:
        """Raise SpecMismatch if the module has other parameters than when it was attached."""
        now = dict(named_dense_parameters(self._module))
        for name, parameter in {**self.trained, **self._frozen}.items():
            if now.get(name) is not parameter:
                raise SpecMismatch(
                    f"parameter {name!r} was replaced or removed since the module was attached; attach it again"
                )

    def require_all_trained(self, name: str) -> None:
        """Raise InvalidArgument if some, not all, parameters were frozen since the module was attached.

        Their rows would still move by momentum and weight decay.
        """
        frozen = [key for key, item in self.trained.items() if not item.requires_grad]
        if frozen and len(frozen) < len(self.trained):
            raise InvalidArgument(
                f"parameter {frozen[0]!r} of dense table {name!r} was frozen after attach(), and a step moves all rows "
                "of the table; nothing was pushed. Freeze it before attach(), or all: module.requires_grad_(False)"
            )

    def first_non_finite(self) -> str | None:
        """Return the name of the first trained parameter whose gradient holds NaN or infinity."""
        for name, parameter in self.trained.items():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return name
        return None


def _require_whole(name: str, tensor: Tensor) -> None:
    """Raise unless the tensor's values can be sent as float32."""
    if tensor.is_complex():
        raise InvalidArgument(f"{name!r} is {tensor.dtype}; a dense table holds real numbers")
    if tensor.is_meta:
        raise InvalidArgument(f"{name!r} is on the meta device, it has no values; give the module its weights first")
    if tensor.is_floating_point():
        # float64 values are rounded to float32.
        if not bool(torch.isfinite(tensor.detach().float()).all()):
            raise NonFinite(f"{name!r} holds NaN or infinity (as float32); nothing was sent")
    elif tensor.numel() and max(int(tensor.max()), -int(tensor.min())) > _LARGEST_INTEGER:
        raise InvalidArgument(
            f"buffer {name!r} holds integers beyond {_LARGEST_INTEGER:,}; they travel as float32, which would round "
            "them: register it with persistent=False"
        )
