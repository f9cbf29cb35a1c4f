"""The page to try a model, as bytes: one file that may run nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from geartrain.serving.http import page
from geartrain.serving.http.page import page_response, try_page

HTML = Path(page.__file__).with_name("page.html").read_text(encoding="utf-8")


def test_the_page_may_run_its_own_script_alone_and_ask_its_own_server_alone() -> None:
    assert try_page().path == "/"
    response = page_response(HTML)
    policy = dict(part.strip().split(" ", 1) for part in response.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", bytes(response.body).decode(), flags=re.DOTALL)
        assert policy[f"{kind}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.parametrize("forbidden", ["http://", "https://", 'rel="stylesheet"', " style=", " onclick="])
def test_the_page_is_one_file(forbidden: str) -> None:
    assert forbidden not in HTML
