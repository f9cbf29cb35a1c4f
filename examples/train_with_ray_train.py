"""Ray Train's TorchTrainer with checkpoints of gt.save: a worker dies, and the run goes on from the last of them.

Run it: python examples/train_with_ray_train.py    (pip install 'geartrain[ray]' 'ray[train]')
"""

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from click_data import DIMS, auc, batch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch import nn

import geartrain as gt

EPOCHS, STEPS, RANKS = 4, 40, 2


def train(settings: dict[str, Any]) -> None:
    """Train on one worker, in the process group of Ray Train."""
    torch.manual_seed(0)
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    with gt.connect(settings["address"]) as cluster:
        fields = gt.EmbeddingGroup(
            cluster,
            "ctr",
            [gt.Field(name, dim=dim) for name, dim in DIMS.items()],
            optimizer=gt.Adagrad(0.2),
            mode="sync",  # rows wait for all ranks, as the network does
            reuse=True,
        )
        model = nn.ModuleDict({"fields": fields, "network": gt.models.DeepFM(DIMS)})
        network = ray.train.torch.prepare_model(model["network"])
        optimizer = torch.optim.Adam(network.parameters(), lr=0.005)
        joint = gt.joint(optimizer, fields)
        first = 0
        if (checkpoint := ray.train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                first = gt.load(model, folder, state={"optimizer": optimizer}, replace=True)["epoch"]
        for epoch in range(first, EPOCHS):
            for step in range(epoch * STEPS, (epoch + 1) * STEPS):
                mine = batch(1 + step * ranks + rank)
                loss = nn.functional.binary_cross_entropy_with_logits(network(fields(mine)), mine["click"])
                loss.backward()
                joint.step()
                joint.zero_grad()
            if epoch == 2 and rank == 1 and first == 0:
                os.kill(os.getpid(), signal.SIGKILL)  # simulates a lost worker
            # Every rank gives the same folder, which all shards see; Ray Train takes a copy of it.
            folder = Path(settings["folder"], f"epoch-{epoch}")
            gt.save(model, folder, state={"optimizer": optimizer, "epoch": epoch + 1})
            test = batch(0, 4000)
            with torch.no_grad():
                reached = auc(network(fields(test)), test["click"])
            report = {"epoch": epoch, "began_at": first, "auc": reached}
            ray.train.report(report, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
            if rank == 0:
                shutil.rmtree(folder)


def main() -> None:
    if not ray.is_initialized():
        ray.init(num_cpus=RANKS + 3, include_dashboard=False, log_to_driver=False)  # on a cluster of yours: ray.init()
    with tempfile.TemporaryDirectory() as folder, gt.ray.cluster(num_shards=2) as cluster:
        trainer = ray.train.torch.TorchTrainer(
            train,
            train_loop_config={"address": cluster.address, "folder": folder},
            scaling_config=ScalingConfig(num_workers=RANKS),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=2)),
        )
        found = trainer.fit().metrics
        print(f"after epoch {found['epoch']}, from epoch {found['began_at']} on: AUC {found['auc']:.3f}", flush=True)


if __name__ == "__main__":
    main()
