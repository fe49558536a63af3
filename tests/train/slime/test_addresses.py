"""Addresses that agents, runners and controllers get for the servers of this machine."""

from argparse import Namespace
from typing import Any

import pytest

from agl_slime.errors import ConfigError
from agl_slime.gateway.server import Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.runner.ray import require_reachable
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.server import StoreService
from agl_slime.support.net import http_url, public_host
from agl_slime.train.slime.args import PluginSettings


def settings_of(environment: dict[str, str] | None = None, **args: Any) -> PluginSettings:
    return PluginSettings.from_args(Namespace(**args), environment or {})


def test_urls_have_brackets_around_ipv6() -> None:
    assert http_url("fd77::1", 8000) == http_url("[fd77::1]", 8000) == "http://[fd77::1]:8000"
    assert settings_of(sglang_router_ip="fd77::1", sglang_router_port=3).llm_url == "http://[fd77::1]:3"


def test_a_wildcard_is_announced_as_slimes_public_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTER_PUBLIC_HOST", "10.1.2.3")
    assert (public_host("0.0.0.0"), public_host("127.0.0.1")) == ("10.1.2.3", "127.0.0.1")
    with (
        Gateway(GatewaySettings(host="0.0.0.0")) as gateway,
        StoreService(store=BridgeStore(), host="0.0.0.0", token="secret") as service,
    ):
        assert all(server.url.startswith("http://10.1.2.3:") for server in (gateway, service))


def test_slimes_settings_of_the_gateway_reach_the_runners() -> None:
    settings = settings_of(agl_agent="a:B", agl_gateway_port=8123, agl_gateway_public_url="https://gate.example/")
    gateway = GatewaySettings(port=8123, public_url="https://gate.example/")
    assert settings.plan().settings.gateway == gateway  # type: ignore[union-attr]
    settings = settings_of({"ADAPTER_PUBLIC_HOST": "10.1.2.3"}, agl_agent="a:B")
    assert settings.plan().settings.gateway == GatewaySettings(host="0.0.0.0")  # type: ignore[union-attr]
    variables = {"AGL_SLIME_STORE_HOST": "10.0.0.7", "AGL_SLIME_MAX_CONCURRENT": "8"}
    plan = settings_of(variables, agl_agent="a:B", agl_runners="ray:2").plan()
    assert plan.settings is not None
    assert (plan.settings.max_concurrent, plan.settings.max_sync_threads) == (8, 8)
    assert (plan.store_host, plan.store_setting) == ("10.0.0.7", "agl_store_host")
    with pytest.raises(ConfigError, match="give that as port"):
        GatewaySettings(public_url="http://h")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"agl_gateway_public_url": "http://h"}, "_url http://h leads to one port: set agl_gateway_port"),
        ({"agl_gateway_public_url": "http://h", "agl_runners": "controller"}, "one port: set agl_controller_port"),
        ({"agl_gateway_port": 80, "agl_runners": "ray:2"}, "agl_gateway_port 80: each runner of ray:2 has a gateway"),
        ({"agl_gateway_public_url": "h:80"}, "agl_gateway_public_url is 'h:80'"),
    ],
)
def test_addresses_that_cannot_work_are_refused(args: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings_of(agl_agent="a:B", **args)


def test_a_store_that_other_nodes_cannot_reach_is_refused() -> None:
    class TwoNodes:
        @staticmethod
        def nodes() -> list[dict[str, bool]]:
            return [{"Alive": True}, {"Alive": True}, {"Alive": False}]

    require_reachable(TwoNodes, "10.0.0.7", setting="agl_store_host")
    with pytest.raises(ConfigError, match=r"Ray has 2 nodes.* give agl_store_host an address of this machine"):
        require_reachable(TwoNodes, "127.0.0.1", setting="agl_store_host")
