"""Templates are pooled and judged as a plain loop over them would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.cli.main import build_app
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models import trained_model
from geartrain.workers.models.templates import pair_cosines, read_media, read_template_pairs, verify_templates
from geartrain.workers.models.trained_model import TrainedModel

LOOK = Preprocessing(kind="photo", size=16, channels=3)


class Colours(nn.Module):
    """Centred mean colours as features."""

    def forward(self, bitmaps: torch.Tensor) -> torch.Tensor:
        return bitmaps.float().mean(dim=(2, 3)) - 120


def model() -> TrainedModel:
    return TrainedModel(backbone=Colours(), centers=torch.eye(2, 3), class_names=["a", "b"], preprocessing=LOOK)


def draw(folder: Path) -> tuple[Path, Path, list[tuple[str, int, int]], list[tuple[int, int, int]]]:
    """Pictures of 12 templates with gaps in their ids, some media of several frames; and all pairs of them."""
    random = np.random.default_rng(3)
    rows, people = [], {}
    for place, template in enumerate([7, 3, 19, 4, 100, 101, 55, 54, 8, 9, 10, 11]):
        person = place % 4
        people[template] = person
        shade = np.array([[200, 60, 60], [60, 200, 60], [60, 60, 200], [190, 190, 40]])[person]
        for medium in range(1 + place % 3):
            for frame in range(1 + medium * 2):
                name = f"{template}-{medium}-{frame}.png"
                colour = tuple(int(c) for c in (shade + random.normal(0, 60, 3)).clip(0, 255))
                Image.new("RGB", (20, 24), colour).save(folder / name)  # type: ignore[arg-type]
                rows.append((name, template, medium))
    random.shuffle(rows)
    ids = sorted(people)
    pairs = [(a, b, int(people[a] == people[b])) for a in ids for b in ids if a < b]
    media, told = folder / "media.txt", folder / "pairs.txt"
    media.write_text("".join(f"{name} {template} {medium}\n" for name, template, medium in rows))
    told.write_text("".join(f"{a} {b} {same}\n" for a, b, same in pairs))
    return media, told, rows, pairs


def reference(folder: Path, rows: list[tuple[str, int, int]], pairs: list[tuple[int, int, int]]) -> dict[float, float]:
    """Template by template, pair by pair, in float64."""
    features = {}
    for template in {template for _, template, _ in rows}:
        of_media: dict[int, list[np.ndarray]] = {}
        for name, owner, medium in rows:
            if owner == template:
                feature = np.asarray(Image.open(folder / name).convert("RGB"), np.float64)[0, 0] - 120
                of_media.setdefault(medium, []).append(feature / np.linalg.norm(feature))
        mean = np.mean([np.mean(frames, axis=0) for frames in of_media.values()], axis=0)
        features[template] = mean / np.linalg.norm(mean)
    scores = np.array([features[a] @ features[b] for a, b, _ in pairs])
    same = np.array([bool(flag) for _, _, flag in pairs])
    rates = {}
    for rate in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        loosest = None  # of all scores that occur, the lowest that lets in few enough of the different pairs
        for threshold in np.unique(scores):
            if (scores[~same] >= threshold).sum() <= rate * (~same).sum() + 1e-9:
                loosest = threshold
                break
        if rate * (~same).sum() >= 1:
            rates[rate] = float((scores[same] >= loosest).mean())
    return rates


@pytest.mark.parametrize("mirror", [False, True])
def test_pooled_templates_are_judged_as_one_by_one(mirror: bool, tmp_path: Path) -> None:
    media, told, rows, pairs = draw(tmp_path)
    found = verify_templates(model(), tmp_path, media, told, mirror=mirror)
    assert (found.templates, found.images, found.pairs) == (12, len(rows), len(pairs))
    assert found.true_accepts == pytest.approx(reference(tmp_path, rows, pairs))
    assert 0 < found.true_accepts[0.1] < 1


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, made.numel())
        return made


def test_millions_of_pairs_take_the_memory_of_some() -> None:
    random = np.random.default_rng(0)
    pooled = torch.from_numpy(random.normal(size=(50, 8)))
    first, second = random.integers(50, size=(2, 100_000))
    with Largest() as seen:
        cosines = pair_cosines(pooled, first, second)
    assert seen.numbers < 200_000
    np.testing.assert_allclose(cosines, (pooled.numpy()[first] * pooled.numpy()[second]).sum(1), rtol=1e-12)


@pytest.mark.parametrize(
    ("media", "pairs", "said"),
    [
        ("a.png 1\n", "1 2 1\n", r"media.txt, line 1, is 'a.png 1'; it must be 'picture template media'"),
        ("a.png 1 0\nb.png 2 0\n", "1 2 1\n1 3 0\n", r"pairs.txt, line 2: templates \[1, 3\]"),
        ("a.png 1 0\nb.png 2 0\n", "1 2 1\n1 2 2\n", r"line 2: the last number is 2; it must be 0 or 1"),
        ("a.png 1 0\nb.png 2 0\n", "1 2 1\n", r"1 same pairs of 1; it needs some of each kind"),
        ("", "1 2 1\n", "is empty"),
        ("a.png x 0\n", "1 2 1\n", "media.txt, line 1"),
    ],
)
def test_files_that_do_not_fit_are_named_with_their_line(media: str, pairs: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "media.txt").write_text(media)
    (tmp_path / "pairs.txt").write_text(pairs)
    with pytest.raises(InvalidArgument, match=said):
        read_template_pairs(tmp_path / "pairs.txt", read_media(tmp_path / "media.txt").templates)


def test_the_command_verifies_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    media, told, _, _ = draw(tmp_path)
    monkeypatch.setattr(trained_model, "picture_model", lambda *_, **__: model())
    arguments = ["verify", "run", "--images", str(tmp_path), "--media", str(media)]
    refused = CliRunner().invoke(build_app(arguments), arguments)
    assert isinstance(refused.exception, ConfigError) and "need all of" in str(refused.exception)
    arguments += ["--template-pairs", str(told), "--json"]
    (answer,) = json.loads(CliRunner().invoke(build_app(arguments), arguments).stdout)
    assert answer["templates"] == 12 and answer["true_accepts"]["0.1"] > 0
