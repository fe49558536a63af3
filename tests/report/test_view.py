"""The served page over real HTTP: access, and the messages of a follower."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agl_slime.errors import ConfigError, DiskFullError
from agl_slime.report.view import serving
from tests.harness.report_runs import AWriter, write_run


async def message(stream: aiohttp.StreamReader) -> Any:
    """The next message of an event stream."""
    while not (line := await stream.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return json.loads(line[6:])


async def test_follower_gets_each_update_once(tmp_path: Path) -> None:
    writer = AWriter(tmp_path / "one")
    writer.iteration(1)
    async with serving([tmp_path], follow=True) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/events") as answer:
            (first,) = await message(answer.content)
            assert first["reset"]
            assert first["state"]["word"] == "running"
            assert first["metrics"]["iteration"] == [1]
            writer.iteration(2)
            (second,) = await message(answer.content)
            assert not second["reset"]
            assert second["metrics"]["iteration"] == [2]
            assert {name.split("-")[1] for name in second["kept"]} == {"2"}
            write_run(tmp_path / "two", iterations=1)
            changes, two = await message(answer.content)
            assert changes is None
            assert two["name"] == "two"
        async with session.get(f"{url}/rollout", params={"run": "0", "id": "ro-2-1"}) as answer:
            assert (await answer.json())["rollout_id"] == "ro-2-1"
        for run, ids in ("0", ["ro-2-3"]), ("7", []), ("x", []):
            async with session.get(f"{url}/ids", params={"run": run, "text": "What IS 3?"}) as answer:
                assert [name for name in await answer.json() if name.startswith("ro-2")] == ids
        for params in ({"run": "0", "id": "../config"}, {"run": "7", "id": "ro-2-1"}, {"run": "x", "id": "y"}, {}):
            async with session.get(f"{url}/rollout", params=params) as answer:
                assert answer.status == 404


async def test_the_page_is_closed_to_other_sites(tmp_path: Path) -> None:
    async with serving([write_run(tmp_path, iterations=1)]) as url, aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            rules = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in rules
            assert "frame-ancestors 'none'" in rules
            assert rules.partition("; base-uri")[0] in (await answer.text())
            assert "Access-Control-Allow-Origin" not in answer.headers
        async with session.get(f"{url}/data", headers={"Host": "attacker.example"}) as answer:
            assert answer.status == 403


async def test_a_token_opens_it_once_and_a_cookie_from_then_on(tmp_path: Path) -> None:
    write_run(tmp_path, iterations=1)
    jar = aiohttp.CookieJar(unsafe=True)  # of an address, not of a name
    async with serving([tmp_path], token="secret") as url, aiohttp.ClientSession(cookie_jar=jar) as session:
        place = url.partition("?")[0]
        for wrong in (place, f"{place}data", f"{place}data?token=other"):
            async with session.get(wrong) as answer:
                assert answer.status == 403
        async with session.get(url) as answer:
            assert answer.status == 200
            assert "token" not in str(answer.url)
        async with session.get(f"{place}data") as answer:
            assert (await answer.json())[0]["name"] == tmp_path.name


async def test_an_open_address_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AGL_SLIME_VIEW_TOKEN"):
        async with serving([write_run(tmp_path, iterations=1)], host="0.0.0.0"):
            pass


async def test_an_error_of_the_run_is_not_one_of_the_page(tmp_path: Path) -> None:
    """With ``--view web`` the run is inside."""
    with pytest.raises(DiskFullError, match="no space left"):
        async with serving([write_run(tmp_path, iterations=1)]):
            raise DiskFullError("no space left in x")
