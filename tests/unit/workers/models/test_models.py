"""A saved model is read back whole, or the damaged file is named."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from geartrain.ams.storage.snapshot.manifest import seal_json, unseal_json
from geartrain.ams.values.errors import ConfigError, ModelDamaged
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models.predict import image_files
from geartrain.workers.models.trained_model import load_model, save_model
from tests.support.picture_models import picture_model

FILES = ("backbone.safetensors", "centers.safetensors", "names.safetensors", "config.json")
FLIPS = 12


def saved(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    look = Preprocessing(kind="photo", size=32, channels=3)
    names = ["A", "B\u2028", "\N{GREEK SMALL LETTER ALPHA}"]
    save_model(folder, picture_model(torch.randn(3, 16), names, look))
    return folder


def test_a_model_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    first = load_model(saved(tmp_path / "model"))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(FILES)
    save_model(tmp_path / "again" / "model", first)
    second = load_model(tmp_path / "again")  # the folder of a run
    assert (second.class_names, second.preprocessing) == (first.class_names, first.preprocessing)
    torch.testing.assert_close(second.centers, first.centers, rtol=0, atol=0)
    for name, tensor in first.backbone.state_dict().items():
        torch.testing.assert_close(second.backbone.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("name", FILES)
def test_any_changed_byte_is_found_and_the_file_named(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "model") / name
    whole, chance = path.read_bytes(), random.Random(name)
    for at in [0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(FLIPS))]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :])
        with pytest.raises(ModelDamaged) as caught:
            load_model(path.parent)
        assert str(path) in str(caught.value), at
    for damaged in (whole[:-1], whole + b"x", b""):
        path.write_bytes(damaged)
        with pytest.raises(ModelDamaged) as caught:
            load_model(path.parent)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", FILES[:-1])
def test_a_file_that_is_missing_or_of_another_model_is_named(name: str, tmp_path: Path) -> None:
    model, other = saved(tmp_path / "model"), saved(tmp_path / "other", seed=1)
    (other / "names.safetensors").write_text("[]")
    shutil.copy(other / name, model / name)
    with pytest.raises(ModelDamaged, match=f"{name} is damaged"):
        load_model(model)
    (model / name).unlink()
    with pytest.raises(ModelDamaged, match=f"{name} is missing"):
        load_model(model)


def test_a_model_of_another_format_is_refused(tmp_path: Path) -> None:
    config = saved(tmp_path / "model") / "config.json"
    config.write_bytes(seal_json({**unseal_json(config.read_bytes()), "format": 3}))
    with pytest.raises(ConfigError, match=r"has format 3; .* reads format 1\. Use .*, or train on"):
        load_model(config.parent)
    config.unlink()
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_model(config.parent)


def test_pictures_of_a_run_s_report_are_no_images_of_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    names = ["mistakes.png", "run/a.png", "run/calibration.png", "run/mistakes.png"]
    for name in (*names, "run/run.json"):
        (tmp_path / name).touch()
    assert image_files([tmp_path]) == [tmp_path / "mistakes.png", run / "a.png"]
    assert image_files([run / "mistakes.png"]) == [run / "mistakes.png"]
