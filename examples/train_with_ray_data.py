"""Workers on Ray read batches of a Ray dataset: the network under DDP, rows on shards that Ray keeps alive.

Run it: python examples/train_with_ray_data.py [workers]    (pip install 'geartrain[ray]' 'ray[data]')
"""

import os
import sys
from typing import Any

import pandas
import ray
import torch
from click_data import DIMS, auc, batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt

EPOCHS, BATCHES, SIZE = 3, 60, 512


def train(address: str, readers: list[Any]) -> float:
    """Train on one worker, with its own reader; return the AUC on clicks that were not trained on."""
    torch.manual_seed(0)
    gt.init_process_group("gloo")
    with gt.connect(address) as cluster:
        fields = gt.EmbeddingGroup(
            cluster,
            "ctr",
            [gt.Field(name, dim=dim) for name, dim in DIMS.items()],
            optimizer=gt.Adagrad(0.2),
            reuse=True,  # of the workers one makes the tables
        )
        model = DistributedDataParallel(gt.models.DeepFM(DIMS))
        optimizer = gt.joint(torch.optim.Adam(model.parameters(), lr=0.005), fields)
        reader = readers[int(os.environ["RANK"])]
        for _ in range(EPOCHS):
            for mine in reader.iter_torch_batches(batch_size=SIZE):
                loss = nn.functional.binary_cross_entropy_with_logits(model(fields(mine)), mine["click"])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.distributed.barrier()
        test = batch(0, 4000)
        with torch.no_grad():
            return auc(model.module(fields(test)), test["click"])


def main() -> None:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    if not ray.is_initialized():
        ray.init(
            num_cpus=workers + 4, include_dashboard=False, log_to_driver=False
        )  # on a cluster of yours: ray.init()
    samples = {name: column.numpy() for name, column in batch(1, BATCHES * SIZE).items()}
    dataset = ray.data.from_pandas(pandas.DataFrame(samples))  # read yours with ray.data.read_parquet and its like
    with gt.ray.cluster(num_shards=2, workers=workers) as cluster:
        readers = dataset.streaming_split(workers, equal=True)
        for rank, reached in enumerate(cluster.run(train, cluster.address, readers)):
            print(f"worker {rank} of {workers}: AUC {reached:.3f}", flush=True)


if __name__ == "__main__":
    main()
