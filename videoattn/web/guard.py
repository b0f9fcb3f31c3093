"""What stands before the page: allow-lists for Host and Origin, password check, bounded request bodies."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# scrypt cost parameters of RFC 7914 for interactive logins, about 16 MiB and 50 ms.
SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "dklen": 32}


def hash_password(user: str, password: str) -> str:
    """`user:scrypt:SALT:HASH` (hex) for an auth file; ValueError when the user name is empty or holds ':'."""
    if not user or ":" in user:
        raise ValueError("a user name must not be empty or contain ':'")
    salt = secrets.token_bytes(16)
    return f"{user}:scrypt:{salt.hex()}:{_scrypt(password, salt).hex()}"


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, **SCRYPT)


class Accounts:
    """User names and salted scrypt hashes, as `hash_password` writes them, one a line."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._hashes: dict[str, tuple[bytes, bytes]] = {}
        # Each request carries the password; scrypt on every one would cost 50 ms, so a keyed digest of
        # what was last accepted is kept in memory.
        self._key = secrets.token_bytes(32)
        self._accepted: dict[str, bytes] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                user, scheme, salt, digest = line.strip().split(":")
                if not user or scheme != "scrypt":
                    raise ValueError
                self._hashes[user] = bytes.fromhex(salt), bytes.fromhex(digest)
            except ValueError:
                raise ValueError(f"line {number} is not USER:scrypt:SALT:HASH") from None
        if not self._hashes:
            raise ValueError("it names no user")

    def accepts(self, user: str, password: str) -> bool:
        """Whether the password is the user's."""
        mark = hmac.digest(self._key, f"{user}:{password}".encode(), "sha256")
        if hmac.compare_digest(self._accepted.get(user, b""), mark):
            return True
        # An unknown user costs as much as a known one, so that timing does not tell them apart.
        salt, digest = self._hashes.get(user, (bytes(16), b""))
        if not hmac.compare_digest(_scrypt(password, salt), digest):
            return False
        self._accepted[user] = mark
        return True

    def accepts_header(self, header: str | None) -> bool:
        """Whether an `Authorization: Basic …` header names a user with the right password."""
        scheme, _, value = (header or "").partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            user, colon, password = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return False
        return bool(colon) and self.accepts(user, password)


def is_loopback(host: str) -> bool:
    """Whether a bind address or host name stays on this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Policy:
    """Whom the server answers.

    `hosts` are lower-case names without port that a Host header may carry, the bound port is demanded where
    one is given; `max_body` bounds every request body in bytes.
    """

    hosts: frozenset[str]
    port: int
    accounts: Accounts | None
    max_body: int

    def allows_host(self, host: str | None) -> bool:
        """Whether a Host header names this server."""
        name, port = _split_host(host or "")
        return name in self.hosts and port in (self.port, None)

    def allows_origin(self, origin: str | None, host: str | None) -> bool:
        """Whether a request may come from that origin: none named, or the very host it was sent to."""
        if origin is None:
            return True
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc.lower() == (host or "").lower()


def _split_host(host: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname or "").lower(), parts.port
    except ValueError:
        return "", None


class Guard:
    """ASGI middleware that applies a `Policy` to HTTP requests and WebSockets.

    A foreign Host is answered 421 (DNS rebinding sends one), a foreign Origin 403 (so preflights fail too),
    a missing or wrong password 401, a body past the bound 413.
    """

    def __init__(self, app: ASGIApp, policy: Policy) -> None:
        self.app = app
        self.policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one ASGI scope."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(Headers(scope=scope))
        if refusal is not None:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await refusal(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await self.app(scope, receive, send)
        else:
            await self._bounded(scope, receive, send)

    def _refusal(self, headers: Headers) -> PlainTextResponse | None:
        policy, host = self.policy, headers.get("host")
        if not policy.allows_host(host):
            return PlainTextResponse("This server does not answer for that host name.\n", 421)
        if not policy.allows_origin(headers.get("origin"), host):
            return PlainTextResponse("Requests from other sites are refused.\n", 403)
        if policy.accounts is not None and not policy.accounts.accepts_header(headers.get("authorization")):
            challenge = {"WWW-Authenticate": 'Basic realm="videoattn", charset="UTF-8"'}
            return PlainTextResponse("A user name and password are needed.\n", 401, challenge)
        length = headers.get("content-length")
        if length is not None and (not length.isdecimal() or int(length) > policy.max_body):
            return self._too_large()
        return None

    def _too_large(self) -> PlainTextResponse:
        return PlainTextResponse(f"Requests are limited to {self.policy.max_body >> 20} MiB.\n", 413)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        received, started = 0, False

        async def bounded_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.policy.max_body:
                raise _BodyTooLarge
            return message

        # An app that turns our exception into an answer of its own (500) must not be heard.
        async def answer(message: Message) -> None:
            nonlocal started
            if received > self.policy.max_body and not started:
                return
            started = True
            await send(message)

        with suppress(_BodyTooLarge):
            await self.app(scope, bounded_receive, answer)
        if received > self.policy.max_body and not started:
            await self._too_large()(scope, receive, send)


class _BodyTooLarge(Exception):
    """A chunked body passed the bound while it was being read."""
