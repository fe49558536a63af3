"""``agl-slime eval --openai-url``: a model at an OpenAI-compatible address has the same agents, rewards and tasks."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import ConfigError
from agl_slime.report.files import iter_jsonl
from agl_slime.support.agl_types import LLM
from agl_slime.tools.evaluation.command import EvalConfig
from agl_slime.tools.evaluation.settings import command_config
from agl_slime.tools.record.recorder import RecordGateway
from tests.buffer.test_multi_turn_api import serving
from tests.harness.training import needs_torch
from tests.tools.evaluation.test_evaluation import evaluate

pytestmark = [needs_torch, pytest.mark.skipif(find_spec("openai") is None, reason="needs the client of OpenAI")]

AGENTS = '''
from agentlightning import LitAgent
from openai import OpenAI

from agl_slime import SGLangLitAgent


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: The number to double.
    """
    return 2 * number


class Counter(SGLangLitAgent):
    tools = [double]
    max_turns = 3

    def compute_reward(self, task, response):
        return float(response == task["label"])


class OwnCalls(LitAgent):
    def rollout(self, task, resources, rollout):
        llm = resources["main_llm"]
        client = OpenAI(base_url=llm.get_base_url(rollout.rollout_id, "0"), api_key=llm.api_key)
        answer = client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["prompt"]}], **llm.sampling_parameters
        )
        return float(answer.choices[0].message.content == task["label"])
'''


@pytest.fixture
def counting(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "3", "label": "6"}\n{"prompt": "4", "label": "never"}\n')
    return {"agent": f"{tmp_path / 'agents.py'}:Counter", "tasks": tmp_path / "tasks.jsonl"}


def reply(body: dict[str, Any]) -> dict[str, Any]:
    """A call of ``double`` with the question if it is offered, then its result."""
    last = body["messages"][-1]
    if last["role"] == "tool" or "tools" not in body:
        return {"content": last["content"] if last["role"] == "tool" else "6"}
    call = {"name": "double", "arguments": json.dumps({"number": int(last["content"])})}
    return {"content": None, "tool_calls": [{"id": "one", "type": "function", "function": call}]}


def test_one_model_earns_the_same_by_tokens_and_by_an_openai_address(policy_dir, embedded_engine, tmp_path):
    settings: dict[str, Any] = {"temperature": 0.0, "n_tasks": 8, "k": 2, "output_dir": tmp_path / "out"}
    llm = LLM(endpoint=embedded_engine, model=str(policy_dir), sampling_parameters={"temperature": 0.0})
    with RecordGateway(directory=tmp_path, llm=llm) as gateway:
        url = f"{gateway.rollouts_url}/all/v1"
        report, _ = evaluate(policy_dir, openai_url=url, sglang_url=embedded_engine, **settings)
    theirs, ours = (
        {(line["task"], line["sample"]): (line["reward"], line["messages"]) for line in iter_jsonl(file)}
        for file in (tmp_path / "out" / "samples-1.jsonl", tmp_path / "out" / "samples-2.jsonl")
    )
    assert len(ours) == 16
    assert theirs == ours
    assert report["models"][0]["reward"] == report["models"][1]["reward"]
    assert report["difference"]["reward"]["mean"] == 0


def test_the_agents_tools_are_offered_as_openais_and_their_results_go_back(counting, tmp_path, monkeypatch):
    monkeypatch.setenv("PEER_KEY", "of the peer")
    with serving(reply) as server:
        report, text = evaluate(
            openai_url=server.url,
            openai_key_env="PEER_KEY",
            temperature=0.3,
            max_new_tokens=17,
            output_dir=tmp_path / "out",
            **counting,
        )
    (model,) = report["models"]
    assert (model["reward"]["mean"], model["failed"]) == (0.5, 0)
    assert "stub at http://127.0.0.1" in text
    assert {*server.keys} == {"Bearer of the peer"}
    for body in server.requests:
        assert (body["temperature"], body["max_tokens"], body["model"]) == (0.3, 17, "stub")
        assert body["tools"][0]["function"]["name"] == "double"
    first = next(iter_jsonl(tmp_path / "out" / "samples-1.jsonl"))
    assert [message["role"] for message in first["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert first["tokens"] is None
    assert all("of the peer" not in file.read_text() for file in (tmp_path / "out").iterdir() if file.is_file())


def test_refused_request_is_a_failure_not_a_reward(counting: dict[str, Any], tmp_path: Path) -> None:
    """For an agent with tools, and for one that makes its own calls."""

    def refuse_four(body: dict[str, Any]) -> Any:
        return 400 if body["messages"][0]["content"] == "4" else reply(body)

    for name, failure in (("Counter", "EngineRequestError"), ("OwnCalls", "BadRequestError")):
        agent = counting | {"agent": counting["agent"].replace("Counter", name)}
        with serving(refuse_four) as server:
            report, _ = evaluate(openai_url=server.url, output_dir=tmp_path / name, **agent)
        (model,) = report["models"]
        assert (model["reward"]["mean"], model["failures"]) == (1.0, {failure: 1})


def test_flags_that_contradict_each_other_are_refused(counting: dict[str, Any]) -> None:
    a, url = Path("a"), "http://host/v1"
    for sentence, flags in {
        "two are compared at most": {"models": (a, Path("b")), "openai_url": url},
        "--with-start": {"models": (a,), "openai_url": url, "with_start": True},
        "--agent and --tasks": {"models": (), "openai_url": url, "env": "game"},
        "give --openai-url": {"models": (a,), "openai_model": "gpt"},
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            command_config(EvalConfig, **flags)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY: this environment variable is not set"):
        evaluate(openai_url="http://127.0.0.1:1/v1", openai_key_env="NO_SUCH_KEY", **counting)
