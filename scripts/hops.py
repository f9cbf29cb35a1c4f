"""How much Python one warm step passes through, by path: functions, files, calls, and the longest function of it.

    python scripts/hops.py                          every path
    python scripts/hops.py push=20/6/25 ...         fails where a path passes a limit of functions/files/calls
    python scripts/hops.py --list push              its calls, one a line

A wheel and a development install count alike. Paths: pull, push, head, embeddings (2 fields), embeddings18, classify.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.workers.models.trained_model import TrainedModel

ROOMS = ("geartrain", "geartrain.ams", "geartrain.bridge", "geartrain.workers", "geartrain.serving")
ROOTS = tuple(f"{Path(str(importlib.import_module(room).__file__)).resolve().parent}/" for room in ROOMS)
WARM_STEPS = 3
Step = Callable[[], None]


class Calls:
    """Calls of functions of the product on any thread that starts while this is there, as long as ``is_on``."""

    def __init__(self) -> None:
        self.is_on, self.codes = False, list[CodeType]()
        threading.setprofile(self._heard)

    def of(self, step: Step) -> list[CodeType]:
        """Those of one step, once it was done a few times."""
        for _ in range(WARM_STEPS):
            step()
        self.codes, self.is_on = [], True
        sys.setprofile(self._heard)
        try:
            step()
        finally:
            sys.setprofile(None)
            self.is_on = False
        return self.codes

    def _heard(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(ROOTS):
            self.codes.append(frame.f_code)


def lines_of(code: CodeType) -> int:
    """Lines of a function."""
    return max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno) - code.co_firstlineno + 1


def paths_of_tables(cluster: Cluster) -> Iterator[tuple[str, Step]]:
    """Rows of a table."""
    table = cluster.create_table("rows", dim=16, num_rows=None, optimizer=gt.Adagrad(0.1))
    ids, gradients = np.arange(100), np.ones((100, 16), np.float32)
    table.push(ids, gradients)
    yield "pull", lambda: table.pull(ids) is None
    yield "push", lambda: table.push(ids, gradients) is None


def path_of_head(cluster: Cluster) -> Step:
    """Backbone, forward, backward and step of a class head."""
    backbone = nn.Sequential(nn.Linear(32, 128))
    head = gt.ClassHead(cluster, "classes", num_classes=2000, dim=128)
    optimizer = gt.joint(torch.optim.AdamW(backbone.parameters()), head)
    features, labels = torch.randn(32, 32), torch.randint(2000, (32,))

    def step() -> None:
        head(backbone(features), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def path_of_embeddings(cluster: Cluster, num_fields: int) -> Step:
    """The same of embeddings and a linear layer."""
    fields = [gt.Field(f"f{number}", dim=16) for number in range(num_fields)]
    group = gt.EmbeddingGroup(cluster, f"fields{num_fields}", fields, optimizer=gt.Adagrad(0.05))
    layer = nn.Linear(16 * num_fields, 1)
    optimizer = gt.joint(torch.optim.Adam(layer.parameters()), group)
    batch = {field.name: torch.randint(10**12, (64,)) for field in fields}

    def step() -> None:
        layer(torch.cat(list(group(batch).values()), 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def path_of_classify(folder: Path) -> Step:
    """A question to a served model, from its ASGI request to its answer; the answering thread settles after it."""
    from geartrain.serving.models.pictures import _EXAMPLE
    from geartrain.workers.data.bitmaps import Preprocessing
    from geartrain.workers.models.backbones import build_backbone
    from geartrain.workers.models.export import export_model

    settings = {"channels": 1, "image_size": 16, "dim": 16}
    model = TrainedModel(
        backbone=build_backbone("stroke_net", settings).eval(),
        backbone_settings=settings,
        centers=torch.nn.functional.normalize(torch.randn(50, 16), dim=1),
        class_names=[f"class {label}" for label in range(50)],
        preprocessing=Preprocessing(kind="photo", size=16, channels=1),
    )
    export_model(model, folder / "model")
    app, loop = gt.serve_app(folder / "model"), asyncio.new_event_loop()
    body = f'{{"images": ["{_EXAMPLE}"], "k": 5}}'.encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/classify",
    }
    scope |= {"query_string": b"", "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}

    async def ask() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: dict[str, Any]) -> None:
            if message.get("status", 200) != 200:
                raise RuntimeError(f"the question was refused with {message['status']}")

        await app(dict(scope), receive, send)

    def step() -> None:
        loop.run_until_complete(ask())
        time.sleep(0.05)

    return step


def main() -> None:
    """Print what each path passes through; exit 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("limits", nargs="*", metavar="PATH=FUNCTIONS/FILES/CALLS")
    parser.add_argument("--list", default="", metavar="PATH")
    given = parser.parse_args()
    limits = {
        path: tuple(map(int, most.split("/"))) for path, _, most in (said.partition("=") for said in given.limits)
    }
    torch.set_num_threads(1)
    calls, over = Calls(), []
    with gt.local(num_shards=2) as cluster, tempfile.TemporaryDirectory() as folder:
        steps = dict(paths_of_tables(cluster)) | {
            "head": path_of_head(cluster),
            "embeddings": path_of_embeddings(cluster, 2),
            "embeddings18": path_of_embeddings(cluster, 18),
            "classify": path_of_classify(Path(folder)),
        }
        if unknown := {*limits, *filter(None, [given.list])} - set(steps):
            parser.error(f"there is no path {', '.join(unknown)}; there are {', '.join(steps)}")
        for path, step in steps.items():
            codes = calls.of(step)
            longest = max(codes, key=lines_of)
            counts = len(set(codes)), len({code.co_filename for code in codes}), len(codes)
            print("{}: {} functions, {} files, {} calls".format(path, *counts), end="; ")
            print(f"longest {longest.co_qualname}, {lines_of(longest)} lines")
            if any(count > most for count, most in zip(counts, limits.get(path, counts), strict=True)):
                over.append(path)
            for code in codes if path == given.list else ():
                print(f"    {code.co_filename}  {code.co_qualname}")
    if over:
        sys.exit(f"over its limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
