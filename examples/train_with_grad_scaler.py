"""One loop in float16 with torch.amp.GradScaler, clipping, a schedule, and a checkpoint to go on from.

Run it: python examples/train_with_grad_scaler.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import geartrain as gt

NUM_CLASSES, STEPS, BATCH = 500, 80, 200


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prototypes with noise: the same for a step whoever asks."""
    prototypes = torch.randn(NUM_CLASSES, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(NUM_CLASSES, (BATCH,), generator=generator)
    return prototypes[labels] + 0.5 * torch.randn(BATCH, 32, generator=generator), labels


def trained(folder: Path, last_step: int) -> list[float]:
    """Losses up to ``last_step`` of STEPS, from the checkpoint in ``folder`` if there is one."""
    torch.manual_seed(1)
    with gt.local() as cluster:
        backbone = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
        head = gt.ClassHead(cluster, "classes", num_classes=NUM_CLASSES, dim=64)
        model = nn.ModuleDict({"backbone": backbone, "head": head})
        optimizer = gt.joint(torch.optim.AdamW(backbone.parameters()), head)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        state = {"optimizer": optimizer, "schedule": schedule, "scaler": scaler}
        first_step = gt.load(model, folder, state=state)["step"] if folder.exists() else 0
        losses = []
        for step in range(first_step, last_step):
            inputs, labels = batch(step)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = head(backbone(inputs), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            gt.clip_grad_norm_(backbone.parameters(), optimizer, max_norm=5.0)
            scaler.step(optimizer)  # skips the rows, too, where it finds infinity
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        gt.save(model, folder, state={**state, "step": last_step})
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = trained(Path(folder, "whole"), STEPS)
        parts = [trained(Path(folder, "parts"), step) for step in (STEPS // 2, STEPS)]
    print(f"loss {whole[0]:.4f} -> {whole[-1]:.4f}, and {parts[1][-1]:.4f} if it is resumed half-way")
    assert whole == parts[0] + parts[1]


if __name__ == "__main__":
    main()
