"""A fast gear on slow gears: python examples/train_with_slow_gears.py [scheduler address].

Slow gears of this file, as many as you like, on a cluster (geartrain up):
    PYTHONPATH=examples geartrain slowgear --scheduler 127.0.0.1:7000 --name demo-image --dim 16 \\
        --module train_with_slow_gears:build --samples train_with_slow_gears:samples \\
        --optimizer adam:0.01 --gradients-per-id 4
Without an address the slow gear runs in this process.
"""

import sys

import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster

IMAGES, STEPS = 500, 100


def build() -> nn.Module:
    """The dense part: a batch of samples [B, 1, 12, 12] -> dense features [B, 16]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 16))


def samples(image: int) -> Tensor | None:
    """The sample of an id: a bright spot, whose place says whether the image is liked."""
    if image >= IMAGES:
        return None
    pixels = 0.1 * torch.randn(1, 12, 12, generator=torch.Generator().manual_seed(image))
    pixels[0, image % 8 : image % 8 + 4, image // 8 % 8 : image // 8 % 8 + 4] += 1.0
    return pixels


def train(cluster: Cluster, **where: object) -> None:
    """The fast gear: any training loop."""
    image = gt.SlowGear(cluster, "demo-image", dim=16, expire_seconds=2, gradients_per_id=4, **where)
    fast = nn.Sequential(nn.ReLU(), nn.Linear(16, 1))
    optimizer, rows = torch.optim.Adam(fast.parameters(), lr=0.01), gt.RowOptimizer(image)
    for step in range(STEPS):
        ids = torch.randint(IMAGES, (256,))
        liked = (ids % 8 < 4).float()
        loss = nn.functional.binary_cross_entropy_with_logits(fast(image(ids)).squeeze(-1), liked)
        loss.backward()
        optimizer.step()
        rows.step()  # gradients of the features go to the slow gears, once for each distinct id
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    image.flush()
    print(image.account(), flush=True)
    image.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with gt.connect(sys.argv[1]) as cluster:
            train(cluster)
    else:
        with gt.local() as cluster:
            train(cluster, build=build, samples=samples, optimizer=gt.Adam(0.01))
