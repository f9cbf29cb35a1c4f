"""Glyphs of 40,992 classes classified over HTTP: 'geartrain serve' against a plain loop of torch behind FastAPI.

The network is that of 'geartrain quickstart' with random parameters, the pictures are PNG files of letters; who asks is
a process of its own on the same cores. Both services run all the time and are asked in turns. The time of an answer is
taken at half of our own greatest rate.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from _common import result
from _up import GEARTRAIN, CommandEnded, started
from PIL import Image, ImageDraw, ImageFont

from geartrain.launch.bench import Result
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models.backbones import build_backbone
from geartrain.workers.models.export import export_model
from geartrain.workers.models.trained_model import TrainedModel, save_model

NEEDS = ("onnx", "onnxruntime", "onnxscript", "starlette", "uvicorn")
CLASSES, DIM, CONNECTIONS, PICTURES = 40_992, 128, 32, 62
CLASSIFY = "/v1/classify?k=5"
HERE = Path(__file__).parent
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench serve``; ``full`` takes five times as many turns."""
    turns, cores = (15, 5)[not full] + 1, len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        pictures = draw_letters(Path(folder))
        trained, exported = make_model(Path(folder))
        rival = running.enter_context(plain("_plain_service.py", trained))
        sides = {"by one process": "1", f"by {cores} workers": str(cores)}
        ours = {name: running.enter_context(served(exported, f"--workers={number}")) for name, number in sides.items()}
        rates: dict[str, list[float]] = {name: [] for name in (*ours, rival)}
        for turn in range(turns):
            for name, found in rates.items():
                address, path = (rival, "/classify") if name == rival else (ours[name], CLASSIFY)
                told = asked(address, path, pictures, seconds=3.0)
                if turn:  # the first is to warm up
                    found.append(told["rate"])
        theirs = statistics.median(rates[rival])
        for name, address in ours.items():
            rate = statistics.median(rates[name])
            yield result(
                f"answers a second {name}, {CLASSES:,} classes, {cores} cores",
                rate,
                "torch and FastAPI, one by one",
                theirs,
                "answers/s",
                target=4.0 if name != "by one process" else None,
                more_is_better=True,
            )
            times = [asked(address, CLASSIFY, pictures, seconds=4.0, rate=rate / 2) for _ in range(turns - 1)]
            p99, p50 = (1000 * statistics.median(told[name] for told in times) for name in ("p99", "p50"))
            yield result(f"99 of 100 of {rate / 2:.0f} a second {name}", p99, "aim", 20.0, "ms", target=1.0)
            yield result(f"half of {rate / 2:.0f} a second {name}", p50, "aim", 20.0, "ms")


def make_model(folder: Path) -> tuple[Path, Path]:
    """The folder of a model in torch, and that of its export."""
    torch.manual_seed(0)
    settings = {"channels": 1, "image_size": 32, "dim": DIM, "width": 64}
    model = TrainedModel(
        backbone=build_backbone("stroke_net", settings).eval(),
        backbone_settings=settings,
        centers=torch.nn.functional.normalize(torch.randn(CLASSES, DIM), dim=1),
        class_names=[f"U+{0x3400 + label:04X}" for label in range(CLASSES)],
        preprocessing=Preprocessing(kind="ink", size=32),
    )
    save_model(folder / "trained", model)
    export_model(model, folder / "exported")
    return folder / "trained", folder / "exported"


def draw_letters(folder: Path) -> list[Path]:
    """PNG files of letters and digits."""
    font = ImageFont.load_default(size=48)
    paths = []
    for number, letter in enumerate(LETTERS[:PICTURES]):
        picture = Image.new("L", (64, 64), 255)
        ImageDraw.Draw(picture).text((14, 2), letter, 0, font)
        paths.append(folder / f"{number}.png")
        picture.save(paths[-1])
    return paths


def asked(
    address: str, path: str, pictures: list[Path], *, seconds: float, rate: float | None = None
) -> dict[str, float]:
    """What a process that asks says. Raises RuntimeError if a question failed."""
    arguments = [sys.executable, str(HERE / "_asking.py"), address, path, *map(str, pictures)]
    wish = {"connections": CONNECTIONS if rate is None else 4 * CONNECTIONS, "seconds": seconds, "rate": rate}
    done = subprocess.run(arguments, input=json.dumps(wish), capture_output=True, text=True, check=True)
    told: dict[str, float] = json.loads(done.stdout)
    if told["failed"]:
        raise RuntimeError(f"{told['failed']} questions to {address} failed")
    return told


@contextlib.contextmanager
def served(*arguments: str | Path) -> Iterator[str]:
    """The address of 'geartrain serve'."""
    with started([*GEARTRAIN, "serve", *arguments, "--listen=127.0.0.1:0"]) as (_, facts):
        yield facts["address"]


@contextlib.contextmanager
def plain(program: str, model: Path, *arguments: str) -> Iterator[str]:
    """The address of a loop by hand: a program beside this one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with subprocess.Popen([sys.executable, str(HERE / program), str(model), str(port), *arguments]) as process:
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=5).close()
                    break
                except OSError:
                    if process.poll() is not None:
                        raise CommandEnded(f"{program} ended with {process.returncode}") from None
                    time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
