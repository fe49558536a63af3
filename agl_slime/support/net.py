"""Access to servers: loopback and tokens, requests from web pages, proxies."""

from __future__ import annotations

import hmac
import ipaddress
import os
import random
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from yarl import URL

from agl_slime.errors import ConfigError

_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})
_NO_PROXY = ("NO_PROXY", "no_proxy")
_LOOPBACK = ("127.0.0.1", "localhost")
_WILDCARDS = {"": socket.AF_INET, "0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}
# Documentation addresses: a socket that is connected to one has the address of the interface with the default route.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}

PUBLIC_HOST_VARIABLE = "ADAPTER_PUBLIC_HOST"
"""slime's variable for the host at which sandboxes reach a server of this machine."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def public_host(host: str) -> str:
    """The host at which other machines reach a server that listens on ``host``: for a wildcard ``ADAPTER_PUBLIC_HOST``,
    else the address of the interface with the default route. Raises ``ConfigError`` if there is none."""
    if (family := _WILDCARDS.get(host)) is None:
        return host
    if configured := os.environ.get(PUBLIC_HOST_VARIABLE):
        return configured.strip("[]")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_ELSEWHERE[family], 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        fix = f"listen on the address that others use, or set {PUBLIC_HOST_VARIABLE} to it"
        raise ConfigError(
            f"host {host!r} is every address of this machine, which has no default route: {fix}"
        ) from error


def http_url(host: str, port: int) -> str:
    return str(URL.build(scheme="http", host=host.strip("[]"), port=port))


def proxies() -> dict[str, str]:
    """Proxies by their environment variable. Most HTTP clients send requests to the gateway through them unless
    ``NO_PROXY`` lists its address."""
    return {name: value for name, value in sorted(os.environ.items()) if name.lower() in _PROXIES and value}


def hosts_behind_proxy(*hosts: str) -> list[str]:
    """Loopback names, and ``hosts``, to which clients would connect through a proxy."""
    if not proxies():
        return []
    listed = {name.strip() for variable in _NO_PROXY for name in os.environ.get(variable, "").split(",")}
    return [] if "*" in listed else [host for host in dict.fromkeys([*_LOOPBACK, *hosts]) if host not in listed]


def bypass_proxies(*hosts: str) -> None:
    """Add loopback names and ``hosts`` to ``NO_PROXY``, in both spellings, if the environment names a proxy: clients in
    this process and its children then connect to them directly."""
    if missing := hosts_behind_proxy(*hosts):
        lists = [os.environ.get(variable, "").split(",") for variable in _NO_PROXY]
        hosts = tuple(host.strip() for hosts in lists for host in hosts if host.strip())
        os.environ.update(dict.fromkeys(_NO_PROXY, ",".join(dict.fromkeys([*hosts, *missing]))))


def shown_url(url: str) -> str:
    """``url`` without its password, its query, which may have a key, and a gateway's token, for messages and files."""
    passwords = r"(//)[^/?#]*(?=@)", r"(//)\S*(?=@)", r"^(?!.*//)()\S*(?=@)"  # also of a malformed URL
    for secret in (*passwords, r"((?:://|^)[^\s?#]*[?#])\S+", r"(://[^\s?#]*/k/)[^\s/?#]+"):
        url = re.sub(secret, r"\1***", url)
    return url


def without_secrets(text: str) -> str:
    """A message without the passwords and queries of its URLs, which a path writes with one slash."""
    for secret in (r"(:/{1,2})[^\s@]*:[^\s@]*(?=@)", r"(:/{1,2}[^\s?#]*\?)[^\s'\"]+"):
        text = re.sub(secret, r"\1***", text)
    return text


def require_local_address(host: str) -> None:
    """Raise ``ConfigError`` when this machine cannot listen on ``host``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is not an address of this machine: give one that is, or 127.0.0.1") from error


def free_port() -> int:
    """A port of 127.0.0.1 that nothing uses. It lies below the system's own range, 32,768 and up, from which a server
    without a port or a connection of another process could take it before its user does."""
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 20000 and 32767")


def require_token(host: str, token: str | None, *, setting: str) -> None:
    """Raise ``ConfigError``, which names the ``setting`` of the token, when a server that other machines can reach has
    no token."""
    if not token and not is_loopback(host):
        raise ConfigError(f"host {host!r} can be reached from other machines: set {setting}, or listen on 127.0.0.1")


def has_token(authorization: str | None, token: str | None) -> bool:
    """Whether an ``Authorization`` header carries the bearer token; always when ``token`` is empty."""
    return not token or same_secret(authorization or "", f"Bearer {token}")


def same_secret(received: str, secret: str) -> bool:
    """Compare in constant time; ``received`` need not be UTF-8."""
    return hmac.compare_digest(received.encode("utf-8", "surrogatepass"), secret.encode())


def page_refusal(headers: Mapping[str, str], path: str, *, check_host: bool) -> str | None:
    """The reason to refuse a request that a web page may have made a browser send, or ``None``. It has another site's
    ``Origin`` or, as an image's, no origin but another ``Sec-Fetch-Site`` (cross-site request forgery); after that
    site's name was bound to this machine's address it has a foreign ``Host`` (DNS rebinding). Links to ``/`` may be
    followed. A server without a token needs ``check_host``. ``headers`` must ignore case."""
    host, origin = headers.get("Host"), headers.get("Origin")
    linked = path == "/" and headers.get("Sec-Fetch-Dest") == "document"
    sent_by_page = headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not linked
    if sent_by_page if origin is None else origin.partition("://")[2] != host:
        return "requests from web pages are not served"
    try:
        named = host is None or is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        named = False
    if check_host and not named:
        return f"this server is for this machine: ask it as 127.0.0.1 or localhost, not {host!r:.100}"
    return None
