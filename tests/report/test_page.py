"""The page of a run's directory, whole or damaged, and its server; a model's texts stay data."""

import json
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.errors import ConfigError, DiskFullError
from agl_slime.report import page as page_module
from agl_slime.report.files import RunDir, read_state
from agl_slime.report.page import assets, script_json
from agl_slime.report.read import RunReader, Tail, columns, find_runs
from agl_slime.report.view import serving
from agl_slime.tools.pages.file import write_report
from tests.harness.report_runs import EMOJI, HOSTILE, AWriter, write_run

ROOT = Path(__file__).parents[2]
WEB = Path(page_module.__file__).parent / "web"

NODE = shutil.which("node")
NAMES = ["perf/collect_s", "perf/train_s", "perf/sync_s", "perf/iteration_s", "perf/tokens_per_s"]
NAMES += ["rollout/staleness_mean", "rollout/staleness_max", "train/share/staleness_0", "train/engine_kl/staleness_0"]
NAMES += ["val/reward_mean", "val/count", "val/failed", "val/failed/timeout", "val/start_failed"]


def blocks(path: Path) -> dict[str, Any]:
    """The blocks of data as a browser sees them: HTML ends a script element at the first ``</script``."""
    html = path.read_text(encoding="utf-8")
    scripts = re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script', html, re.DOTALL)
    return {name: json.loads(text) for name, text in scripts}


def test_the_page_has_the_run_and_its_kept_rollouts(tmp_path: Path) -> None:
    report = write_report([write_run(tmp_path)])
    data = blocks(report)
    (run,) = data["runs-data"]
    assert run["state"]["word"] == "finished"
    assert run["headline"] == "reward rose from 0.10 to 0.30 over 3 iterations; no alarm"
    assert run["damage"] == []
    assert run["metrics"]["columns"]["rollout/reward_mean"] == [0.1, 0.2, 0.3]
    assert sum(run["groups"]["size"]) == len(run["members"]["id"]) == 36
    outcomes = [run["words"][number] for number in run["members"]["outcome"]]
    assert {word: outcomes.count(word) for word in outcomes} == {"trained": 21, "failed": 6, "filtered": 9}
    rollout = data[run["blocks"]["ro-1-2"]]
    assert [turn["fork"] for turn in rollout["turns"]] == [None, None, "edited_history"]
    assert "".join(rollout["samples"][0]["pieces"]) == "askcalltooldone"


def test_nothing_that_a_model_wrote_leaves_its_block(tmp_path: Path) -> None:
    report = write_report([write_run(tmp_path, tool_result=HOSTILE)])
    html = report.read_text(encoding="utf-8")
    assert "<img" not in html
    assert html.count("</script>") == len(blocks(report)) + 1
    assert "\u2028" not in html.partition("<script>")[0]
    assert any(HOSTILE in message["content"] for message in blocks(report)["r0-0"]["messages"])


@given(
    st.text(st.characters())
    | st.sampled_from(["\ud800", "</script>", "<!--<script>", "]]>", "\u2028\u2029", "{{code}}", "\\"])
)
def test_script_json_json_is_the_same_value_and_no_html(text: str) -> None:
    made = script_json({"text": text})
    assert json.loads(made) == {"text": text}
    assert not set("<>&\u2028\u2029") & set(made)


def test_the_policy_lets_the_pages_code_run_and_nothing_else(tmp_path: Path) -> None:
    html = write_report([write_run(tmp_path / "<b>x", iterations=1)]).read_text(encoding="utf-8")
    assert "<title>agl-slime: &lt;b&gt;x</title>" in html
    rules = page_module.policy(live=False)
    assert "default-src 'none'" in rules
    assert "unsafe" not in rules
    assert "connect-src" not in rules
    files = [path for path in WEB.iterdir() if not path.name.startswith("uplot")]
    assert len(files) > 8
    assert not [path.name for path in files if path.suffix == ".js" and "innerHTML" in path.read_text()]
    assert not [path.name for path in files if len(path.read_text().splitlines()) > 400]
    assert "Leon Sorokin" in assets()[2]  # the charts' licence


def test_a_large_run_is_cut_to_size_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_slime.tools.pages.file.MOST_BYTES", 230_000)
    report = write_report([write_run(tmp_path, iterations=8, tool_result="x" * 500)])
    assert report.stat().st_size <= 240_000
    (run,) = blocks(report)["runs-data"]
    assert 0 < len(run["blocks"]) < 96
    assert f"{96 - len(run['blocks'])} of 96 kept rollouts are left out" in run["left_out"]
    assert {name.split("-")[1] for name in run["blocks"]} > {"1", "5"}  # from all over the run


def test_a_megabyte_of_emoji_is_cut_in_the_file_and_whole_in_the_record(tmp_path: Path) -> None:
    write_run(tmp_path, iterations=1, tool_result=EMOJI)
    data = blocks(write_report([tmp_path]))
    update = data[data["runs-data"][0]["blocks"]["ro-1-0"]]["messages"][-2]["content"]
    assert len(update) < 51_000
    assert "characters left out" in update
    reader = RunReader(tmp_path)
    reader.update()
    line = reader.rollout("ro-1-0")
    assert line is not None
    assert EMOJI in json.loads(line)["messages"][-2]["content"]


