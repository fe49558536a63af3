"""What the servers of this package share: who may reach them."""

from __future__ import annotations

import hmac
import ipaddress

from agl_slime.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_token(host: str, token: str | None, *, setting: str) -> None:
    """Raises ``ConfigError``, which names the ``setting`` of the token, when a server that other machines reach has
    none."""
    if not token and not is_loopback(host):
        raise ConfigError(f"host {host!r} can be reached from other machines: set {setting}, or listen on 127.0.0.1")


def has_token(authorization: str | None, token: str | None) -> bool:
    """Whether an ``Authorization`` header carries the bearer token; always when ``token`` is empty. Takes the same time
    whatever is wrong with it."""
    given = (authorization or "").encode("utf-8", "surrogateescape")
    return not token or hmac.compare_digest(given, f"Bearer {token}".encode())
