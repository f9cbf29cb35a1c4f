"""A graph without its parameters gives PyTorch's features with those of any later step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.rows.serialization import state_to_bytes
from geartrain.workers.live import graph as graphs
from geartrain.workers.live.graph import live_graph
from geartrain.workers.live.network import LiveNetwork
from geartrain.workers.live.state_arrays import state_dict_arrays
from geartrain.workers.models.onnx_backbone import OnnxBackbone


@pytest.fixture(autouse=True)
def onnx() -> None:
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason="needs pip install 'geartrain[onnx]'")


class Normed(nn.Module):
    """What exporters like to compute ahead: batch norm after a convolution, and a product of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6))
        self.scale, self.factor = nn.Parameter(torch.ones(6)), nn.Parameter(torch.full((6,), 2.0))
        self.register_buffer("grid", torch.arange(64.0).view(1, 1, 8, 8) / 64, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layers(images.float().div(255) * self.grid) * (self.scale * self.factor)
        return features


def test_a_later_state_of_the_training_needs_no_export(tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone = Normed().train()
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    made = live_graph(backbone, images)
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.state_dict().items())
    assert backbone.training
    network = LiveNetwork.from_json(made.graph, made.layout_to_json())
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        backbone(images).square().mean().backward()
        optimizer.step()
    state = {"backbone": backbone.state_dict(), "optimizer": optimizer.state_dict(), "random": [torch.zeros(3)]}
    network.write(tmp_path / "backbone.onnx", state_dict_arrays(state_to_bytes(state), "backbone"))
    with torch.no_grad():
        expected = backbone.eval()(images)
    torch.testing.assert_close(OnnxBackbone(tmp_path / "backbone.onnx")(images), expected, rtol=1e-4, atol=1e-5)


def test_parameters_of_another_shape_are_named(tmp_path: Path) -> None:
    made = live_graph(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), torch.randn(2, 4))
    arrays = {"1.weight": torch.zeros(5, 4).numpy(), "1.bias": torch.zeros(3).numpy()}
    with pytest.raises(InvalidArgument, match=r"'1.weight' of the training is \[5, 4\], not \[3, 4\]"):
        made.write(tmp_path / "backbone.onnx", arrays)
    with pytest.raises(InvalidArgument, match=r"'1\.weight' of the training is None"):
        made.write(tmp_path / "backbone.onnx", {})


def test_a_graph_that_keeps_a_parameter_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = graphs._without_parameters
    monkeypatch.setattr(graphs, "_without_parameters", lambda program, keys: original(program, keys - {"weight"}))
    with pytest.raises(InvalidArgument, match="Linear cannot be followed: with other parameters"):
        live_graph(nn.Linear(4, 3), torch.randn(2, 4))


def test_a_state_that_is_none_is_refused() -> None:
    data = state_to_bytes({"backbone": nn.Linear(4, 3).state_dict()})
    assert set(state_dict_arrays(data, "backbone")) == {"weight", "bias"}
    for wrong, name in ((data, "optimizer"), (data[:100], "backbone"), (b"", "backbone"), (data[:-1], "backbone")):
        with pytest.raises(InvalidArgument, match="hold no state of a module"):
            state_dict_arrays(wrong, name)
