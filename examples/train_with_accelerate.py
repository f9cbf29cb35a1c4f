"""A class head under Accelerate: prepare, gradient accumulation, clipping, a schedule, states with their rows.

pip install 'geartrain[examples]'
Run it: python examples/train_with_accelerate.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
from geartrain.ams.client.cluster import Cluster

NUM_CLASSES, SAMPLES, BATCH, EPOCHS = 500, 4_000, 100, 4


class Classifier(nn.Module):
    """A backbone and a head. The call is the loss."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
        self.head = gt.ClassHead(cluster, "classes", num_classes=NUM_CLASSES, dim=64)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.backbone(inputs), labels)
        return loss


def save_rows(models: list[nn.Module], weights: list[Any], folder: str) -> None:
    """Hook of ``accelerator.save_state``: save the model with its rows, in place of Accelerate's own file."""
    for number, model in enumerate(models):
        gt.save(model, Path(folder, f"model-{number}"))
    weights.clear()


def load_rows(models: list[nn.Module], folder: str) -> None:
    """Hook of ``accelerator.load_state``: load the model with its rows."""
    for number, model in enumerate(models):
        gt.load(model, Path(folder, f"model-{number}"), replace=True)
    models.clear()


def trained(folder: Path, loader: DataLoader[Any], epochs: range) -> list[float]:
    """Train some epochs; return their losses. Continues from the state in ``folder`` unless they begin at 0."""
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.register_save_state_pre_hook(save_rows)
    accelerator.register_load_state_pre_hook(load_rows)
    losses = []
    with gt.local() as cluster:
        model = Classifier(cluster)
        joint = gt.joint(torch.optim.AdamW(model.backbone.parameters()), model.head)  # the line that adds Geartrain
        schedule = torch.optim.lr_scheduler.OneCycleLR(joint, max_lr=0.01, total_steps=EPOCHS * len(loader) // 2 + 1)
        model, optimizer, loader, schedule = accelerator.prepare(model, joint, loader, schedule)
        if epochs.start > 0:
            accelerator.load_state(str(folder))
        for _ in epochs:
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    loss = model(inputs, labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        gt.clip_grad_norm_(model.parameters(), joint, max_norm=5.0)  # exact wherever the rows are
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        accelerator.save_state(str(folder))
    return losses


def main() -> None:
    torch.manual_seed(0)
    prototypes, labels = torch.randn(NUM_CLASSES, 32), torch.randint(NUM_CLASSES, (SAMPLES,))
    inputs = prototypes[labels] + 0.5 * torch.randn(SAMPLES, 32)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=BATCH)
    with tempfile.TemporaryDirectory() as folder:
        whole = trained(Path(folder, "whole"), loader, range(EPOCHS))
        first = trained(Path(folder, "parts"), loader, range(EPOCHS // 2))
        second = trained(Path(folder, "parts"), loader, range(EPOCHS // 2, EPOCHS))
    print(f"loss {whole[0]:.4f} -> {whole[-1]:.4f}, and {second[-1]:.4f} if it is resumed half-way")
    assert whole == first + second


if __name__ == "__main__":
    main()
