"""A model that ends in a class head, under torch.compile: the backbone is one graph, the head runs as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geartrain.ams.client.factory import local
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.rows.optimizer import RowOptimizer


class Classifier(nn.Module):
    def __init__(self, head: ClassHead) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = head

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(inputs), labels)
        return loss


@pytest.mark.parametrize("place", ["pull", "ranks"])
def test_a_compiled_model_trains_as_an_eager_one_and_only_the_head_breaks_its_graph(place: str) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    inputs, labels = torch.randn(4, 8), torch.tensor([1, 2, 3, 3])
    losses = []
    for is_compiled in (False, True):
        with local() as cluster:
            model = Classifier(ClassHead(cluster, "classes", num_classes=50, dim=16, rows=place))
            optimizers = [torch.optim.SGD(model.backbone.parameters(), lr=0.01), RowOptimizer(model.head)]
            call = torch.compile(model, backend=count) if is_compiled else model
            own: list[float] = []
            for _ in range(3):
                loss = call(inputs, labels)
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                own.append(loss.item())
            losses.append(own)
    assert len(graphs) == 1
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert len(set(losses[0])) == 3
