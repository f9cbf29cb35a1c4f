"""What workers on Ray train in tests: as docs/tutorials/ray.md, small, and stopped at gates where a test says go."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch

import geartrain as gt

STEPS, SNAPSHOT_STEPS, CLASSES = 40, 5, 64


def train(address: str, folder: Path, gates: Iterable[int]) -> float:
    """Train from the newest snapshot in ``folder`` on; return the last loss. Waits after each step of ``gates``."""
    torch.manual_seed(0)
    images, labels = torch.randn(CLASSES, 16), torch.arange(CLASSES)
    backbone = torch.nn.Linear(16, 8)
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9)
    with gt.connect(address) as cluster:
        saved = sorted(folder.glob("step-*"))
        state = None
        if saved:
            snapshot = cluster.restore(saved[-1], replace=True)
            state = gt.state_from_bytes(snapshot.job_files()["state"])
            backbone.load_state_dict(state["backbone"])
            optimizer.load_state_dict(state["optimizer"])
        else:
            cluster.drop_table("classes")
        head = gt.ClassHead(
            cluster, "classes", num_classes=CLASSES, dim=8, optimizer=gt.SparseMomentum(lr=0.1), reuse=bool(state)
        )
        if state is not None:
            head.load_state_dict(state["head"])
        rows = gt.RowOptimizer(head)
        for step in range(0 if state is None else state["step"], STEPS):
            chosen = torch.randint(CLASSES, (16,), generator=torch.Generator().manual_seed(step))
            loss = head(backbone(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows.step()
            if (step + 1) % SNAPSHOT_STEPS == 0:
                parts = {"backbone": backbone, "optimizer": optimizer, "head": head}
                now = {"step": step + 1, **{name: part.state_dict() for name, part in parts.items()}}
                cluster.snapshot(folder, step=step + 1, files={"state": gt.state_to_bytes(now)}).result()
            if step in gates:
                await_gate(folder, step)
    return loss.item()


def await_gate(folder: Path, step: int) -> None:
    """Say that ``step`` is done, by the number of this process; wait until the test says go."""
    part = folder / f"part-{step}"
    part.write_text(str(os.getpid()))
    part.rename(folder / f"at-{step}")
    while not (folder / f"go-{step}").exists():
        time.sleep(0.02)


def await_file(path: Path, seconds: float) -> float:
    """Wait for it; return when it was there."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name} after {seconds:g} s"
        time.sleep(0.02)
    return time.monotonic()
