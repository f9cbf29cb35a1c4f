"""A classifier of drawn characters, from training to an answer over HTTP: python examples/train_and_serve.py"""

import io
import json
import string
import urllib.request

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

import geartrain as gt
from geartrain.workers.models.trained_model import TrainedModel

NAMES = string.ascii_uppercase + string.digits


def drawn(name: str, size: float, angle: float) -> Image.Image:
    picture = Image.new("L", (48, 48))
    ImageDraw.Draw(picture).text((24, 24), name, font=ImageFont.load_default(size), fill=255, anchor="mm")
    return picture.rotate(angle)


class Backbone(nn.Sequential):
    def forward(self, images: torch.Tensor) -> torch.Tensor:  # uint8 [N, 1, 16, 16], as a service gives them
        return super().forward(images.flatten(1) / 255)


def main(folder: str = "models/characters") -> None:
    torch.manual_seed(0)
    as_bitmaps = gt.Preprocessing(kind="ink", size=16)
    pictures = [[drawn(name, size, angle) for size in (16, 24, 32) for angle in (-8, -4, 4, 8)] for name in NAMES]
    images = torch.stack([torch.from_numpy(as_bitmaps.bitmap(one)) for several in pictures for one in several])
    labels = torch.arange(len(NAMES)).repeat_interleave(len(pictures[0]))

    with gt.local() as cluster:  # train
        backbone = Backbone(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64))
        head = gt.ClassHead(cluster, "characters", num_classes=len(NAMES), dim=64, margin=gt.CosFace(scale=16))
        optimizer = gt.joint(torch.optim.AdamW(backbone.parameters()), head)
        for _ in range(60):
            loss = head(backbone(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model = TrainedModel(
            backbone=backbone.eval(), centers=head.weights(), class_names=list(NAMES), preprocessing=as_bitmaps
        )

    parity = model.export_onnx(folder)  # export: a folder for any number of services
    print(f"loss {loss.item():.3f}; onnxruntime's features are within {parity.max_error:.0e} of PyTorch's")

    with gt.ops.Role("serve", listen="127.0.0.1:0", models=[folder]) as service:  # serve; or: geartrain serve FOLDER
        file = io.BytesIO()
        drawn("G", 28, 0).save(file, "png")  # of a size and angle that it never saw
        url = f"http://{service.address}/v1/classify?k=3"
        request = urllib.request.Request(url, file.getvalue(), {"Content-Type": "image/png"})
        with urllib.request.urlopen(request) as answer:  # ask
            print("G is", json.load(answer)["answers"][0])

    index = gt.load_model(folder).to_faiss()  # for whoever searches in Python
    print(f"faiss has {index.ntotal} classes of {index.d} numbers")


if __name__ == "__main__":
    main()
