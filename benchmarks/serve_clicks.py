"""Probabilities of 100 candidates of 26 fields over HTTP: 'geartrain serve' and the model in torch behind FastAPI.

A DeepFM over tables of 50,000 rows for each field, embeddings of 16 and weights; 13 fields are the context's, 13 each
candidate's. Who asks is a process of its own on the same cores; all services run all the time and are asked in turns.
The time of an answer is taken at half of our own greatest rate.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from _common import result
from serve import asked, plain, served

from geartrain.ams.storage.export.mapped_rows import write_mapped
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.models.deepfm import DeepFM
from geartrain.launch.bench import Result
from geartrain.workers.ctr.samples.features import SampleFeature
from geartrain.workers.ctr.served_network import write_network
from geartrain.workers.models.saved_model import seal_folder

NEEDS = ("onnx", "onnxruntime", "onnxscript", "starlette", "uvicorn")
FIELDS, DIM, ROWS, HIDDEN, CANDIDATES = 26, 16, 50_000, (64, 32), 100
NAMES = [f"field_{number}" for number in range(FIELDS)]
OF_CONTEXT = NAMES[: FIELDS // 2]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench serve_clicks``; ``full`` takes five times as many turns."""
    what = f"{CANDIDATES} candidates of {FIELDS} fields"
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        folder = Path(name)
        make_model(folder)
        questions = write_questions(folder)
        cores = len(os.sched_getaffinity(0))
        workers = {"by one process": 1, f"by {cores} workers": cores}
        ours = {
            name: running.enter_context(served(folder / "exported", f"--workers={number}"))
            for name, number in workers.items()
        }
        torchs = {
            f"torch ({layer}) and FastAPI": running.enter_context(plain("_plain_clicks.py", folder, kind))
            for layer, kind in (("EmbeddingBag", "bags"), ("Embedding: one id a field", "ids"))
        }
        sides = {name: (address, "/v1/rank") for name, address in ours.items()}
        sides |= {name: (address, "/rank") for name, address in torchs.items()}
        require_equal(list(sides.values()), questions[0])
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(15 if full else 4):
            for name, (address, path) in sides.items():
                told = asked(address, path, questions, seconds=3.0)
                if turn:  # the first is to warm up
                    rates[name].append(told["rate"])
        rate = {name: statistics.median(found) for name, found in rates.items()}
        first = next(iter(torchs))
        for name, number in workers.items():
            for rival in torchs:
                target = 3.0 if number == cores and rival == first else None
                case = f"requests a second {name}, {what}"
                yield result(case, rate[name], rival, rate[rival], "requests/s", target=target, more_is_better=True)
            times = [asked(*sides[name], questions, seconds=4.0, rate=rate[name] / 2) for _ in range(15 if full else 5)]
            p99, p50 = (1000 * statistics.median(told[part] for told in times) for part in ("p99", "p50"))
            yield result(f"99 of 100 of {rate[name] / 2:.0f} a second {name}", p99, "aim", 10.0, "ms", target=1.0)
            yield result(f"half of {rate[name] / 2:.0f} a second {name}", p50, "aim", 10.0, "ms")


def make_model(folder: Path) -> None:
    """A model of random rows: exported, and as torch has it."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    widths = dict.fromkeys(NAMES, DIM) | {f"{name}_weight": 1 for name in NAMES}
    features = [
        SampleFeature(name=name, dim=width, of=(name.removesuffix("_weight"),), table=name)
        for name, width in widths.items()
    ]
    network = DeepFM(widths, HIDDEN)
    rows = {name: rng.standard_normal((ROWS, width)).astype(np.float32) / 10 for name, width in widths.items()}
    exported = folder / "exported"
    (exported / "tables").mkdir(parents=True)
    mapped = []
    for number, (name, width) in enumerate(widths.items()):
        spec = TableSpec(name=name, dim=width, optimizer=SGD(1.0))
        file = f"tables/{number}.safetensors"
        write_mapped(exported / file, spec, ROWS, [(np.arange(ROWS), rows[name])])
        mapped.append({"table": name, "file": file, "rows": ROWS, "spec": spec.to_dict()})
    config = {
        "kind": "clicks",
        "model": "deepfm",
        "version": 1,
        "created": time.time(),
        "training": {},
        "fields": NAMES,
        "items": NAMES[len(OF_CONTEXT) :],
        "history": 0,
        "longest": None,
        "features": [feature.to_json() for feature in features],
        "parity": write_network(network, features, exported / "network.onnx"),
        "tables": mapped,
    }
    seal_folder(exported, config)
    plain_model = {"fields": NAMES, "dim": DIM, "rows": ROWS, "hidden": HIDDEN}
    (folder / "plain.json").write_text(json.dumps(plain_model))
    weights = {name: torch.from_numpy(array) for name, array in rows.items()}
    torch.save({"network": network.state_dict(), "rows": weights}, folder / "plain.pt")


def write_questions(folder: Path, count: int = 20) -> list[Path]:
    """Bodies of requests."""
    rng = np.random.default_rng(1)
    paths = []
    for number in range(count):
        context = {name: int(rng.integers(ROWS)) for name in OF_CONTEXT}
        candidates = [
            {name: int(rng.integers(ROWS)) for name in NAMES if name not in OF_CONTEXT} for _ in range(CANDIDATES)
        ]
        paths.append(folder / f"{number}.json")
        paths[-1].write_text(json.dumps({"context": context, "candidates": candidates}))
    return paths


def require_equal(sides: list[tuple[str, str]], question: Path) -> None:
    """Raise ValueError unless all services rank alike."""
    found = []
    for address, path in sides:
        request = urllib.request.Request(f"http://{address}{path}", question.read_bytes())
        with urllib.request.urlopen(request, timeout=60) as answer:
            found.append([one["candidate"] for one in json.load(answer)["answers"][0]])
    if found[1:] != found[:-1]:
        raise ValueError(f"the services rank differently: {found}")
