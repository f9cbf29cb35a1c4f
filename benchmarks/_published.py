"""A training of 40,992 classes or more that publishes versions on request, in which a mixture of versions shows.

    python _published.py CLASSES < wishes, a line of JSON each

In version v every picture has the feature of class 0, and all rows are turned by v columns: network and rows of one
version name class 0 with score 1, those of two versions do not. The network is that of the quickstart.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.workers.models.backbones import StrokeNet

DIM, AT_ONCE = 128, 16_384


class Turned(nn.Module):
    """Costs what the network of the quickstart does, and gives one feature."""

    def __init__(self) -> None:
        super().__init__()
        self.network = StrokeNet(dim=DIM)
        self.direction = nn.Parameter(torch.zeros(DIM))

    def forward(self, images: Tensor) -> Tensor:
        """Bitmaps [N, 1, 32, 32] -> [N, D]."""
        return self.network(images) * 1e-9 + self.direction


def main(num_classes: int) -> None:
    """Carry out requests until stdin ends."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    rows = random.standard_normal((num_classes, DIM)).astype(np.float32)
    network, publisher, head = Turned(), None, None
    with gt.local(num_shards=1) as cluster:
        for line in sys.stdin:
            wish = json.loads(line)
            began = time.time()
            if wish["do"] == "begin":
                head = gt.ClassHead(
                    cluster,
                    "bench",
                    num_classes=num_classes + 1024,
                    num_live_classes=num_classes,
                    dim=DIM,
                    margin=gt.ArcFace(),
                    optimizer=gt.SGD(0.1),
                )
                publisher = gt.Publisher(network, head, wish["folder"], preprocessing=gt.Preprocessing())
            assert head is not None and publisher is not None
            if wish["do"] == "turn":
                for start in range(0, num_classes, AT_ONCE):
                    ids = np.arange(start, min(num_classes, start + AT_ONCE))
                    head.table.assign(ids, np.roll(rows[ids], wish["version"], axis=1))
                with torch.no_grad():
                    network.direction.copy_(torch.from_numpy(np.roll(rows[0], wish["version"])))
                publisher.publish(wish["version"])
            if wish["do"] == "add":
                head.add_classes(1, rows=torch.from_numpy(np.roll(-rows[0], wish["version"] - 1))[None])
                publisher.publish(wish["version"])
            print(json.dumps({"began": began}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
