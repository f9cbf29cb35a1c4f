"""What is measured on a GPU, a part each; ``scripts/gpu_check.py`` runs the parts in a process each.

    python -m scripts.kernels.on_device head           # prints a JSON object
    python -m scripts.kernels.on_device head --dry     # the same code, small, on a CPU: shows that it runs

A step's kernels are timed one by one by events and stand beside what they must cost at the rates of a copy and of a
product that were measured on the same card; so is the whole step, beside the rival's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.bridge.kernels.hashing import HashTable
from geartrain.bridge.kernels.launch import Cost, observed
from scripts.kernels.model import DEVICES, Device

Report = dict[str, Any]
REPOSITORY = Path(__file__).resolve().parents[2]
FIELDS, BATCH, WIDTH = 26, 4096, 16


class Card:
    """The device under test and what it is measured by; dry: a CPU and sizes that take no time."""

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.rounds = 2 if dry else 10

    def size(self, full: int, small: int) -> int:
        return small if self.dry else full

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def seconds(self, step: Callable[[], object]) -> float:
        """Median time of a step after two that do not count."""
        taken = []
        for number in range(2 + self.rounds):
            self.wait()
            began = time.perf_counter()
            step()
            self.wait()
            if number >= 2:
                taken.append(time.perf_counter() - began)
        return median(taken)

    def rates(self) -> Device:
        """The card as a copy and two products see it now."""
        side = self.size(8192, 128)
        flat = torch.empty(2, side * side * self.size(8, 1), device=self.device)
        copied = flat.nbytes / self.seconds(lambda: flat[0].copy_(flat[1]))

        def products(dtype: torch.dtype) -> float:
            left = torch.randn(side, side, device=self.device, dtype=dtype)
            return 2 * side**3 / self.seconds(lambda: left @ left)

        return Device("here", copied, products(torch.bfloat16), products(torch.float32))

    def kernels(self, step: Callable[[], object], rates: Device) -> list[Report]:
        """Each kernel of a step: how often it is started, what it takes and what the model says, in ms."""
        found: dict[str, list[tuple[Cost, Any, Any]]] = defaultdict(list)

        def stopwatch(kernel: Any, cost: Cost, start: Callable[[], None]) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            start()
            end.record()
            found[getattr(kernel, "__name__", None) or kernel.fn.__name__].append((cost, begin, end))

        step()
        with observed(stopwatch):
            step()
        self.wait()
        lines = []
        for name, starts in found.items():
            modelled = 1e3 * sum(rates.seconds(cost) for cost, _, _ in starts)
            measured = sum(begin.elapsed_time(end) for _, begin, end in starts)
            lines.append({"kernel": name, "starts": len(starts), "measured_ms": measured, "modelled_ms": modelled})
        return sorted(lines, key=lambda line: -line["measured_ms"])

    def launches(self, step: Callable[[], object]) -> tuple[int, list[str]]:
        """Kernels and copies of a step as the profiler counts them, and its slowest lines."""
        if self.dry:
            step()
            return 0, []
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            step()
            self.wait()
        on_device = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        table = profiled.key_averages().table(sort_by="cuda_time_total", row_limit=12, max_name_column_width=60)
        return len(on_device), table.splitlines()

    @contextlib.contextmanager
    def without_waits(self) -> Iterator[None]:
        """An operation that makes the host wait raises inside."""
        if self.dry:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


HEADS: list[tuple[str, int, float, str, bool, bool]] = [
    # name, classes, sample rate, type of rows and slots, bf16 autocast, margin
    ("1 M full, fp32", 1_000_000, 1.0, "float32", False, True),
    ("1 M full, fp32 rows, bf16 autocast", 1_000_000, 1.0, "float32", True, True),
    ("1 M full, bf16 rows", 1_000_000, 1.0, "bfloat16", True, True),
    ("1 M full, bf16 rows, no margin", 1_000_000, 1.0, "bfloat16", True, False),
    ("10 M x 0.1, fp32 rows, bf16 autocast", 10_000_000, 0.1, "float32", True, True),
    ("10 M x 0.1, bf16 rows", 10_000_000, 0.1, "bfloat16", True, True),
]


def _head_step(card: Card, case: tuple[str, int, float, str, bool, bool]) -> Callable[[], None]:
    return _head_training(card, case)[2]


def _head_training(
    card: Card, case: tuple[str, int, float, str, bool, bool]
) -> tuple[gt.ClassHead, gt.RowOptimizer, Callable[[], None]]:
    """A head, the optimizer of its rows, and a step of both."""
    name, classes, rate, dtype, autocast, with_margin = case
    del name
    dim, batch = card.size(512, 64), card.size(512, 16)
    classes = card.size(classes, 2_000)
    head = gt.ClassHead(
        None,
        "check",
        num_classes=classes,
        dim=dim,
        select=gt.FullSoftmax() if rate == 1 else gt.PartialFC(rate),
        margin=gt.ArcFace(scale=64, margin=0.5) if with_margin else None,
        rows="ranks",
        optimizer=gt.SparseMomentum(lr=0.1, momentum=0.9),
        config=gt.HeadConfig(dtype=dtype, slot_dtype=dtype),
    ).to(card.device)
    rows = gt.RowOptimizer(head)
    generator = torch.Generator(card.device).manual_seed(0)
    features = torch.randn(batch, dim, device=card.device, generator=generator).requires_grad_()
    labels = torch.randint(classes, (batch,), device=card.device, generator=generator)

    def step() -> None:
        with torch.autocast(card.device.type, torch.bfloat16, enabled=autocast):
            loss = head(features, labels)
        loss.backward()
        rows.step()
        rows.zero_grad()
        features.grad = None

    return head, rows, step


def _rival_step(card: Card, case: tuple[str, int, float, str, bool, bool]) -> Callable[[], object] | None:
    """Published partial FC with the same types, where it fits."""
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    from _published_partial_fc import PublishedPartialFC

    _, classes, rate, dtype, autocast, with_margin = case
    if dtype != "float32" or not with_margin or torch.distributed.is_initialized():
        return None
    dim, batch = card.size(512, 64), card.size(512, 16)
    classes = card.size(classes, 2_000)
    with card.device:
        rival = PublishedPartialFC(classes, dim, rate)
        features = torch.randn(batch, dim, requires_grad=True)
        labels = torch.randint(classes, (batch,))

    def step() -> None:
        with card.device, torch.autocast(card.device.type, torch.bfloat16, enabled=autocast):
            rival.step(features, labels)

    return step


def rates(card: Card) -> Report:
    """Versions, and the rates of a copy and of products, beside those that the model of kernels was made with."""
    import triton

    properties = None if card.dry else torch.cuda.get_device_properties(0)
    name = "CPU" if properties is None else properties.name
    known = next((asdict(device) for label, device in DEVICES.items() if label in name), None)
    return {
        "device": name,
        "memory_gib": 0 if properties is None else properties.total_memory / 2**30,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__},
        "cuda": torch.version.cuda,
        "measured": asdict(card.rates()),
        "model": known,
    }


def waits(card: Card) -> Report:
    """One training step of each head, and of embeddings, in which an operation that makes the host wait raises."""
    failures = {}
    makes: dict[str, Callable[[], Callable[[], None]]] = {
        case[0]: lambda case=case: _head_step(card, (case[0], min(case[1], 1_000_000), *case[2:])) for case in HEADS
    }
    makes["embeddings"] = lambda: _embedding_step(card, *_embedding_fields(card))[0]
    makes["hash table"] = lambda: _hash_step(card)[0]
    for name, make in makes.items():
        try:
            step = make()
            for _ in range(2):  # kernels are compiled
                step()
            with card.without_waits():
                step()
        except Exception as exc:  # the report names it, and the other cases are run
            failures[name] = f"{type(exc).__name__}: {exc}"
    return {"steps": len(makes), "failures": failures}


def captured(card: Card) -> Report:
    """Steps that a CUDA graph replays, each with another learning rate, beside those that the host launches."""
    failures, cases = {}, []
    for case in HEADS:
        case = (case[0], min(case[1], 1_000_000), *case[2:])
        try:
            head, rows, step = _head_training(card, case)
            other, other_rows, other_step = _head_training(card, case)
            for _ in range(3):  # kernels are compiled
                step()
                other_step()
            graph = _Repeated(step) if card.dry else torch.cuda.CUDAGraph()
            if isinstance(graph, torch.cuda.CUDAGraph):
                with torch.cuda.graph(graph):
                    step()
            for number in range(5):
                rows.param_groups[0]["lr"] = other_rows.param_groups[0]["lr"] = 0.1 / (1 + number)
                graph.replay() if card.dry else rows.replay(graph)
                other_step()
            gap = float((head.weights() - other.weights()).abs().max())
            if gap or head.step != other.step:
                failures[case[0]] = f"rows differ by {gap}, at the steps {head.step} and {other.step}"
            replayed = graph.replay if card.dry else lambda rows=rows, graph=graph: rows.replay(graph)
            times = {"replayed_ms": 1e3 * card.seconds(replayed), "launched_ms": 1e3 * card.seconds(other_step)}
            cases.append({"case": case[0], **times})
        except Exception as exc:
            failures[case[0]] = f"{type(exc).__name__}: {exc}"
    return {"cases": cases, "failures": failures}


class _Repeated:
    """What stands for a graph where there are none."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


