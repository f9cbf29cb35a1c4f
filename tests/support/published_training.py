"""A training in a process of its own that publishes when it is told to, and in which a mixture of versions shows.

A line of JSON for each wish on stdin, and one for what became of it on stdout.

In version v every picture has feature e(v mod D), and class c the center e((c + v) mod D). So class 0 fits every
picture with score 1 exactly if network and rows are of one version; and its name says which.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt

D = 8
LOOK = gt.Preprocessing(kind="photo", size=16, channels=1)


class OneDirection(nn.Module):
    """The same feature of every picture."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.eye(D)[0])

    def forward(self, images: Tensor) -> Tensor:
        """Bitmaps [N, 1, 16, 16] -> [N, D]."""
        return images.float().flatten(1)[:, :1] * 0 + self.direction


def main() -> None:
    """Do what is told until stdin ends."""
    network = OneDirection()
    with gt.local(num_shards=2) as cluster:
        for line in sys.stdin:
            wish = json.loads(line)
            said: object = None
            if wish["do"] == "begin":
                folder = wish["folder"]
                head = gt.ClassHead(
                    cluster, folder[-50:], num_classes=2 * D, num_live_classes=D, dim=D, margin=gt.ArcFace()
                )
                publisher = gt.Publisher(network, head, folder, preprocessing=LOOK, increments=5, keep=4)
            elif wish["do"] == "publish":
                version = wish["version"]
                classes = np.arange(D)
                with torch.no_grad():
                    network.direction.copy_(torch.eye(D)[version % D])
                head.table.assign(classes, np.eye(D, dtype=np.float32)[(classes + version) % D])
                publisher.class_names = {label: f"{label}@{version}" for label in range(2 * D)}
                publisher.publish(version, wait=True)
            elif wish["do"] == "add":
                said = head.add_classes(1, rows=network.direction.detach()[None]).tolist()
            elif wish["do"] == "retire":
                head.retire_classes(torch.tensor(wish["classes"]))
            print(json.dumps({"done": wish["do"], "said": said}), flush=True)


if __name__ == "__main__":
    main()
