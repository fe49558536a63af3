"""The recorder: exact tokens, masks and rewards of any agent, on disk, for any trainer."""

import errno
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.agent.access import EngineAccess
from agl_slime.cli.main import main
from agl_slime.support.agl import LLM
from agl_slime.tokens.turn import Turn
from agl_slime.tools.record import recorded
from agl_slime.tools.record.formats import FORMATS
from agl_slime.tools.record.recorded import RecordedRollout, RolloutFile
from agl_slime.tools.record.recorder import RecordGateway
from agl_slime.types import Sample, sample_from_json
from tests.harness.gateway import BODY, CALL, HELLO, QUICK, TEMPLATE, WEATHER, engine_saying
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer
from tests.house.test_without_extras import BLOCKER, REPOSITORY


@contextmanager
def recording(directory: Path, *says: str, **options: Any) -> Iterator[tuple[RecordGateway, ScriptedEngine]]:
    tokenizer: Any = small_tokenizer(TEMPLATE)
    directory.mkdir(exist_ok=True)
    engine = engine_saying(tokenizer, says)
    with in_thread(engine):
        llm = LLM(endpoint=engine.url, model="scripted", sampling_parameters={"max_new_tokens": 64})
        access = EngineAccess(tokenizer=tokenizer, settings=QUICK)
        with RecordGateway(directory=directory, llm=llm, access=access, **options) as gateway:
            yield gateway, engine


def record_command(engine: ScriptedEngine, directory: Path) -> list[str]:
    command = [sys.executable, "-m", "agl_slime", "record", "--sglang-url", engine.url]
    return [*command, "--model-path", str(directory / "model"), "--directory", str(directory / "recorded")]


def blocking(directory: Path, *modules: str) -> dict[str, str]:
    """The environment of a process in which these modules cannot be imported; torch would cost it seconds."""
    (directory / "sitecustomize.py").write_text(BLOCKER.format(names=set(modules)))
    return {"PYTHONPATH": os.pathsep.join([str(directory), str(REPOSITORY)])}


