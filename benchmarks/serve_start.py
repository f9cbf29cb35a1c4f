"""Start-up time of a server of a million classes, and the memory of three workers beside that of one.

The folder is made of random centers and names. Ready is when 'geartrain serve' says so, which is after every file was
checked; the files are in the cache of the disk, as after an export. Memory is the proportional one (PSS) of all its
processes, asked once each class's center was read. Needs Linux.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from _common import result
from _up import GEARTRAIN, started
from PIL import Image

from geartrain.launch.bench import Result
from geartrain.serving.index.registry import write_index
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models.backbones import build_backbone
from geartrain.workers.models.export import export_model
from geartrain.workers.models.trained_model import TrainedModel

NEEDS = ("onnx", "onnxruntime", "onnxscript", "starlette", "uvicorn")
NUM_CLASSES, DIM, SIDE = 1_000_000, 128, 32
ROUNDS, QUESTIONS, FEATURES = 3, 12, 250
ASKED_SECONDS, ASKED_MEMORY = 3.0, 1.2
_JSON = {"Content-Type": "application/json"}
_PLAIN = """
import sys
import geartrain as gt
print(gt.load_model(sys.argv[1]).predict(sys.argv[2], 1), flush=True)
"""


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench serve_start``; ``full`` takes three times as many turns."""
    with tempfile.TemporaryDirectory() as folder:
        model, picture = Path(folder) / "model", Path(folder) / "picture.png"
        _write_model(model)
        pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE), np.uint8)
        Image.fromarray(pixels).save(picture)
        served, plain, one, three = [], [], [], []
        for _ in range(ROUNDS * (3 if full else 1)):
            served.append(_ready_seconds(model, picture, 1, one))
            start = time.perf_counter()
            subprocess.run([sys.executable, "-P", "-c", _PLAIN, model, picture], check=True, capture_output=True)
            plain.append(time.perf_counter() - start)
            _ready_seconds(model, picture, 3, three)
        case = f"until ready, {NUM_CLASSES:,} classes x {DIM}"
        ready = float(np.median(served))
        yield result(case, ready, "torch: load_model, one answer", float(np.median(plain)), "s", target=1.0)
        yield result(case, ready, "asked", ASKED_SECONDS, "s", target=1.0)
        memory = [float(np.median(sizes)) / 1e6 for sizes in (three, one)]
        yield result("memory of three workers", memory[0], "one", memory[1], "MB", target=1 / ASKED_MEMORY)


def _write_model(folder: Path) -> None:
    torch.manual_seed(0)
    settings = {"channels": 1, "image_size": SIDE, "dim": DIM, "width": 64}
    model = TrainedModel(
        backbone=build_backbone("stroke_net", settings).eval(),
        centers=torch.randn(NUM_CLASSES, DIM),
        class_names=[f"class {number}" for number in range(NUM_CLASSES)],
        preprocessing=Preprocessing(kind="photo", size=SIDE),
    )
    export_model(
        model,
        folder,
        finish=lambda staging, arrays, _: {"index": write_index(staging, arrays["centers"], is_cosine=True)},
    )


def _ready_seconds(model: Path, picture: Path, workers: int, sizes: list[int]) -> float:
    """Seconds until a server answers; notes how many bytes of memory it has once it was asked."""
    start = time.perf_counter()
    with _server(model, workers) as (process, said):
        seconds = time.perf_counter() - start
        features = np.random.default_rng(1).standard_normal((FEATURES, DIM)).astype(np.float32)
        images = [base64.b64encode(picture.read_bytes()).decode()]
        for _ in range(QUESTIONS):  # each by connections of its own, so that every worker is asked
            for operation, asked in (("classify", {"images": images}), ("nearest", {"features": features.tolist()})):
                body = json.dumps(asked).encode()
                request = urllib.request.Request(f"{said['url']}/v1/{operation}", body, _JSON)
                assert json.load(urllib.request.urlopen(request))["answers"]
        parent = psutil.Process(process.pid)
        processes = [parent, *parent.children(recursive=True)]
        assert not any("libtorch" in item.path for each in processes for item in each.memory_maps())
        sizes.append(sum(each.memory_full_info().pss for each in processes))
    return seconds


@contextmanager
def _server(model: Path, workers: int) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    command = [*GEARTRAIN, "serve", model, "--listen=127.0.0.1:0", f"--workers={workers}"]
    with started(command) as process_and_facts:
        yield process_and_facts


if __name__ == "__main__":
    for line in results():
        print(line)
