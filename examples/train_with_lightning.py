"""A class head under Lightning: automatic optimisation, gradient clipping, a schedule, checkpoints with their rows.

pip install 'geartrain[examples]'
Run it: python examples/train_with_lightning.py
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain.ams.client.cluster import Cluster

NUM_CLASSES, SAMPLES, BATCH = 500, 4_000, 200


class Classifier(lightning.LightningModule):
    """A backbone and a head. The head's call is the loss."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
        self.head = gt.ClassHead(cluster, "classes", num_classes=NUM_CLASSES, dim=64)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        inputs, labels = batch
        loss: torch.Tensor = self.head(self.backbone(inputs), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = gt.joint(torch.optim.AdamW(self.backbone.parameters()), self.head)  # the line that adds Geartrain
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class RowCheckpoints(TorchCheckpointIO):
    """Saves, loads and removes the rows of a head together with each of Lightning's checkpoints: NAME.ckpt.rows."""

    def __init__(self, head: gt.ClassHead) -> None:
        super().__init__()
        self.head = head

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        gt.save(self.head, f"{path}.rows")  # first: where a checkpoint is, its rows are
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **settings: Any) -> Any:
        gt.load(self.head, f"{path}.rows", replace=True)
        return super().load_checkpoint(path, *args, **settings)

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        shutil.rmtree(f"{path}.rows", ignore_errors=True)


def trained(folder: Path, loader: DataLoader[Any], epochs: int, resume: Path | None = None) -> list[float]:
    """Losses up to ``epochs`` of 4, from a checkpoint if there is one."""
    torch.manual_seed(1)
    with gt.local() as cluster:
        model = Classifier(cluster)
        trainer = lightning.Trainer(
            max_epochs=4,
            callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1), StopAfter(epochs)],
            plugins=[RowCheckpoints(model.head)],
            gradient_clip_val=5.0,  # by the joint norm: the optimizer holds the rows, too
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader, ckpt_path=resume)
    return model.losses


class StopAfter(lightning.Callback):
    """Stands for a crash after some epochs."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch + 1 == self.epochs


def main() -> None:
    torch.manual_seed(0)
    prototypes, labels = torch.randn(NUM_CLASSES, 32), torch.randint(NUM_CLASSES, (SAMPLES,))
    inputs = prototypes[labels] + 0.5 * torch.randn(SAMPLES, 32)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=BATCH)
    with tempfile.TemporaryDirectory() as folder:
        whole = trained(Path(folder, "whole"), loader, epochs=4)
        first = trained(Path(folder, "parts"), loader, epochs=2)
        second = trained(Path(folder, "parts"), loader, epochs=4, resume=Path(folder, "parts", "epoch=1.ckpt"))
    print(f"loss {whole[0]:.4f} -> {whole[-1]:.4f}, and {second[-1]:.4f} if it is resumed half-way")
    assert whole == first + second


if __name__ == "__main__":
    main()
