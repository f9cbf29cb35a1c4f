import hashlib
import zipfile
from pathlib import Path

import pytest

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.data import packages
from geartrain.workers.data.packages import download_packages, pinned_requirements
from geartrain.workers.recipes import fonts
from geartrain.workers.recipes.fonts import CLASSES_FACE, FACES, Face, SystemFont, find_fonts

CONTENT = b"the bytes of a font"


def face(**changes: object) -> Face:
    values: dict[str, object] = {
        "name": "plain",
        "family": "Plain",
        "role": "train",
        "package": "plain-font",
        "member": "plain_font/Plain.ttf",
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "megabytes": 1.0,
    }
    return Face(**{**values, **changes})  # type: ignore[arg-type]


def quiet(_line: str) -> None:
    """Say nothing."""


def no_network(*_: object) -> bool:
    return False


def package_with(content: bytes) -> object:
    def download(_names: object, _requirements: object, packages: Path, _say: object) -> bool:
        with zipfile.ZipFile(packages / "plain_font-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("plain_font/Plain.ttf", content)
        return True

    return download


def test_no_held_out_family_is_trained_on() -> None:
    trained = {face.family for face in FACES if face.role == "train"}
    held_out = {face.family for face in FACES if face.role == "held_out"}
    assert held_out == {"WenQuanYi Micro Hei", "IPAex Gothic"}
    assert not trained & held_out
    shared = [face.member for face in FACES if face.role == "train" and ("wqy" in face.member or "ipa" in face.member)]
    assert not shared


def test_every_face_is_pinned_to_a_version_and_a_hash() -> None:
    pinned = pinned_requirements(fonts.REQUIREMENTS.read_text())
    for wanted in FACES:
        line = pinned[wanted.package]
        assert "==" in line and "--hash=sha256:" in line
        assert len(wanted.sha256) == 64
    assert set(pinned) == {wanted.package for wanted in FACES}
    assert any(wanted.name == CLASSES_FACE for wanted in FACES)
    assert len({wanted.name for wanted in FACES}) == len(FACES)


def test_a_font_is_taken_out_of_its_package_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "download_packages", package_with(CONTENT))
    said: list[str] = []
    (found,) = find_fonts(tmp_path, [face()], said.append)
    assert found.path.read_bytes() == CONTENT
    assert "1 MB" in said[0] and "plain-font" in said[0]
    monkeypatch.setattr(fonts, "download_packages", no_network)
    assert find_fonts(tmp_path, [face()], said.append) == [found]
    assert len(said) == 1
    assert [path.name for path in (tmp_path / "fonts").iterdir()] == ["plain.ttf"]


def test_a_package_with_another_font_inside_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "download_packages", package_with(b"another font"))
    with pytest.raises(ConfigError, match=r"pinned.*PIP_ARGS"):
        find_fonts(tmp_path, [face()], quiet)
    assert not (tmp_path / "fonts" / "plain.ttf").exists()


def test_a_cached_font_that_was_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fonts").mkdir()
    (tmp_path / "fonts" / "plain.ttf").write_bytes(CONTENT + b"!")
    with pytest.raises(ConfigError, match="SHA-256"):
        find_fonts(tmp_path, [face()], quiet)


def test_a_system_font_stands_in_for_a_package_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "download_packages", no_network)
    installed = tmp_path / "System.ttc"
    installed.write_bytes(b"a system font")
    wanted = face(system=SystemFont(path=installed, index=2, package="fonts-plain"))
    said: list[str] = []
    (found,) = find_fonts(tmp_path / "cache", [wanted], said.append)
    assert (found.path, found.index) == (installed, 2)
    assert any("fonts-plain" in line for line in said)


def test_without_any_font_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "download_packages", no_network)
    wanted = face(system=SystemFont(path=tmp_path / "absent.ttc", index=0, package="fonts-plain"))
    with pytest.raises(ConfigError, match="apt-get install fonts-plain"):
        find_fonts(tmp_path, [wanted], quiet)


def test_pip_is_given_the_users_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Result:
        returncode = 1
        stderr = "ERROR: no such index"

    def run(command: list[str], **_: object) -> Result:
        commands.append(command)
        return Result()

    monkeypatch.setenv("PIP_ARGS", "--index-url 'https://mirror.invalid/a b'")
    monkeypatch.setattr(packages.subprocess, "run", run)
    said: list[str] = []
    assert not download_packages(["japanize-matplotlib"], fonts.REQUIREMENTS, tmp_path, said.append)
    assert commands[0][-2:] == ["--index-url", "https://mirror.invalid/a b"]
    assert "--require-hashes" in commands[0]
    assert "no such index" in said[0]
