"""Which model of a folder is served, and what is said of one that is not whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.storage.snapshot.manifest import seal_json, unseal_json
from geartrain.ams.values.errors import ConfigError, ModelDamaged
from geartrain.serving import folder as folders
from geartrain.serving.folder import load_folder, load_newest, version_folders, versions_in
from geartrain.serving.models import pictures
from geartrain.serving.models.pictures import PictureModel
from geartrain.workers.models.saved_model import CONFIG, ModelFiles, seal_folder, write_arrays
from geartrain.workers.models.trained_model import save_model
from tests.support.served_models import exported, picture, small_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("served") / "model", version=7)


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def best(served: object) -> list[str]:
    assert isinstance(served, PictureModel)
    chosen = served.operations["classify"]
    answered = chosen.run(chosen.accept({"images": np.array([picture(1)], object)}, {}))
    return list(answered["classes"][0])


def test_every_file_that_is_cut_changed_or_gone_is_named(model: Path) -> None:
    for path in sorted(model.iterdir()):
        data = path.read_bytes()
        for changed in (data[:-1], data[:9], b"", data[:-9] + bytes([data[-9] ^ 4]) + data[-8:], None):
            if changed is None:
                path.unlink()
            else:
                path.write_bytes(changed)
            with pytest.raises((ModelDamaged, ConfigError), match=path.name):
                load_folder(model)
            path.write_bytes(data)
    assert best(load_folder(model))


def test_a_folder_of_another_format_or_kind_is_refused(model: Path) -> None:
    config = unseal_json((model / CONFIG).read_bytes())
    for changes, message in (
        ({"format": 2}, "format 2"),
        ({"kind": "clouds"}, "kind 'clouds'; this version serves"),
        ({"kind": None}, "the model of a training"),
    ):
        (model / CONFIG).write_bytes(seal_json({**config, **changes}))
        with pytest.raises(ConfigError, match=message):
            load_folder(model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": 32}, r"makes bitmaps of \[1, 32, 32\], and its network takes \[1, 16, 16\]; export the model again"),
        ({"channels": 3}, r"makes bitmaps of \[3, 16, 16\], and its network takes \[1, 16, 16\]"),
        ({"kind": "smoke"}, "model has another preprocessing than this version knows: preprocessing is 'smoke'"),
        ({"colour": "red"}, "another preprocessing than this version knows.*'colour'"),
    ],
)
def test_another_preprocessing_than_the_networks_is_refused(model: Path, change: dict[str, object], said: str) -> None:
    config = unseal_json((model / CONFIG).read_bytes())
    config["preprocessing"] |= change
    (model / CONFIG).write_bytes(seal_json(config))
    with pytest.raises((ConfigError, ModelDamaged), match=said):
        load_folder(model)


@pytest.mark.parametrize(
    ("shape", "said"),
    [((8, 24), "features of 16 numbers, and its class centers have 24"), ((9, 16), "9 class centers and 8 names")],
)
def test_centers_of_another_model_are_refused(model: Path, shape: tuple[int, int], said: str) -> None:
    write_arrays(model / "centers.safetensors", {"centers": np.ones(shape, np.float32)})
    config = unseal_json((model / CONFIG).read_bytes())
    (model / CONFIG).unlink()
    seal_folder(model, config)
    with pytest.raises(ModelDamaged, match=said):
        load_folder(model)


def test_the_newest_whole_version_is_served(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for version in (90, 120, 1000):
        shutil.copytree(whole, tmp_path / f"{version:06}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "002000").mkdir()  # a copy that has not begun
    assert [path.name for path in version_folders(tmp_path)] == ["001000", "000120", "000090"]
    (tmp_path / "001000" / "backbone.onnx").write_bytes(b"half")
    load_newest(tmp_path)
    assert "skipping a version" in caplog.text and "001000/backbone.onnx is damaged" in caplog.text
    for version in (90, 120):
        (tmp_path / f"{version:06}" / "names.safetensors").unlink()
    with pytest.raises(ModelDamaged, match=r"001000/backbone\.onnx"):
        load_newest(tmp_path)


def test_versions_are_those_that_models_say_not_their_folders(whole: Path, tmp_path: Path) -> None:
    for name in ("1", "2", "3"):
        shutil.copytree(whole, tmp_path / name)
    exported(tmp_path / "2", version=9)
    (tmp_path / "3" / CONFIG).write_bytes(b"half")
    assert versions_in(tmp_path) == {7: tmp_path / "1", 9: tmp_path / "2"}


def test_the_folder_in_which_one_is_may_be_served(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole)
    assert load_newest(Path())[1].version == 7


def test_what_is_no_model_is_told_from_one(tmp_path: Path) -> None:
    for name in "ab":
        exported(tmp_path / "several" / name)
    with pytest.raises(ConfigError, match=f"but models: serve {tmp_path}/several/a {tmp_path}/several/b"):
        load_newest(tmp_path / "several")
    with pytest.raises(ConfigError, match="geartrain export RUN --to"):
        load_newest(tmp_path / "nothing")
    (tmp_path / "run.json").touch()
    with pytest.raises(ConfigError, match=f"geartrain export {tmp_path} --to DIR"):
        load_newest(tmp_path)
    save_model(tmp_path / "model", small_model())
    with pytest.raises(ConfigError, match="the model of a training"):
        load_newest(tmp_path / "model")


def test_a_model_that_is_replaced_while_it_is_read_is_read_again(
    whole: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = shutil.copytree(whole, tmp_path / "later")
    config = unseal_json((later / CONFIG).read_bytes())
    (later / CONFIG).write_bytes(seal_json({**config, "version": 8}))
    unseal = folders.unseal_folder

    def replaced(there: Path) -> dict[str, object]:
        if later.exists():
            shutil.rmtree(there)
            later.rename(there)
            raise ModelDamaged("a file of the old model is gone")
        return unseal(there)

    monkeypatch.setattr(folders, "unseal_folder", replaced)
    assert load_folder(model).version == 8


def test_files_of_two_models_are_never_one(
    whole: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model takes the place of one whose checksums were right, between two of its files."""
    later = exported(tmp_path / "later", version=8)
    read = pictures.read_files

    def replaced(there: Path, config: dict[str, object]) -> ModelFiles:
        files = read(there, config)
        if later.exists():
            shutil.rmtree(there)
            later.rename(there)
        return files

    monkeypatch.setattr(pictures, "read_files", replaced)
    served = load_folder(model)
    assert served.version == 8

    monkeypatch.setattr(folders, "_was_replaced", lambda *_: True)
    with pytest.raises(ModelDamaged, match="again and again"):
        load_folder(whole)


def test_a_served_model_outlives_its_folder(model: Path) -> None:
    served = load_folder(model)
    expected = best(served)
    shutil.rmtree(model)
    assert best(served) == expected
