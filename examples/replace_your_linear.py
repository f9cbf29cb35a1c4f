"""Your own loop with its last layer in Geartrain. The lines marked (1) to (4) replace these:

(1) classifier = nn.Linear(64, NUM_CLASSES)
(2) optimizer over classifier.parameters(), too
(3) loss = F.cross_entropy(classifier(backbone(images)), labels)
(4) optimizer.step()

Run it: python examples/replace_your_linear.py
"""

import torch
from torch import nn

import geartrain as gt

NUM_CLASSES, STEPS, BATCH = 20_000, 300, 256


def images_of(labels: torch.Tensor, prototypes: torch.Tensor) -> torch.Tensor:
    """Pictures for the example: a class's prototype with noise."""
    return prototypes[labels] + 0.5 * torch.randn(len(labels), prototypes.shape[1])


def main() -> None:
    torch.manual_seed(0)
    prototypes = torch.randn(NUM_CLASSES, 32)
    backbone = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))

    with gt.local(num_shards=2) as cluster:  # gt.connect("host:7000") for a cluster of processes
        head = gt.ClassHead(  # (1)
            cluster,
            "classes",
            num_classes=NUM_CLASSES,
            dim=64,
            select=gt.PartialFC(sample_rate=0.1),
            margin=gt.ArcFace(scale=16, margin=0.1),
            optimizer=gt.SparseMomentum(lr=0.3),
        )
        optimizer = torch.optim.AdamW(backbone.parameters(), lr=2e-3)
        rows = gt.RowOptimizer(head)  # (2)

        everything = torch.arange(NUM_CLASSES)
        head.imprint([(prototypes[part], part) for part in everything.split(1000)], backbone)  # a good start; optional
        for step in range(STEPS):
            labels = torch.randint(NUM_CLASSES, (BATCH,))
            loss = head(backbone(images_of(labels, prototypes)), labels)  # (3)
            optimizer.zero_grad()
            rows.zero_grad()
            loss.backward()
            optimizer.step()
            rows.step()  # (4)
            if step % 50 == 0:
                print(f"step {step:4d}  loss {float(loss.detach()):.3f}")

        backbone.eval()
        labels = torch.randint(NUM_CLASSES, (2000,))
        with torch.no_grad():
            _, found = head.predict(backbone(images_of(labels, prototypes)), k=1)
        print(f"top-1 of {len(labels)} new images: {float((found[:, 0] == labels).float().mean()):.3f}")


if __name__ == "__main__":
    main()
