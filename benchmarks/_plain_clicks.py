"""The service of a click model that people write by hand: torch behind FastAPI, one request after the other.

    python _plain_clicks.py MODEL PORT bags|ids

MODEL is the folder that :mod:`serve_clicks` wrote. ``bags``: every field may have any number of ids, as in the model
that is compared (``nn.EmbeddingBag``); ``ids``: one in each (``nn.Embedding``). Its best shape on few cores: one thread
of torch, no gradients, on the thread of the event loop, no check of what is sent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from torch import Tensor, nn

from geartrain.bridge.models.deepfm import DeepFM

folder, kind = Path(sys.argv[1]), sys.argv[3]
told = json.loads((folder / "plain.json").read_text())
fields, dim, num_rows, hidden = told["fields"], told["dim"], told["rows"], told["hidden"]
dims = dict.fromkeys(fields, dim) | {f"{name}_weight": 1 for name in fields}
network = DeepFM(dims, hidden)
table = nn.EmbeddingBag if kind == "bags" else nn.Embedding
tables = nn.ModuleDict({name: table(num_rows, width) for name, width in dims.items()})
state = torch.load(folder / "plain.pt", weights_only=True)
network.load_state_dict(state["network"])
tables.load_state_dict({f"{name}.weight": rows for name, rows in state["rows"].items()})
network.eval()
torch.set_num_threads(1)
app = FastAPI()


def looked_up(name: str, samples: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Embedding and weight of a field."""
    if kind == "ids":
        ids = torch.tensor([sample[name] for sample in samples])
        return tables[name](ids), tables[f"{name}_weight"](ids)
    bags = [value if isinstance(value := sample[name], list) else [value] for sample in samples]
    offsets = torch.tensor([0, *map(len, bags)][:-1]).cumsum(0)
    ids = torch.tensor([item for bag in bags for item in bag])
    return tables[name](ids, offsets), tables[f"{name}_weight"](ids, offsets)


@app.post("/rank")
async def rank(request: Request) -> dict[str, object]:
    """The best ten of the candidates."""
    body = await request.json()
    context, candidates = body["context"], body["candidates"]
    vectors = {}
    with torch.inference_mode():
        for name in fields:
            of_context = name in context
            both = looked_up(name, [context] if of_context else candidates)
            vectors[name], vectors[f"{name}_weight"] = (
                part.expand(len(candidates), -1) if of_context else part for part in both
            )
        scores, places = network(vectors).sigmoid().topk(10)
    pairs = zip(places.tolist(), scores.tolist(), strict=True)
    return {"answers": [[{"candidate": place, "probability": score} for place, score in pairs]]}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[2]), log_level="error", access_log=False)