def head(card: Card) -> Report:
    """Steps of a class head on ranks beside published partial FC."""
    here, cases = card.rates(), []
    for case in HEADS:
        line: Report = {"case": case[0]}
        try:
            step = _head_step(card, case)
            line["ours_ms"] = 1e3 * card.seconds(step)
            line["kernels"] = card.kernels(step, here)
            line["modelled_ms"] = sum(kernel["modelled_ms"] for kernel in line["kernels"])
            line["launches"], line["slowest"] = card.launches(step)
            if not card.dry:
                line["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
                torch.cuda.reset_peak_memory_stats()
            del step
            rival = _rival_step(card, case)
            if rival is not None:
                line["rival"], line["theirs_ms"] = "partial FC as published", 1e3 * card.seconds(rival)
                line["ratio"] = line["theirs_ms"] / line["ours_ms"]
        except Exception as exc:
            line["failed"] = f"{type(exc).__name__}: {exc}"
        if not card.dry:
            torch.cuda.empty_cache()
        cases.append(line)
    return {"rates": asdict(here), "cases": cases}


def _embedding_fields(card: Card) -> tuple[int, int, int, int]:
    """(fields, ids of each, width, samples) of ``geartrain bench sparse_step``."""
    return FIELDS, card.size(1_000_000, 500), WIDTH, card.size(BATCH, 64)


def _embedding_step(
    card: Card, fields: int, ids: int, dim: int, samples: int, per_bag: int = 1, *, grows: bool = False
) -> tuple[Callable[[], None], Callable[[], None]]:
    """(our step, that of ``nn.EmbeddingBag`` with sparse gradients and SGD): forward, backward, update."""
    names = [f"f{number}" for number in range(fields)]
    group = gt.EmbeddingGroup(
        None,
        "check",
        [gt.Field(name, dim=dim, num_rows=None if grows else ids) for name in names],
        rows="ranks",
        optimizer=gt.SGD(0.1),
    ).to(card.device)
    rows = gt.RowOptimizer(group)
    bags = nn.ModuleDict({name: nn.EmbeddingBag(ids, dim, mode="sum", sparse=True) for name in names}).to(card.device)
    sgd = torch.optim.SGD(bags.parameters(), lr=0.1)
    random = np.random.default_rng(0)
    numbers: dict[str, Tensor] = {
        name: torch.from_numpy(random.integers(0, ids, (samples, per_bag))).to(card.device) for name in names
    }

    def ours() -> None:
        out = group(numbers)
        torch.stack([out[name].sum() for name in names]).sum().backward()
        rows.step()
        rows.zero_grad()

    def theirs() -> None:
        torch.stack([bags[name](numbers[name]).sum() for name in names]).sum().backward()
        sgd.step()
        sgd.zero_grad()

    return ours, theirs


def _hash_step(card: Card) -> tuple[Callable[[], object], Callable[[], object]]:
    """(the slots of known ids in a hash table, their places among sorted ones)."""
    num_held, num_asked = card.size(10_000_000, 2_000), card.size(1_050_000, 200)
    held = torch.randint(-(2**62), 2**62, (num_held,), device=card.device)
    table = HashTable(num_held + 2 * num_asked, card.device)
    for some in held.split(num_asked):
        table.reserve(len(some))
        table.find_or_insert(some)
    asked, ordered = held[torch.randint(num_held, (num_asked,), device=card.device)], held.sort().values
    return lambda: table.find_or_insert(asked), lambda: torch.searchsorted(ordered, asked)


def embeddings(card: Card) -> Report:
    """Steps of embeddings on ranks beside ``nn.EmbeddingBag(sparse=True)`` and ``torch.optim.SGD``; a hash table."""
    here, cases = card.rates(), []
    bags = "EmbeddingBag(sparse=True), SGD"
    long = 1, card.size(10_000_000, 1_000), 128, card.size(52_429, 64), 20
    makes: dict[str, tuple[str, Callable[[], tuple[Callable[[], object], Callable[[], object]]]]] = {
        f"{FIELDS} fields, 1 id a bag": (bags, lambda: _embedding_step(card, *_embedding_fields(card))),
        f"{FIELDS} fields that grow": (bags, lambda: _embedding_step(card, *_embedding_fields(card), grows=True)),
        "1 field, 1.05 M ids, D = 128": (bags, lambda: _embedding_step(card, *long)),
        "hash table, 1.05 M of 10 M ids": ("searchsorted", lambda: _hash_step(card)),
    }
    for name, (rival, make) in makes.items():
        line: Report = {"case": name, "rival": rival}
        try:
            ours, theirs = make()
            line["ours_ms"], line["theirs_ms"] = 1e3 * card.seconds(ours), 1e3 * card.seconds(theirs)
            line["ratio"] = line["theirs_ms"] / line["ours_ms"]
            line["kernels"] = card.kernels(ours, here)
            line["modelled_ms"] = sum(kernel["modelled_ms"] for kernel in line["kernels"])
            line["launches"], line["slowest"] = card.launches(ours)
        except Exception as exc:
            line["failed"] = f"{type(exc).__name__}: {exc}"
        cases.append(line)
    return {"rates": asdict(here), "cases": cases}


def graph(card: Card) -> Report:
    """The exact graph of one million rows, by a head's own build."""
    rows, dim = card.size(1_000_000, 2_000), card.size(512, 32)
    head = gt.ClassHead(
        None,
        "graph",
        num_classes=rows,
        dim=dim,
        select=gt.KNNSoftmax(0.1, k=card.size(32, 8)),
        margin=gt.ArcFace(),
        rows="ranks",
        optimizer=gt.SGD(0.1),
        config=gt.HeadConfig(dtype="bfloat16"),
    ).to(card.device)
    began = time.perf_counter()
    head.rebuild_graph()
    card.wait()
    return {"rows": rows, "dim": dim, "seconds": time.perf_counter() - began}


PARTS: dict[str, Callable[[Card], Report]] = {
    "rates": rates,
    "waits": waits,
    "captured": captured,
    "head": head,
    "embeddings": embeddings,
    "graph": graph,
}


def main() -> None:
    """Run a part and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--dry", action="store_true", help="small, on a CPU, by the references")
    given = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    joined = "WORLD_SIZE" in os.environ
    if joined and not given.dry:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if joined:
        torch.distributed.init_process_group("gloo" if given.dry else "nccl")
    with contextlib.redirect_stdout(sys.stderr):
        report = PARTS[given.part](Card(dry=given.dry))
    if int(os.environ.get("RANK", "0")) == 0:
        json.dump(report | {"ranks": ranks}, sys.stdout, indent=1)
    if joined:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    main()
