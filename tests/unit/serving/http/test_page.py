"""The page to try a model, as bytes: one file that may run nothing but its own scripts."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from geartrain.serving.http import page
from geartrain.serving.http.page import page_response, try_page

OWN = Path(page.__file__).with_name("page.html").read_text(encoding="utf-8")
RESPONSE = page_response(OWN)
HTML = bytes(RESPONSE.body).decode()


def test_the_page_may_run_its_own_scripts_alone_and_ask_its_own_server_alone() -> None:
    assert try_page().path == "/"
    policy = dict(part.strip().split(" ", 1) for part in RESPONSE.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        texts = re.findall(rf"<{kind}>(.*?)</{kind}>", HTML, flags=re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert policy[f"{kind}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests) and len(texts) == 2


@pytest.mark.parametrize("forbidden", ["http://", "https://", 'rel="stylesheet"', " style=", " onclick="])
def test_the_page_is_one_file(forbidden: str) -> None:
    assert forbidden not in HTML
