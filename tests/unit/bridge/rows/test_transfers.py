"""What goes between host and device: on a CPU nothing does."""

from __future__ import annotations

import torch

from geartrain.bridge.rows.transfers import (
    DeviceEvent,
    Readback,
    packed,
    packed_views,
    read,
    start_download,
    upload,
    upload_together,
)

CPU = torch.device("cpu")


def test_tensors_packed_in_one_memory_are_apart_and_keep_shape_and_type() -> None:
    tensors = [torch.randn(3, 5), torch.arange(7), torch.randn(2).bfloat16(), torch.zeros(0, 4), torch.tensor(2.5)]
    flat = torch.full((1024,), 255, dtype=torch.uint8)
    views = packed_views(flat, tensors)
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    for view, tensor in zip(packed_views(flat.clone(), tensors), tensors, strict=True):
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)


def test_on_a_cpu_nothing_is_copied_and_nobody_waits() -> None:
    tensor = torch.randn(4)
    assert upload(tensor, CPU) is tensor
    assert upload_together([tensor], CPU)[0] is tensor
    assert start_download(tensor).data_ptr() == tensor.data_ptr()
    moment, readback = DeviceEvent(CPU), Readback(tensor)
    moment.wait()
    assert moment.is_over and readback.is_here
    assert read(tensor.sum(), torch.tensor([True])) == [float(tensor.sum()), 1.0]


def test_numbers_of_the_host_are_packed_there_whatever_the_default_device() -> None:
    with torch.device("meta"):
        found = packed([torch.arange(3, device=CPU), torch.arange(2, device=CPU)], torch.int64, torch.device("meta"))
    assert (found.device.type, len(found)) == ("meta", 5)
