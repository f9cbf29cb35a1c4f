"""Pages of ours in the system's Chromium, and what is asked of each of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window, which ends with the block. Skips, and says why, where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make page-check does")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


def pictures_folder(otherwise: Path) -> Path:
    """Where pictures of pages are kept: PAGE_OUT."""
    folder = Path(os.environ.get("PAGE_OUT", otherwise))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def faults_of(page: Any) -> list[str]:
    """What its script will complain of, from now on."""
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
    return faults


CONTRAST = """() => {
  const style = getComputedStyle(document.documentElement);
  const light = name => {
    let hex = style.getPropertyValue(name).trim().slice(1);
    if (hex.length === 3) hex = [...hex].map(digit => digit + digit).join("");
    const [r, g, b] = [0, 2, 4].map(at => parseInt(hex.slice(at, at + 2), 16) / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return Math.min(...["--text", "--soft", "--accent", "--good", "--bad", "--wait"].flatMap(name =>
    ["--card", "--ground"].map(ground => {
      const [low, high] = [light(name), light(ground)].sort((a, b) => a - b);
      return (high + 0.05) / (low + 0.05);
    })));
}"""
"""The least contrast of a text colour (WCAG: 4.5)."""
