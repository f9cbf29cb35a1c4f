"""Take the pictures of pages that README and docs/ show: ``make pictures``.

A cluster with three shards trains a model of clicks and one of drawn signs; its dashboard is taken while they train,
then the page to try a model, with the signs. Each picture is light and dark, a PNG with a palette in docs/assets.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.browsers import chromium
from tests.support.role_process import RoleProcess

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
TRAINING_SECONDS = 60
"""After each job has a snapshot."""
COLOURS = 160
MAX_BYTES = 200_000


def take(page: Any, name: str, height: int) -> None:
    """Write ``name.png`` and ``name-dark.png``."""
    for scheme, ending in (("light", ""), ("dark", "-dark")):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(1_500)  # charts are drawn anew
        shot = Image.open(io.BytesIO(page.screenshot(clip={"x": 0, "y": 0, "width": 1200, "height": height})))
        path = ASSETS / f"{name}{ending}.png"
        shot.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
        size = path.stat().st_size
        print(f"{path}: {size:,} bytes")
        assert size <= MAX_BYTES


def begin(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a command of geartrain in the folder; what it says goes to the file log there."""
    log = (folder / "log").open("a")
    return subprocess.Popen([sys.executable, "-m", "geartrain", *arguments], cwd=folder, stdout=log, stderr=log)


def finish(folder: Path, *arguments: str) -> None:
    """Run a command to its end."""
    assert begin(folder, *arguments).wait() == 0, (folder / "log").read_text()


def take_dashboard(folder: Path, page: Any) -> None:
    """Train on a cluster, and take its page meanwhile."""
    places = ("--scheduler-listen=127.0.0.1:0", "--dashboard", "--dashboard-listen=127.0.0.1:0", "--json")
    with contextlib.ExitStack() as stack:
        up = stack.enter_context(RoleProcess("up", "--shards=3", *places, errors=folder / "log"))
        stack.callback(up.process.wait)
        stack.callback(up.process.terminate)
        page.goto(up.facts["dashboard"])
        for job, data, *settings in (
            ("ctr", "movielens", "epochs=50", "patience=0", "snapshots.steps=200", "lr=0.001", "row_lr=0.001"),
            ("classify", "runs/small-pictures", "lr=0.1", "snapshots.steps=60"),
        ):
            where = (f"--scheduler={up.facts['scheduler']}", f"--data={data}", f"--out=runs/{job}", "--steps=5000")
            training = begin(folder, "worker", job, *where, *(f"--set={setting}" for setting in settings))
            stack.callback(training.wait)
            stack.callback(training.terminate)
            while not list(folder.glob(f"runs/{job}/snapshots/*")):
                time.sleep(1)
        time.sleep(TRAINING_SECONDS)
        take(page, "dashboard", 900)


def take_try_it(folder: Path, page: Any) -> None:
    """Serve a model of signs and one of clicks, and take the page with an answer of each."""
    finish(folder, "worker", "ctr", "--data=movielens", "--out=runs/clicks", "--steps=300")
    finish(folder, "export", "runs/small", "--to=models/signs/1")
    finish(folder, "export", "runs/clicks", "--to=models/clicks/1")
    models = [f"{name}={folder}/models/{name}" for name in ("signs", "clicks")]
    with RoleProcess("serve", *models, "--listen=127.0.0.1:0", errors=folder / "log") as serve:
        page.goto(serve.facts["url"])
        page.select_option("#model", "signs")
        page.get_by_role("button", name="Class ").nth(2).click()
        page.locator("#answers .glyph img").nth(4).wait_for()
        take(page, "try-it", 720)
        page.select_option("#model", "clicks")
        page.locator(".shares dd").nth(3).wait_for()
        take(page, "try-clicks", 900)


def main() -> None:
    """Take the pictures of both pages."""
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        folder, page = Path(name), browser.new_page(viewport={"width": 1200, "height": 1000})
        finish(folder, "quickstart", "--small", "--out=runs/small")
        take_dashboard(folder, page)
        take_try_it(folder, page)


if __name__ == "__main__":
    main()
