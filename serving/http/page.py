"""Pages of one file: they may run their own script and ask the server that they came from, nothing else."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route


def page_response(html: str) -> HTMLResponse:
    """A page with one ``<script>`` and one ``<style>``, under a policy that allows no others."""
    response = HTMLResponse(html)
    script, style = (_hash(html, tag) for tag in ("script", "style"))
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
    """``GET /``: the page to try what is served; it asks the routes below ``v1/`` beside it."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    async def page(_: Request) -> Response:
        return page_response(html)

    return Route("/", page, include_in_schema=False)


def _hash(html: str, tag: str) -> str:
    text = html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
