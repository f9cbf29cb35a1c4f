"""The service that people write by hand: a model in torch behind FastAPI, one picture after the other.

    python _plain_service.py MODEL PORT

Its best shape on few cores: no gradients, centers of unit length, the best five alone, on the thread of the event loop.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI, Request
from PIL import Image
from torch.nn import functional

from geartrain.workers.models.trained_model import load_model

model = load_model(Path(sys.argv[1]))
assert model.preprocessing is not None
look, centers_DC = model.preprocessing, functional.normalize(model.centers, dim=1).T.contiguous()
app = FastAPI()


@app.post("/classify")
async def classify(request: Request) -> dict[str, object]:
    """The five classes that fit a picture best."""
    with Image.open(io.BytesIO(await request.body())) as picture:
        bitmap = torch.from_numpy(look.bitmap(picture))[None]
    with torch.inference_mode():
        scores, ids = (functional.normalize(model.backbone(bitmap), dim=1) @ centers_DC).topk(5)
    pairs = zip(ids[0].tolist(), scores[0].tolist(), strict=True)
    return {"answers": [[{"class": model.class_names[i], "id": i, "score": score} for i, score in pairs]]}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[2]), log_level="error", access_log=False)
