"""What a slow gear is told by name: functions, sources of samples, optimizers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import geartrain as gt
from geartrain.ams.storage.features.factory import open_store
from geartrain.ams.values.errors import ConfigError
from geartrain.bridge.gear.sample_source import Samples
from geartrain.workers.gear.objects import (
    SAMPLES_NAMESPACE,
    decode_image,
    load_function,
    load_object,
    open_samples,
    optimizer_named,
)


def plus_one(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) + 1


def test_a_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_gear_module.py").write_text("class Parts:\n    def build():\n        return 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["elsewhere"])
    assert load_function("own_gear_module:Parts.build", "module")() == 7


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("nowhere", "must be 'module:name'"),
        (":build", "must be 'module:name'"),
        ("nowhere:build", "cannot be loaded: No module named 'nowhere'; is its folder on PYTHONPATH"),
        (f"{__name__}:build", "has no attribute 'build'; what is behind ':'"),
        ("./mine.py:build", "must be the name of a module, not a file: 'image:build'"),
        ("mine.py:build", "must be the name of a module, not a file"),
        ("/models/mine.py:build", "must be the name of a module, not a file"),
        (".mine:build", "must be the name of a module, not a file"),
        ("typo_in_mine:build", "module 'typo_in_mine:build' cannot be loaded: SyntaxError"),
        ("raises_in_mine:build", "RuntimeError: no weights"),
    ],
)
def test_what_cannot_be_loaded_is_named(here: Path, place: str, complaint: str) -> None:
    (here / "mine.py").write_text("def build(): return 3\n")
    (here / "typo_in_mine.py").write_text("def build(:\n")
    (here / "raises_in_mine.py").write_text("raise RuntimeError('no weights')\n")
    with pytest.raises(ConfigError, match=complaint):
        load_object(place, "module")


def test_samples_are_in_no_memory_of_ones_own(here: Path) -> None:
    (here / "memory_of_mine.py").write_text("def samples(one): return 3\n")
    assert open_samples("memory_of_mine:samples", None)[0](7) == 3
    with pytest.raises(ConfigError, match="must be 'module:name'"):
        open_samples("memory", None)


def test_a_store_of_samples_is_not_made_by_asking_for_it(here: Path) -> None:
    with pytest.raises(ConfigError, match="which is not there"):
        open_samples(f"lmdb:{here / 'typo'}", None)
    assert not (here / "typo").exists()


def test_images_of_a_folder_are_pixels(tmp_path: Path) -> None:
    Image.new("L", (3, 2), 255).save(tmp_path / "7.png")
    Image.new("RGB", (3, 2), (255, 0, 51)).save(tmp_path / "8.png")
    (tmp_path / "70.png").write_bytes(b"not an image")
    source, decode = open_samples(f"folder:{tmp_path}", None)
    batch, failures = Samples(source, decode).batch(np.array([7, 70, 71]))
    assert batch is not None and batch.shape == (1, 1, 2, 3) and bool((batch == 1.0).all())
    assert {key: failure.error for key, failure in failures.items()} == {
        70: "SampleDamaged",
        71: "SampleNotFound",
    }
    pixels = decode_image((tmp_path / "8.png").read_bytes())
    assert pixels.shape == (3, 2, 3) and pixels[:, 0, 0].tolist() == pytest.approx([1.0, 0.0, 0.2])
    with pytest.raises(ConfigError, match=f"{tmp_path}/nowhere"):
        open_samples(f"folder:{tmp_path}/nowhere", None)


def test_samples_of_a_store_are_decoded_by_a_function_of_ones_own(tmp_path: Path) -> None:
    place = f"lmdb:{tmp_path}"
    store = open_store(place, namespace=SAMPLES_NAMESPACE)
    store.write(np.array([3]), [b"\x01\x02"])
    store.close()
    source, decode = open_samples(place, f"{__name__}:plus_one")
    batch, _ = Samples(source, decode).batch(np.array([3]))
    assert batch is not None and batch.tolist() == [[2, 3]]
    source.close()


def test_optimizers_are_named_with_their_rate() -> None:
    assert optimizer_named("sgd:0.1") == gt.SGD(0.1)
    assert optimizer_named("adam:0.001") == gt.Adam(0.001)
    assert optimizer_named("momentum:0.1") == gt.Momentum(0.1, momentum=0.9)
    assert optimizer_named("adagrad:0.1") == gt.Adagrad(0.1)
    for wrong in ("sgd", "sgd:-1", "adamax:0.1", "adam:nan"):
        with pytest.raises(ConfigError, match="adam:RATE"):
            optimizer_named(wrong)
