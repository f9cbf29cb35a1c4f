"""Self-contained pages: they run their own scripts and connect only to the server they came from."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

_COMMON = Path(__file__).with_name("common.html").read_text(encoding="utf-8")


def page_response(html: str) -> HTMLResponse:
    """Return a page with the common head, under a policy that allows no ``<script>`` but its own."""
    html = _COMMON + html
    response = HTMLResponse(html)
    script, style = (_hashes(html, tag) for tag in ("script", "style"))
    response.headers.update(
        {
            "Content-Security-Policy": f"default-src 'none'; script-src {script}; style-src {style}; connect-src "
            "'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
    )
    return response


def try_page() -> Route:
    """Return the route ``GET /``: the page to try models; it uses the routes below ``v1/`` beside it."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    async def page(_: Request) -> Response:
        return page_response(html)

    return Route("/", page, include_in_schema=False)


def _hashes(html: str, tag: str) -> str:
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
