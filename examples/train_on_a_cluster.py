"""Train a 100,000-class head on a running cluster: python examples/train_on_a_cluster.py [scheduler address]."""

import sys

import torch
from torch import nn

import geartrain as gt

CLASSES, STEPS = 100_000, 50
address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000"

with gt.connect(address) as cluster:  # gt.local(): the same without any process or socket
    cluster.drop_table("demo")  # a second run starts anew; without this it would stop with TableExists
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 128))
    head = gt.ClassHead(
        cluster,
        "demo",
        num_classes=CLASSES,
        dim=128,
        select=gt.PartialFC(sample_rate=0.02),
        margin=gt.CosFace(scale=32, margin=0.1),
        optimizer=gt.SparseMomentum(lr=0.5),
    )
    optimizer, rows = torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9), gt.RowOptimizer(head)
    features, labels = torch.randn(128, 32), torch.randint(CLASSES, (128,))
    for step in range(STEPS):
        loss = head(backbone(features), labels)  # class centers are pulled from the shards
        loss.backward()
        optimizer.step()
        rows.step()  # one push per shard
        optimizer.zero_grad()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
