"""Servers are closed by default."""

import pytest

from agl_slime.errors import ConfigError
from agl_slime.support.net import has_token, is_loopback, require_token


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.7", "host.example", "")),
    ],
)
def test_addresses_that_others_reach_need_a_token(host, loopback):
    assert is_loopback(host) == loopback
    require_token(host, "secret", setting="--token")
    if loopback:
        require_token(host, None, setting="--token")
    else:
        with pytest.raises(ConfigError, match="--token"):
            require_token(host, "", setting="--token")


@pytest.mark.parametrize(
    "header", [None, "", "secret", "Bearer", "Bearer secre", "Bearer secret ", "Bearer s\udcffcret", "bearer é"]
)
def test_only_the_token_opens(header):
    assert not has_token(header, "secret")
    assert has_token("Bearer secret", "secret")
    assert has_token(header, None)
