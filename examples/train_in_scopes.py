"""One training script on one device, replicated, split and sharded over ranks: what differs is a dict of scopes.

A class is a pair of characters (1,296 of them), an image shows one in some size, at some angle. They are drawn with the
font that Pillow brings; nothing is downloaded.

Run it:
    python examples/train_in_scopes.py
    torchrun --rdzv-backend loopback --nproc-per-node 2 examples/train_in_scopes.py --scopes replicated
    torchrun --rdzv-backend loopback --nproc-per-node 2 examples/train_in_scopes.py --scopes split
    torchrun --rdzv-backend loopback --nproc-per-node 2 examples/train_in_scopes.py --scopes sharded
"""

import argparse
import gc
import os
import string

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import geartrain as gt

CHARACTERS = string.ascii_uppercase + string.digits
CLASSES, SIDE = len(CHARACTERS) ** 2, 16
LOOKS = [(size, angle) for size in (12, 14) for angle in (-10, 0, 10)]


def drawn(character: str, size: int, angle: int) -> np.ndarray:
    """A picture [16, 16] of a character, 0 to 1."""
    picture = Image.new("L", (SIDE, SIDE))
    font = ImageFont.load_default(size)
    ImageDraw.Draw(picture).text((SIDE / 2, SIDE / 2), character, font=font, fill=255, anchor="mm")
    return np.asarray(picture.rotate(angle), np.float32) / 255


PICTURES = torch.tensor(np.stack([[drawn(item, *look) for look in LOOKS] for item in CHARACTERS]))  # [36, 6, 16, 16]


def batch_of(step: int, size: int) -> tuple[Tensor, Tensor]:
    """Images [size, 16, 32] and labels [size] of a step, the same on every rank."""
    random = torch.Generator().manual_seed(step)
    pair = torch.randint(len(CHARACTERS), (2, size), generator=random)
    looks = torch.randint(len(LOOKS), (2, size), generator=random)
    images = torch.cat([PICTURES[pair[0], looks[0]], PICTURES[pair[1], looks[1]]], 2)
    return images + 0.1 * torch.randn(images.shape, generator=random), pair[0] * len(CHARACTERS) + pair[1]


class Classifier(nn.Module):
    """An ordinary model: nothing in it knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Flatten(), nn.Linear(2 * SIDE * SIDE, 256), nn.ReLU(), nn.Linear(256, 128), nn.LayerNorm(128)
        )
        self.head = nn.Linear(128, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images))
        return logits


SCOPES = {
    "replicated": {"": gt.Replicate()},  # all of it on every rank: DistributedDataParallel
    "split": {"backbone": gt.Replicate(), "head": gt.Split()},  # of the head each rank has some classes
    "sharded": {"backbone": gt.Replicate(shard=True), "head": gt.Split()},  # and of the backbone a part: FSDP2
}


def train(options: argparse.Namespace) -> list[float]:
    """Train; return the loss of each step."""
    mesh = gt.mesh()
    with torch.device("meta"):  # no memory: gt.parallelize gives each rank that of its own parts
        model = Classifier()
    model = gt.parallelize(model, mesh, SCOPES[options.scopes], loss=nn.CrossEntropyLoss())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    here = sum(getattr(item, "_local_tensor", item).numel() for item in model.parameters())
    print(f"rank {mesh.rank} of {mesh.world_size}: {here:,} parameters are here", flush=True)

    first = load(options.load, model, optimizer) if options.load else 0
    losses = []
    for step in range(first, first + options.steps):
        images, labels = (item[mesh.rank :: mesh.world_size].to(mesh.device) for item in batch_of(step, options.batch))
        loss = model(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if mesh.rank == 0 and (step % 20 == 0 or step == first + options.steps - 1):
            print(f"step {step:3d}  loss {losses[-1]:.3f}", flush=True)
    if options.save:
        save(options.save, model, optimizer, first + options.steps)
    if options.explain and mesh.rank == 0:
        print(model.plan.explain())
    return losses


def save(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Every rank writes what it has."""
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model.module, optimizer), "step": step}
    dcp.save(state, checkpoint_id=folder)


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read it on any number of ranks, in any scopes; return the step."""
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model.module, optimizer), "step": 0}
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model.module, optimizer, state["optimizer"])
    return state["step"]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line, or those in ``argv``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scopes", choices=SCOPES, default="split", help="who holds what (default: split)")
    parser.add_argument("--steps", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--batch", type=int, default=256, help="samples of a step, of all ranks (default: 256)")
    parser.add_argument("--save", metavar="FOLDER", help="write a checkpoint there at the end")
    parser.add_argument("--load", metavar="FOLDER", help="go on from a checkpoint")
    parser.add_argument("--explain", action="store_true", help="print what a step costs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    options = arguments()
    if "RANK" in os.environ:  # torchrun sets it
        dist.init_process_group("gloo")
    train(options)
    if dist.is_initialized():
        gc.collect()  # DDP holds the group's threads, which must not outlive the interpreter
        dist.destroy_process_group()
