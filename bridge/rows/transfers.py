"""Asynchronous copies between host and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.bridge.kernels.launch import is_capturing
from geartrain.bridge.rows.tables import as_numpy

_ALIGNED = 16
"""Alignment, in bytes, of tensors that travel together."""


def upload(array: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Return the array as a tensor on ``device``: on a CPU the same memory; on a CUDA device a copy by way of pinned
    memory, without waiting. A tensor that is there already is returned unchanged.
    """
    host = array if isinstance(array, Tensor) else torch.from_numpy(array)
    travels = host.device.type == "cpu" and device.type == "cuda"
    if travels and is_capturing(device):  # each replay would read memory that was reused by then
        raise InvalidArgument(
            f"{host.dtype} {list(host.shape)} of the host would be copied in a CUDA graph; give what a captured step "
            "reads on the device, in tensors that are written before each replay"
        )
    return (host.pin_memory() if travels else host).to(device, non_blocking=travels)


def upload_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of the host on ``device``, in one copy by pinned memory, without waiting. On a CPU themselves."""
    if device.type == "cpu":
        return list(tensors)
    host = torch.empty(_packed_bytes(tensors), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    for room, tensor in zip(packed_views(host, tensors), tensors, strict=True):
        room.copy_(tensor)
    return packed_views(host.to(device, non_blocking=True), tensors)


def _packed_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors)


def packed_views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors like these, one after the other in ``flat`` uint8 with room for them."""
    views, start = [], 0
    for tensor in like:
        views.append(flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _packed_bytes([tensor])
    return views


def start_download(tensor: Tensor) -> Tensor:
    """Return a copy on the host, complete once a :class:`DeviceEvent` made after is over; a CPU tensor itself."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return tensor
    room = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
    return room.copy_(tensor, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """Return the tensor on the host, after waiting for it."""
    host = start_download(tensor)
    DeviceEvent(tensor.device).wait()
    return host


def read(*numbers: Tensor) -> list[float]:
    """Return tensors of one element as numbers, after one wait for all of them."""
    if numbers[0].device.type != "cpu":
        numbers = tuple(download(torch.stack([number.detach().reshape(()).double() for number in numbers])))
    return list(map(float, numbers))


class DeviceEvent:
    """Moment at which the present work of ``device``'s current stream is done. On a CPU it is over at once."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_over(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        if self._event is not None and self._event.query():  # type: ignore[no-untyped-call]
            self._event = None
        return self._event is None

    def wait(self) -> None:
        """Wait for it on the host."""
        if self._event is not None and not self.is_over:
            self._event.synchronize()
            self._event = None


def downloaded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in host memory: those of a device in one copy, after waiting for it."""
    found = [tensor.detach() for tensor in tensors]
    rows = [tensor if tensor.ndim else tensor.reshape(1) for tensor in found]
    alike: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for place, tensor in enumerate(rows):
        if tensor.device.type != "cpu":
            alike.setdefault((tensor.dtype, tensor.shape[1:]), []).append(place)
    if len({found[place].device for places in alike.values() for place in places}) > 1:
        return [tensor.cpu() for tensor in found]
    if not alike:
        return found
    order = sorted(alike.values(), key=lambda places: -found[places[0]].itemsize)  # each starts aligned to that
    # Views of one tensor, such as the parts of a gradient, are joined directly, without a copy before.
    joined = [torch.cat([rows[place] for place in places]) for places in order]
    parts = [tensor.view(-1).view(torch.uint8) for tensor in joined]
    whole = (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu()
    flat = [place for places in order for place in places]
    for place, part in zip(flat, whole.split_with_sizes([found[place].nbytes for place in flat]), strict=True):
        found[place] = part.view(found[place].dtype).view(found[place].shape)
    return found


def packed(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers of all tensors, one after the other, on ``device``: those of the host in one copy by way of
    pinned memory, without waiting. Of ``dtype``, or, where all lie on the device, of their common type.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    host = [tensor for tensor in flat if tensor.device.type == "cpu"]
    if device.type == "cpu":
        return torch.cat([tensor.to(device, dtype) for tensor in flat])
    if host:
        room = torch.empty(sum(map(len, host)), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
        parts = iter(
            torch.cat(host, out=room).to(device, non_blocking=True).split_with_sizes([len(item) for item in host])
        )
        flat = [next(parts) if tensor.device.type == "cpu" else tensor.to(device) for tensor in flat]
    return torch.cat(flat)


def put(target_ND: Tensor, places: Ids, rows: npt.NDArray[Any]) -> None:
    """Overwrite the rows of ``target`` at ``places``, on any device."""
    device = target_ND.device
    if device.type == "cpu":  # torch would start several threads for it
        as_numpy(target_ND)[places] = rows
        return
    rows = np.require(rows, requirements=["C", "W"])
    is_plain = target_ND.dtype != torch.bfloat16  # numpy has no bfloat16
    bits = upload(rows if is_plain else rows.view(np.int16), device)
    target_ND[upload(places, device)] = bits if is_plain else bits.view(torch.bfloat16)


def take(source_ND: Tensor, places: Ids) -> Tensor:
    """Return the rows of ``source`` at ``places``, on its device."""
    if source_ND.device.type == "cpu" and source_ND.dtype != torch.bfloat16:
        return torch.from_numpy(as_numpy(source_ND).take(places, axis=0))
    return source_ND.index_select(0, upload(places, source_ND.device))


class Readback:
    """Small tensor on its way to the host, which can be polled without waiting."""

    def __init__(self, values: Tensor) -> None:
        """Start to copy ``values``, as they will be after the present work of the device."""
        self._host = start_download(values)
        self._arrival = DeviceEvent(values.device)

    @property
    def is_here(self) -> bool:
        """Whether :meth:`values` returns at once."""
        return self._arrival.is_over

    def values(self) -> Tensor:
        """Return the values on the host; waits until it :attr:`is_here`."""
        self._arrival.wait()
        return self._host
