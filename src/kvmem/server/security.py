"""Who may ask: keys, under which name of this machine, and which web pages."""

import hmac
import ipaddress
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvmem.server.errors import http_error_response

__all__ = ["OPEN_PATHS", "ApiKeys", "Hosts", "Origins"]

OPEN_PATHS = ("/health", "/v1/health")  # need no key

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
# names that no public name server answers for
PRIVATE_ENDINGS = (".localhost", ".local", ".internal", ".home.arpa")
PREFLIGHT_S = "600"


class ApiKeys:
    """Lets through who brings a key, as bearer or X-Api-Key; all, where no key is set."""

    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...]) -> None:
        self._app = app
        # beyond ASCII, clients send one or the other
        self._keys = tuple(form for key in keys for form in _forms(key))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        response = http_error_response(401, "give a valid key as Authorization: Bearer")
        await response(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        if not self._keys:
            return True
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # every key is compared: the time tells nothing
        return any(
            [hmac.compare_digest(given.strip(" \t").encode("latin-1"), key) for key in self._keys]
        )


def _forms(key: str) -> set[bytes]:
    forms = {key.encode()}
    with suppress(UnicodeEncodeError):
        forms.add(key.encode("latin-1"))
    return forms


class Hosts:
    """Refuses requests that are meant for a host of another name, where no key is asked for.

    A web page may have its own name lead to this machine, and then ask as if from here (DNS
    rebinding). It cannot do so under an address, under a name that is known on this network alone,
    or where a key is wanted, which it does not have.
    own: the host that is listened on. allowed: further names, `*.example.com` for all below one,
    "*" for any.
    """

    def __init__(self, app: ASGIApp, *, own: str, allowed: tuple[str, ...]) -> None:
        self._app = app
        names = {name.lower().rstrip(".") for name in (own, socket.gethostname(), *allowed)}
        self._names = frozenset(names)
        self._endings = tuple(name[1:] for name in names if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or self._is_known(_name_of(host)):
            await self._app(scope, receive, send)
            return
        response = http_error_response(
            403,
            f"the Host header says {host[:100]!r}, which is no name of this server; name it with "
            "--allowed-hosts, set --api-key, or have the proxy in front send Host: localhost",
        )
        await response(scope, receive, send)

    def _is_known(self, name: str) -> bool:
        if "*" in self._names or name in self._names or "." not in name:
            return True
        if name.endswith((*PRIVATE_ENDINGS, *self._endings)):
            return True
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return False


def _name_of(host: str) -> str:
    """The host without its port, and an address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


class Origins:
    """Keeps web pages of other places out, and lets those that are allowed read the replies.

    A browser names the page's origin with each request that a page makes; others send none, and
    pass. Refusing is done here, since a page may send a request whose reply it cannot read.
    allowed: origins as browsers write them; "*" for all. Pages of this machine always may ask.
    """

    def __init__(self, app: ASGIApp, *, allowed: tuple[str, ...]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        if origin is None:
            await self._app(scope, receive, send)
            return
        if not self._may_ask(origin):
            response = http_error_response(
                403, f"pages of {origin} may not ask here; allow them with --cors-origins"
            )
            await response(scope, receive, send)
            return
        asked = Headers(scope=scope)
        headers = {"access-control-allow-origin": origin, "vary": "Origin"}
        if scope["method"] == "OPTIONS" and "access-control-request-method" in asked:
            headers["access-control-allow-methods"] = "GET, POST"
            headers["access-control-allow-headers"] = asked.get(
                "access-control-request-headers", "authorization, content-type, x-api-key"
            )
            headers["access-control-max-age"] = PREFLIGHT_S
            await send({"type": "http.response.start", "status": 200, "headers": _encode(headers)})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_with_headers(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                given = message.get("headers", [])
                assert isinstance(given, list)
                message = {**message, "headers": [*given, *_encode(headers)]}
            await send(message)

        await self._app(scope, receive, send_with_headers)  # type: ignore[arg-type]

    def _may_ask(self, origin: str) -> bool:
        if "*" in self._allowed or origin in self._allowed:
            return True
        try:
            parts = urlsplit(origin)
        except ValueError:  # no address at all
            return False
        return parts.scheme in ("http", "https") and parts.hostname in LOOPBACK


def _encode(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