def test_damaged_directory_opens_and_names_the_damage(tmp_path: Path) -> None:
    write_run(tmp_path)
    run = RunDir(tmp_path)
    run.config.write_text("{")
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(lines[0] + b'\x00{"iteration": \xff}\n' + lines[2] + b'{"iteration": 4, "tor')
    (tmp_path / "groups.jsonl").write_text('{"iteration": 1}\n[]\n{"iteration": 1, "rollouts": [1]}\n')
    run.summary.write_text("half")
    reader = RunReader(tmp_path)
    update = reader.update()
    assert update is not None
    assert update["metrics"]["iteration"] == [1, 3]
    assert update["damage"] == [
        "config.json is not a JSON object: the settings of this run are unknown.",
        "metrics.jsonl: 1 damaged lines are left out (2).",
        "groups.jsonl: 2 damaged lines are left out (2, 3).",
    ]
    assert update["state"]["word"] == "unknown"
    assert "summary.json" in update["state"]["text"]
    assert write_report([tmp_path]).stat().st_size > 50_000


def test_running_stopped_and_killed_runs_state_their_condition(tmp_path: Path) -> None:
    writer = AWriter(tmp_path / "stopped")
    writer.iteration(1)
    assert read_state(writer.run).word == "running"
    writer.finish("interrupted")
    assert read_state(writer.run).word == "stopped"
    assert "interrupted" in read_state(writer.run).text
    program = "import sys, time; from pathlib import Path; from tests.harness.report_runs import AWriter\n"
    program += "AWriter(Path(sys.argv[1])).iteration(1); print('ready', flush=True); time.sleep(60)"
    run = RunDir(tmp_path / "killed")
    with subprocess.Popen([sys.executable, "-c", program, str(run.path)], stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert read_state(run).word == "running"
        process.kill()
        process.wait()
    assert read_state(run).word == "killed"
    assert f"process {process.pid}" in read_state(run).text
    update = RunReader(run.path).update()
    assert update is not None
    assert (len(update["members"]["id"]), update["metrics"]["iteration"]) == (12, [1])


def test_runs_below_a_directory_are_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        write_report([tmp_path])
    runs = [write_run(tmp_path / name, iterations=1) for name in ("a", "b", "c/b")]
    (tmp_path / "other").mkdir()
    assert [path.name for path in find_runs(tmp_path)] == ["a", "b"]
    for paths, names in ((tmp_path,), ["a", "b"]), (runs, ["a", f"{tmp_path.name}/b", "c/b"]):
        assert [run["name"] for run in blocks(write_report(paths))["runs-data"]] == names


def test_the_page_of_a_resumed_run_begins_again(tmp_path: Path) -> None:
    AWriter(tmp_path).iteration(1)
    reader = RunReader(tmp_path)
    updates = [reader.update(), reader.update()]
    AWriter(tmp_path).iteration(2)
    updates.append(reader.update())
    read = [update and (update["reset"], update["metrics"]["iteration"]) for update in updates]
    assert read == [(True, [1]), None, (True, [2])]


@given(cuts=st.lists(st.integers(0, 300), max_size=6))
def test_a_tail_reads_each_record_once_however_the_file_grows(tmp_path_factory: Any, cuts: list[int]) -> None:
    path = tmp_path_factory.mktemp("tail") / "x.jsonl"
    content = b"".join(json.dumps({"iteration": n, "text": "é\n" * n}).encode() + b"\n" for n in range(8))
    tail, iterations = Tail(path), []
    for end in [*sorted(min(cut, len(content)) for cut in cuts), len(content)]:
        with path.open("ab") as file:
            file.write(content[file.tell() : end])
        iterations += [line.record["iteration"] for line in tail.read()]
    assert iterations == list(range(8))
    assert tail.bad == []
    rows = [{"iteration": 1, "a": 0.123456789}, {"iteration": 2, "b": 1}]
    assert columns(rows) == {"iteration": [1, 2], "columns": {"a": [0.1234568, None], "b": [None, 1]}}


@pytest.mark.skipif(NODE is None, reason="no node, which runs the page's code")
def test_each_panel_draws_metrics_of_its_unit() -> None:
    assert NODE is not None
    code = (files("agl_slime.report") / "web" / "trend.js").read_text(encoding="utf-8")
    program = f"{code}\nconsole.log(JSON.stringify(panels({json.dumps(NAMES)})))"
    done = subprocess.run([NODE, "-e", program], capture_output=True, text=True, timeout=60, check=True)
    drawn = {title: names for title, names in json.loads(done.stdout) if names}
    assert drawn["Seconds by phase"] == ["perf/collect_s", "perf/train_s", "perf/sync_s", "perf/iteration_s"]
    assert drawn["Sampled tokens per second"] == ["perf/tokens_per_s"]
    assert drawn["Staleness in weight versions"] == ["rollout/staleness_mean", "rollout/staleness_max"]
    assert drawn["Share of trained tokens by staleness"] == ["train/share/staleness_0"]
    assert drawn["Validation"] == ["val/reward_mean"]
    assert drawn["Validation rollouts that failed"] == ["val/failed", "val/failed/timeout"]


@pytest.mark.skipif(NODE is None, reason="no node, which runs the page's code")
def test_each_line_of_validations_begins_before_training() -> None:
    assert NODE is not None
    code = (WEB / "model.js").read_text(encoding="utf-8")
    columns = {
        "val/start_failed": [3, None],
        "val/failed": [None, 1],
        "val/start_reward_mean": [0.2, None],
        "a": [1, 2],
    }
    program = (
        f"{code}\nconst run = new Run(0); run.addMetrics({json.dumps({'iteration': [1, 2], 'columns': columns})});"
    )
    program += (
        "console.log(JSON.stringify(['val/failed', 'val/reward_mean', 'a', 'b'].map((name) => run.points(name))))"
    )
    done = subprocess.run([NODE, "-e", program], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [[[0, 3], [2, 1]], [[0, 0.2]], [[1, 1], [2, 2]], []]


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
        runs = "7", "7" * 5000, "x"
        for params in ({"run": "0", "id": "../config"}, *({"run": run, "id": "ro-2-1"} for run in runs), {}):
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