@contextmanager
def server_process(command: list[str], **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command and its address."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line.startswith(("recorder at ", "gateway at "))
            yield child, line.split()[-1]
        finally:
            child.kill()


def ask(url: str, messages: list[Any], **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/chat/completions", json={"model": "m", "messages": messages, **fields}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask_with_a_tool(url: str, **fields: Any) -> None:
    """Two turns with a call of a tool between them."""
    call = ask(url, HELLO, tools=[WEATHER])["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "30 degrees"}
    ask(url, [*HELLO, call, result], tools=[WEATHER], **fields)


def prompts_of(engine: ScriptedEngine) -> list[list[int]]:
    return [received.payload["input_ids"] for received in engine.received if received.path == "/generate"]


def test_two_turns_with_a_tool_are_one_sample_of_the_engines_tokens(tmp_path: Path) -> None:
    with recording(tmp_path, CALL, "It is warm.") as (gateway, engine):
        created = httpx.post(gateway.rollouts_url, json={"task": {"label": "warm"}, "metadata": {"group_id": "g"}})
        assert created.status_code == 201
        about = created.json()
        ask_with_a_tool(about["endpoint"], return_token_ids=True)
        address = f"{gateway.rollouts_url}/{about['rollout_id']}"
        running = httpx.get(address).json()
        assert (running["status"], running["reward"], running["samples"][0]["reward"]) == ("running", None, None)
        assert httpx.post(f"{address}/finish", json={"reward": {"right": 1.0, "short": 0.25}}).status_code == 200
        rollout = httpx.get(address).json()
    assert (rollout["status"], rollout["finished"], rollout["reward"]) == ("finished", "client", 1.0)
    assert (rollout["rewards"], rollout["task"]) == ({"right": 1.0, "short": 0.25}, {"label": "warm"})
    [sample] = [sample_from_json(values) for values in rollout["samples"]]
    assert sample.status == Sample.Status.COMPLETED
    assert (sample.reward, sample.label, sample.metadata["group_id"]) == (1.0, "warm", "g")
    prompts = prompts_of(engine)
    first, second = rollout["turns"]
    assert [turn["prompt_token_ids"] for turn in rollout["turns"]] == prompts
    lines = [json.loads(line) for line in (tmp_path / f"{about['rollout_id']}.jsonl").read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["rollout", "span", "span", "reward", "finished"]
    assert [*sample.tokens] == [*prompts[1], *second["token_ids"]]
    mask, log_probs = sample.loss_mask, sample.rollout_log_probs
    assert mask is not None
    assert log_probs is not None
    trained = [token for token, used in zip(sample.tokens[-sample.response_length :], mask, strict=True) if used]
    assert trained == [*first["token_ids"], *second["token_ids"]]
    recorded = [value for value, used in zip(log_probs, mask, strict=True) if used]
    assert recorded == pytest.approx([*first["log_probs"], *second["log_probs"]])


def test_a_new_name_begins_a_rollout_and_formats_agree(tmp_path: Path) -> None:
    """The name stands in the path or, for clients with one base URL, in a header."""
    with recording(tmp_path, "Hi.") as (gateway, _):
        ask(f"{gateway.rollouts_url}/mine/v1", HELLO)
        address = f"{gateway.rollouts_url}/mine"
        assert httpx.post(f"{address}/reward", json={"reward": 0.5}).status_code == 200
        [turn] = httpx.get(address).json()["turns"]
        [sample] = httpx.get(address, params={"format": "slime"}).json()
        event, reward = httpx.get(address, params={"format": "triplet"}).json()
        wrong = httpx.get(address, params={"format": "arrow"})
        for headers, status in (
            ({}, 404),
            ({"X-Session-ID": "first"}, 200),
            ({"X-Session-ID": "second"}, 200),
            ({"X-Session-ID": "second/../third"}, 404),
        ):
            body = {"model": "m", "messages": HELLO}
            base = gateway.rollouts_url.removesuffix("/rollouts")
            answer = httpx.post(f"{base}/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == status
    assert (sample["reward"], sample["tokens"]) == (0.5, turn["prompt_token_ids"] + turn["token_ids"])
    assert event["data"]["response_token_ids"] == turn["token_ids"]
    assert (reward["event_type"], reward["data"]) == ("reward", {"value": 0.5})
    assert wrong.status_code == 400
    assert "json, slime, triplet" in wrong.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.jsonl", "mine.jsonl", "second.jsonl"]


def test_the_guides_example_ends_with_a_rewarded_sample(tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="the guide's client: pip install openai")
    guide = (Path(__file__).parents[3] / "docs" / "record.md").read_text()
    code = guide.split("```python\n")[1].split("```")[0]
    with recording(tmp_path, "It is 42.") as (gateway, _):
        variables: dict[str, Any] = {}
        exec(code.replace("http://127.0.0.1:PORT/k/TOKEN/rollouts", gateway.rollouts_url), variables)
    [sample] = variables["samples"]
    assert (sample["reward"], sample["metadata"]["group_id"]) == (1.0, "g1")


def test_all_rollouts_of_a_directory_have_the_reward_of_one_name(tmp_path: Path) -> None:
    """The first of the first named reward, whatever the order of later ones, also after a restart."""
    posted = [0.25, {"score": 0.5, "format": "none"}, {"format": 1, "score": -1}, {"score": 2, "style": 1e39}]
    for n in (0, 2):
        with recording(tmp_path, "Hi.") as (gateway, _):
            if n:
                assert httpx.post(gateway.rollouts_url, json={"rollout_id": "r0"}).status_code == 409
            for number in (n, n + 1):
                answer = httpx.post(gateway.rollouts_url, json={"rollout_id": f"r{number}"})
                assert answer.status_code == 201
                reward = f"{gateway.rollouts_url}/r{number}/reward"
                assert httpx.post(reward, json={"reward": posted[number]}).status_code == 200
                if number:
                    refused = httpx.post(reward, json={"reward": {"acc": 1, "style": 2}})
                    assert (refused.status_code, "only acc, style" in refused.text) == (400, True)
            kept = [httpx.get(f"{gateway.rollouts_url}/r{number}").json()["reward"] for number in range(n + 2)]
    assert kept == [0.25, 0.5, -1, 2]


def test_refusals_name_the_field_and_change_nothing(tmp_path: Path) -> None:
    with recording(tmp_path, "Hi.", token="secret") as (gateway, _):
        bare = f"{gateway.url}/rollouts"
        assert httpx.post(bare).status_code == 401
        http = httpx.Client(headers={"Authorization": "Bearer secret"})
        assert http.post(bare, json={"rollout_id": "one"}).status_code == 201
        assert http.post(bare, json={"rollout_id": "one"}).status_code == 409
        for body in ({"reward": None}, {"reward": "1"}, {"reward": True}, {"reward": {}}, {"reward": {"a": None}}, {}):
            refused = http.post(f"{bare}/one/reward", json=body)
            assert refused.status_code == 400, body
            assert "reward" in refused.text
        assert http.post(f"{bare}/one/reward", content=b'{"reward": NaN}').status_code == 400
        assert http.get(f"{bare}/one").json()["reward"] is None
        assert http.get(f"{bare}/two").status_code == 404
        for name in ("..", "%2e%2e", "a%2fb", ".hidden", "x" * 129):
            assert http.post(f"{bare}/{name}/v1/chat/completions", json={"messages": HELLO}).status_code == 404, name
        assert http.post(f"{bare}/one/finish").status_code == 200
        ended = http.post(f"{bare}/one/v1/chat/completions", json={"messages": HELLO})
        assert (ended.status_code, ended.json()["error"]["code"]) == (410, "rollout_ended")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.jsonl"]


@pytest.mark.parametrize("token", [None, "secret"])
def test_an_agents_secret_opens_model_calls_of_its_rollout_only(tmp_path: Path, token: str | None) -> None:
    with recording(tmp_path, "Hi.", token=token) as (gateway, _):
        mine, _ = [httpx.post(gateway.rollouts_url, json={"rollout_id": name}).json() for name in ("mine", "other")]
        secret, chat = mine["api_key"], "v1/chat/completions"
        address = f"{gateway.url}/rollouts/mine/{chat}"
        for url, key in ((f"{mine['endpoint']}/chat/completions", ""), (address, secret)):
            answers = [httpx.post(url, json={**BODY, "stream": on}, headers={"x-api-key": key}) for on in (False, True)]
            assert [answer.status_code for answer in answers] == [200, 200]
        for base, key in (("", secret), (f"/k/{secret}", ""), ("", ""), ("/k/none", "none")):
            http = httpx.Client(base_url=f"{gateway.url}{base}", headers={"x-api-key": key, "X-Session-ID": "other"})
            paths = ("", "/mine/reward", "/mine/finish", f"/other/{chat}", f"/new/{chat}")
            tried = [http.post(f"/rollouts{path}", json=BODY | {"reward": 1.0}) for path in paths]
            tried += [http.post(f"/{chat}", json=BODY), *(http.get(f"/rollouts/{name}") for name in ("mine", "other"))]
            assert {answer.status_code for answer in tried} == {401}
        seen = [httpx.get(f"{gateway.rollouts_url}/{name}").json() for name in ("mine", "other")]
        assert [(one["finished"], one["reward"], len(one["turns"])) for one in seen] == [
            (None, None, n) for n in (4, 0)
        ]
        assert httpx.post(f"{gateway.rollouts_url}/mine/finish").status_code == 200
        assert httpx.post(address, json=BODY, headers={"x-api-key": secret}).status_code == 410
    assert len([*tmp_path.iterdir()]) == 2


def test_a_name_whose_creation_met_a_full_disk_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(tmp_path, "Hi.") as (gateway, _):
        with monkeypatch.context() as full:
            full.setattr(recorded, "json_bytes", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            by_name = f"{gateway.rollouts_url}/one/v1/chat/completions"
            for url, body in ((gateway.rollouts_url, {"rollout_id": "one"}), (by_name, {"messages": HELLO})):
                refused = httpx.post(url, json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_full")
        assert not [*tmp_path.iterdir()]
        assert httpx.post(gateway.rollouts_url, json={"rollout_id": "one"}).status_code == 201


_NAMED = st.dictionaries(st.text(min_size=1, max_size=3), st.floats(-1, 1), min_size=1)
_REWARDS = st.lists(st.floats(-5, 5) | st.integers(-5, 5) | _NAMED)
_TASKS = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4)


@given(task=_TASKS, rewards=_REWARDS, tail=st.binary(max_size=9))
def test_a_torn_line_loses_nothing_else(tmp_path_factory, task, rewards, tail):
    file = RolloutFile(tmp_path_factory.mktemp("recorded"), "ro-1")
    file.create(task=task, metadata={"half an emoji": "\ud83d"}, time=1.0)
    for reward in rewards:
        with file.path.open("ab") as torn:
            torn.write(b'{"span": ' + tail.replace(b"\n", b""))
        file.append({"reward": reward})
    recorded = RecordedRollout.read(file)
    assert recorded.rollout.input == task
    assert recorded.rollout.metadata == {"half an emoji": "\ud83d"}
    last = rewards[-1] if rewards else None
    if last is None:
        assert recorded.reward is None
    else:
        assert recorded.reward is not None
        assert dict(recorded.reward.named) == (last if isinstance(last, dict) else {"primary": last})
    assert not file.finished()


def test_the_command_survives_a_kill_without_agent_lightning_and_torch(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    engine = engine_saying(tokenizer, [CALL, "It is warm."])
    without = blocking(tmp_path, "agentlightning", "torch", "ray", "slime", "safetensors")
    with in_thread(engine):
        command = record_command(engine, tmp_path)
        with server_process(command, **without) as (child, url):
            ask_with_a_tool(f"{url}/one/v1")
            payloads = [received.payload for received in engine.received if received.path == "/generate"]
            assert "chat_template_kwargs" not in payloads[0]["sampling_params"]  # engines refuse unknown parameters
            child.send_signal(signal.SIGKILL)
            child.wait()
        with server_process(command, **without) as (child, url):
            rollout = httpx.get(f"{url}/one").json()
            assert (rollout["status"], len(rollout["turns"]), len(rollout["samples"])) == ("lost", 2, 1)
            lost = httpx.post(f"{url}/one/v1/chat/completions", json={"messages": HELLO})
            assert (lost.status_code, lost.json()["error"]["code"]) == (410, "attempt_lost")
            assert httpx.post(f"{url}/one/finish", json={"reward": 1}).status_code == 200
            answers = {form: httpx.get(f"{url}/one", params={"format": form}, timeout=30) for form in FORMATS}
            assert {form: answer.status_code for form, answer in answers.items()} == dict.fromkeys(FORMATS, 200)
            child.send_signal(signal.SIGTERM)
            assert child.wait(10) == 0
    # read where Agent Lightning is installed, it is the same
    kept = RecordedRollout.read(RolloutFile(tmp_path / "recorded", "one"))
    assert {form: json.loads(json.dumps(FORMATS[form](kept))) for form in FORMATS} == {
        form: answer.json() for form, answer in answers.items()
    }
    [sample] = answers["slime"].json()
    assert (sample["reward"], answers["json"].json()["status"]) == (1.0, "finished")


def test_a_model_that_cannot_be_loaded_ends_the_recorder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    engine = engine_saying(small_tokenizer(TEMPLATE), [])
    flags = [word.replace(engine.url, "http://127.0.0.1:1") for word in record_command(engine, tmp_path)[4:]]
    assert main(["record", *flags]) == 2
    assert f"--model-path {tmp_path / 'model'}" in capsys.readouterr().err
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert main(["record", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: no tokenizer can be loaded from '{tmp_path / 'model'}': ")


def turns_in_memory() -> int:
    gc.collect()
    return sum(type(item) is Turn for item in gc.get_objects())


def test_memory_is_of_open_rollouts_only_and_idle_ones_end(tmp_path: Path) -> None:
    with recording(tmp_path, "Hi.", idle_s=0.0) as (gateway, _):
        ask(f"{gateway.rollouts_url}/r0/v1", HELLO)
        with_one = turns_in_memory()
        for number in range(1, 20):  # each ends the one before it
            ask(f"{gateway.rollouts_url}/r{number}/v1", HELLO)
        assert turns_in_memory() == with_one > 0
        rollout = httpx.get(f"{gateway.rollouts_url}/r7").json()
        assert (rollout["finished"], len(rollout["turns"])) == ("idle", 1)
        assert httpx.get(f"{gateway.rollouts_url}/r19").json()["finished"] == "idle"  # nobody began another
