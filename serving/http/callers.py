"""Who may ask a service over HTTP, and for what: by tokens under certificates, else whoever is on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from geartrain.ams.rpc.tokens import METADATA_KEY, RIGHTS, SCHEME
from geartrain.serving.http.guard import Names
from geartrain.serving.http.refusals import RefusedRequest

OPEN_PATHS = ("/", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready")
"""What anybody may ask: the page, which is the same everywhere, and probes, which have no token."""
_GRANT = "geartrain.grant"
"""In the scope of a request that may be here: the rights of its token; None: it needs none."""


class Callers:
    """Decides about each request before its body is read."""

    def __init__(
        self, listen: str, folder: str | None, origins: tuple[str, ...] = (), *, is_open: bool = False
    ) -> None:
        """Take the rules.

        Args:
            listen: where the service listens.
            folder: of certificates; None: without, and then names of this host alone are answered.
            origins: other web pages that may ask.
            is_open: whatever name a request is for (``insecure``): others give this host names of their own.
        """
        self._names = None if folder or is_open else Names(listen)
        self.origins = origins
        self.cluster = "local"
        """What counters are labelled with."""
        self._tokens: Any = None
        self._audit: Callable[..., None] = lambda *_, **__: None
        if folder is not None:
            from geartrain.ams.rpc.credentials import Credentials  # gRPC with it
            from geartrain.ams.rpc.server.access import audit, tokens_of

            self._tokens, self._audit = tokens_of(folder), audit
            self.cluster = Credentials.mine(listen).cluster

    @property
    def want_tokens(self) -> bool:
        """Whether a client must show one; else its certificate is enough."""
        return self._tokens is not None and bool(self._tokens.are_wanted)

    def require_known(self, request: Request) -> str:
        """Raises RefusedRequest unless the request is for this host and, where tokens are wanted, shows a good one.

        Returns by whom it is, for :class:`ClientRates`; :meth:`require` asks later what its token allows.
        """
        host = request.headers.get("host", "")
        if self._names is not None and not self._names.has(host):
            raise RefusedRequest(421, f"this service is not called {host!r}; ask it by its address or as localhost")
        origin = request.headers.get("origin")
        if not (origin is None or origin in self.origins or origin.partition("://")[2] == host):
            raise RefusedRequest(403, f"pages of {origin!r} may not ask here; serve.origins names those that may")
        client = "" if request.client is None else request.client.host
        request.scope[_GRANT] = None
        if self._tokens is None or not self._tokens.are_wanted or request.url.path in OPEN_PATHS:
            return client
        believed = self._believed(request.headers.get(METADATA_KEY, ""))
        if isinstance(believed, str):
            self._refuse(request, believed)
            raise RefusedRequest(
                401, f"{believed}; send a token that 'geartrain certs token' made: Authorization: Bearer gt1..."
            )
        token, request.scope[_GRANT] = believed
        return str(token.id)

    def client(self, authorization: str, address: str) -> str:
        """By whom a request is that gRPC let through, for :class:`ClientRates`: as :meth:`require_known`."""
        believed = self._believed(authorization) if self.want_tokens else ""
        return address if isinstance(believed, str) else str(believed[0].id)

    def require(self, request: Request, right: str, model: str) -> None:
        """Raises RefusedRequest unless the token of a known caller gives ``right`` to tables called as the model."""
        grant = request.scope[_GRANT]
        if grant is not None and not grant.rights(model) & RIGHTS[right]:
            why = f"its token gives no right to {right} {model!r}"
            self._refuse(request, why, model)
            raise RefusedRequest(
                403, f"{why}; 'geartrain certs token NAME FOLDER --allow \"{model}={right}\"' makes one"
            )

    def _believed(self, text: str) -> Any:
        return self._tokens.believed(text.removeprefix(SCHEME)) if text.startswith(SCHEME) else "it shows no token"

    def _refuse(self, request: Request, why: str, *models: str) -> None:
        client = "" if request.client is None else request.client.host
        self._audit({"caller": "http", "peer": client}, request.url.path, models, why)
