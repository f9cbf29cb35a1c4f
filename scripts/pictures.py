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
MOST_BYTES = 200_000


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
        assert size <= MOST_BYTES


def run(*arguments: str, cwd: Path) -> subprocess.Popen[bytes]:
    """A command of geartrain, which says nothing here."""
    command = [sys.executable, "-m", "geartrain", *arguments]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=(cwd / "log").open("a"))


def main() -> None:
    """Train, take the pictures, and end everything."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        browser = stack.enter_context(chromium())
        signs, pictures = folder / "runs" / "small", folder / "runs" / "small-pictures"
        assert run("quickstart", "--small", "--out", str(signs), cwd=folder).wait() == 0, (folder / "log").read_text()
        page = browser.new_page(viewport={"width": 1200, "height": 1000})

        places = ("--scheduler-listen=127.0.0.1:0", "--dashboard", "--dashboard-listen=127.0.0.1:0", "--json")
        up = stack.enter_context(RoleProcess("up", "--shards=3", *places, errors=folder / "log"))
        stack.callback(up.process.terminate)
        page.goto(up.facts["dashboard"])
        at = f"--scheduler={up.facts['scheduler']}"
        for job, data, *more in (
            ("ctr", "movielens", "epochs=50", "patience=0", "snapshots.steps=200"),
            ("classify", str(pictures), "lr=0.1", "snapshots.steps=60"),
        ):
            settings = [f"--set={setting}" for setting in more]
            training = run(
                "worker", job, at, f"--data={data}", f"--out=runs/{job}", "--steps=5000", *settings, cwd=folder
            )
            stack.callback(training.wait)
            stack.callback(training.terminate)
            while not list(folder.glob(f"runs/{job}/snapshots/*")):
                time.sleep(1)
        time.sleep(TRAINING_SECONDS)
        take(page, "dashboard", 900)

        assert run("export", str(signs), "--to", "models/signs/1", cwd=folder).wait() == 0, (folder / "log").read_text()
        models = folder / "models" / "signs"
        serve = stack.enter_context(
            RoleProcess("serve", f"signs={models}", "--listen=127.0.0.1:0", errors=folder / "log")
        )
        page.goto(serve.facts["url"])
        page.get_by_role("button", name="Class ").nth(2).click()
        page.locator("#answers .glyph img").nth(4).wait_for()
        take(page, "try-it", 720)


if __name__ == "__main__":
    main()
