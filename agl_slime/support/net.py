"""What the servers of this package share: who may reach them, and that no proxy stands before them."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from agl_slime.errors import ConfigError

_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
_NO_PROXY = ("NO_PROXY", "no_proxy")
_LOOPBACK = ("127.0.0.1", "localhost")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def proxies() -> dict[str, str]:
    """The proxies that the environment names, by the variable, which ``NO_PROXY`` keeps from this machine's addresses
    only where it lists them: most clients of agents ask a proxy for the gateway otherwise."""
    return {name: value for name, value in sorted(os.environ.items()) if name.lower() in _PROXIES and value}


def hosts_behind_proxy(*hosts: str) -> list[str]:
    """Which of this machine's loopback names and of ``hosts`` clients would ask a proxy for."""
    if not proxies():
        return []
    listed = {name.strip() for variable in _NO_PROXY for name in os.environ.get(variable, "").split(",")}
    return [] if "*" in listed else [host for host in dict.fromkeys([*_LOOPBACK, *hosts]) if host not in listed]


def bypass_proxies(*hosts: str) -> None:
    """Have clients in this process and in those that it starts ask this machine and ``hosts`` directly: the names are
    added to ``NO_PROXY``, in both spellings, where the environment names a proxy."""
    if missing := hosts_behind_proxy(*hosts):
        given = [os.environ.get(variable, "") for variable in _NO_PROXY]
        before = [name.strip() for text in given for name in text.split(",") if name.strip()]
        os.environ.update(dict.fromkeys(_NO_PROXY, ",".join(dict.fromkeys([*before, *missing]))))


def shown_url(url: str) -> str:
    """``url`` as people may read it: without a password."""
    return re.sub(r"//[^/?#]*@", "//***@", url)


def require_local_address(host: str) -> None:
    """Raises ``ConfigError`` when this machine cannot listen on ``host``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is no address of this machine: name one of its own, or 127.0.0.1") from error


def require_token(host: str, token: str | None, *, setting: str) -> None:
    """Raises ``ConfigError``, which names the ``setting`` of the token, when a server that other machines reach has
    none."""
    if not token and not is_loopback(host):
        raise ConfigError(f"host {host!r} can be reached from other machines: set {setting}, or listen on 127.0.0.1")


def has_token(authorization: str | None, token: str | None) -> bool:
    """Whether an ``Authorization`` header carries the bearer token; always when ``token`` is empty."""
    return not token or same_secret(authorization or "", f"Bearer {token}")


def same_secret(given: str, secret: str) -> bool:
    """Takes the same time whatever is wrong with what was given, which need not be UTF-8."""
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), secret.encode())


def page_refusal(headers: Mapping[str, str], *, check_host: bool) -> str | None:
    """Why a request is refused that a web page may have made a browser send; ``None`` where it is not. Such a one has
    another site's ``Origin`` or, sent after that site's name was bound to this machine's address, a ``Host`` that is
    not this machine's: the latter counts with ``check_host``, which a server needs that asks for no token. ``headers``
    ignores case, as aiohttp's and Starlette's do."""
    host, origin = headers.get("Host"), headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != host:
        return "requests from web pages are not served"
    try:
        named = host is None or is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # no host at all
        named = False
    if check_host and not named:
        return f"this server is for this machine: ask it as 127.0.0.1 or localhost, not {host!r:.100}"
    return None
