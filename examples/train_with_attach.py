"""All parameters in the cluster: rows by id, and the network as a dense table (gt.attach). A worker keeps
only a copy of the network, pulled after each step.

Start it several times with the address of a cluster, and the workers train one model: asynchronously, as here; with
``mode="sync"`` for both, as the ranks of torch.distributed, step by step.

Start several workers with the address of one cluster: they train one model asynchronously. With ``mode="sync"`` for
both the rows and the network, ranks of torch.distributed train it in synchronous steps.
Run it: python examples/train_with_attach.py [scheduler address]
"""

import sys

import torch
from click_data import DIMS, auc, batch
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster

STEPS = 300


def train(cluster: Cluster, steps: int, first_seed: int = 1) -> float:
    """Train on the batches of ``steps`` seeds from ``first_seed`` on; return the AUC on held-out clicks."""
    torch.manual_seed(0)
    fields = gt.EmbeddingGroup(
        cluster,
        "ctr",
        [gt.Field(name, dim=dim) for name, dim in DIMS.items()],
        optimizer=gt.Adagrad(0.2),
        reuse=True,  # the first worker makes the tables
    )
    model = gt.models.DeepFM(DIMS)
    dense = gt.attach(model, cluster, name="network", optimizer=gt.Adam(0.005), reuse=True)
    optimizer = gt.joint(dense, fields)
    for step in range(steps):
        mine = batch(first_seed + step)
        loss = nn.functional.binary_cross_entropy_with_logits(model(fields(mine)), mine["click"])
        loss.backward()
        optimizer.step()  # pushes the gradients of rows and network; pulls the network as all workers have made it
        optimizer.zero_grad()
    test = batch(0, 4000)
    with torch.no_grad():
        return auc(model(fields(test)), test["click"])


def main() -> None:
    with gt.connect(sys.argv[1]) if len(sys.argv) > 1 else gt.local(num_shards=2) as cluster:
        seed = torch.seed() % 2**40  # other clicks than another worker's
        print(f"AUC {train(cluster, STEPS, seed):.3f}")


if __name__ == "__main__":
    main()
