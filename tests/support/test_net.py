"""Servers are closed by default."""

import pytest

from agl_slime.errors import ConfigError
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.server import StoreService
from agl_slime.support.net import has_token, is_loopback, require_token

LOOPBACK = {"127.0.0.1", "127.8.8.8", "::1", "localhost"}


@pytest.mark.parametrize("host", [*sorted(LOOPBACK), "0.0.0.0", "::", "10.0.0.7", "host.example", ""])
def test_addresses_that_others_reach_need_a_token(host):
    assert is_loopback(host) == (host in LOOPBACK)
    require_token(host, "secret", setting="--token")
    if host in LOOPBACK:
        require_token(host, None, setting="--token")
    else:
        with pytest.raises(ConfigError, match="--token"):
            require_token(host, "", setting="--token")


@pytest.mark.parametrize("header", [None, "secret", "Bearer", "Bearer secre", "Bearer secret ", "Bearer s\udcffcret"])
def test_only_the_token_opens(header):
    assert not has_token(header, "secret")
    assert has_token("Bearer secret", "secret")
    assert has_token(header, None)


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "x" * 70])
def test_an_address_of_another_machine_is_named_before_anything_listens(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host '{host}' is not an address of this machine"):
        StoreService(store=BridgeStore(), host=host, token="t" * 20)
    for local in ("127.0.0.1", "0.0.0.0", "localhost"):
        StoreService(store=BridgeStore(), host=local, token="t" * 20)
