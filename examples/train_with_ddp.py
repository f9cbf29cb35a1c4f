"""Dense parameters under DistributedDataParallel, rows in a cluster and asynchronous: each part as it scales.

Every rank has the network, whose gradients DDP averages at each step. No rank waits for another because of the rows:
each pulls and pushes its own (Persia calls that hybrid training; Lian et al., 2021).

Run it: python examples/train_with_ddp.py [ranks] [scheduler address]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from click_data import DIMS, auc, batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt

STEPS = 300


def train(rank: int, ranks: int, address: str, steps: int) -> float:
    """Train on one rank; return the AUC on clicks that were not trained on."""
    torch.manual_seed(0)  # DDP would send the first rank's parameters all the same
    with gt.connect(address) as cluster:
        fields = gt.EmbeddingGroup(
            cluster,
            "ctr",
            [gt.Field(name, dim=dim) for name, dim in DIMS.items()],
            optimizer=gt.Adagrad(0.2),
            reuse=True,  # of the ranks one makes the tables
        )  # mode="sync": the rows wait for all ranks, too
        model = DistributedDataParallel(gt.models.DeepFM(DIMS))
        optimizer = gt.joint(torch.optim.Adam(model.parameters(), lr=0.005), fields)
        for step in range(steps):
            mine = batch(1 + step * ranks + rank)
            loss = nn.functional.binary_cross_entropy_with_logits(model(fields(mine)), mine["click"])
            loss.backward()  # DDP averages the network's gradients; those of rows stay here
            optimizer.step()  # one push to each shard, then Adam
            optimizer.zero_grad()
        dist.barrier()  # else the others' last pushes are not counted
        test = batch(0, 4000)
        with torch.no_grad():
            return auc(model.module(fields(test)), test["click"])


def _rank(rank: int, ranks: int, meeting: str, address: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    reached = train(rank, ranks, address, STEPS)
    print(f"rank {rank} of {ranks}: AUC {reached:.3f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    ranks, address = int(sys.argv[1]) if len(sys.argv) > 1 else 2, sys.argv[2] if len(sys.argv) > 2 else None
    up = None
    if address is None:  # a cluster for as long as this runs
        command = [sys.executable, "-m", "geartrain", "up", "--shards=2", "--scheduler-listen=127.0.0.1:0", "--json"]
        up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert up.stdout is not None
        address = json.loads(up.stdout.readline())["scheduler"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (ranks, str(Path(folder, "meeting")), address), nprocs=ranks)
    finally:
        if up is not None:
            up.terminate()
            up.wait()


if __name__ == "__main__":
    main()
