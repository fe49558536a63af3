"""Tools in every format: agents in process and clients of the gateway's protocols, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from agl_slime import SGLangLitAgent
from agl_slime.tokens.formats import get_tool_parser
from tests.harness.conversations import ScriptedClient
from tests.harness.gateway import WEATHER, Case, serving, trained_once
from tests.harness.rollouts import run_rollouts
from tests.harness.tool_formats import FORMATS, tokenizer_of, written

FUNCTION = WEATHER["function"]
TOOLS = {
    "chat/completions": [WEATHER],
    "messages": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
    "responses": [{"type": "function", **FUNCTION}],
}
CITIES = ["Rome", "Oslo\nand </think> <b>", "São Paulo"]
PARALLEL = [("weather", {"city": city}) for city in CITIES]


def post(case: Case, path: str, question: str, stream: bool) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls of an answer."""
    messages = [{"role": "user", "content": question}]
    body: dict[str, Any] = {"model": "m", "tools": TOOLS[path], "stream": stream}
    body |= {"input": messages} if path == "responses" else {"messages": messages, "max_tokens": 1024}
    answer = httpx.post(f"{case.llm.endpoint}/{path}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    if not stream:
        return whole(path, answer.json())
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return streamed(path, events)


def whole(path: str, said: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    if path == "chat/completions":
        message = said["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        return message["content"] or "", [(each["name"], json.loads(each["arguments"])) for each in functions]
    if path == "messages":
        text = "".join(block["text"] for block in said["content"] if block["type"] == "text")
        return text, [(block["name"], block["input"]) for block in said["content"] if block["type"] == "tool_use"]
    text = "".join(part["text"] for item in said["output"] if item["type"] == "message" for part in item["content"])
    listed = [item for item in said["output"] if item["type"] == "function_call"]
    return text, [(item["name"], json.loads(item["arguments"])) for item in listed]


def streamed(path: str, events: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, Any]]]:
    if path == "responses":
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        last = whole(path, events[-1]["response"])
        assert text == last[0]
        return last
    text, names, pieces = "", {}, {}
    for event in events:
        if path == "chat/completions":
            for delta in (choice["delta"] for choice in event["choices"]):
                text += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    names.setdefault(call["index"], call["function"].get("name"))
                    pieces[call["index"]] = pieces.get(call["index"], "") + (call["function"].get("arguments") or "")
        elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            names[event["index"]], pieces[event["index"]] = event["content_block"]["name"], ""
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
            if "partial_json" in event["delta"]:
                pieces[event["index"]] += event["delta"]["partial_json"]
    return text, [(name, json.loads(pieces[index])) for index, name in names.items()]


def broken(kind: str) -> str:
    """A call that cannot be read."""
    call = written(kind, [("weather", {"city": "Rome"})]).strip()
    if kind in ("qwen_xml", "seed"):
        return call.replace("=weather", "")
    if kind in ("glm", "hunyuan"):
        return call.replace("Rome</arg_value", "Rome</arg_valu")
    if kind in ("minimax", "deepseek_v32"):
        return call.replace('="weather"', '=""')
    return call.replace("Rome", 'Ro"me') if kind not in ("lfm2", "gemma4") else call.replace("weather", "")


def mention(kind: str) -> str:
    """A sentence with the mark that calls begin with."""
    if kind == "harmony":
        return "<|channel|>commentary<|message|>I write to=functions.weather now.<|end|><|start|>assistant"
    return f"I write {get_tool_parser(kind).marks()[-1]} now." if kind != "llama_json" else ""


@pytest.mark.parametrize("kind", list(FORMATS))
def test_parallel_calls_are_returned_and_mentioned_or_broken_ones_are_not(kind: str) -> None:
    before = "" if kind == "llama_json" else "Let me see."
    none = written(kind, [], "It is 20 degrees.")
    one = written(kind, [("weather", {"city": "Rome"})]).lstrip()
    said = [written(kind, PARALLEL, before), none, broken(kind), mention(kind) + one]
    questions = [(path, stream) for path in TOOLS for stream in (False, True)]
    with serving(*(said * len(questions)), tokenizer=tokenizer_of(kind), sampling={"max_new_tokens": 1024}) as case:
        for number, (path, stream) in enumerate(questions):
            ask = [post(case, path, f"{number} {what}?", stream) for what in range(len(said))]
            assert ask[0] == (before, PARALLEL), (path, stream)
            assert ask[1] == ("It is 20 degrees.", []), (path, stream)
            assert ask[2][1] == [], (path, stream)
            assert ask[3][1] == [("weather", {"city": "Rome"})], (path, stream)
        trained_once(case.turns, case.segments)
        completion = {"model": "m", "prompt": "As it is:", "max_tokens": 1024}
        answer = httpx.post(f"{case.llm.endpoint}/completions", json=completion, timeout=30)
        assert answer.json()["choices"][0]["text"] == said[-1]  # no template, no tools


class Weather(SGLangLitAgent):
    ran: list[str]

    def build_tools(self, task: dict[str, Any]) -> Sequence[Any]:
        def weather(city: str) -> str:
            """How the weather is."""
            self.ran.append(city)
            return f"sunny in {city}"

        return [weather]

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return float("20 degrees" in response)


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("kind", list(FORMATS))
async def test_an_agents_tools_run_once_for_each_call_that_was_made(kind: str, opens: bool) -> None:
    if opens and kind == "harmony":
        return  # whose channels nobody opens
    thought = "" if not opens else "I may write " + written(kind, PARALLEL[:1]) + FORMATS[kind].thinking[1] + "\n\n"
    if opens and FORMATS[kind].thinking[1] in thought.removesuffix(FORMATS[kind].thinking[1] + "\n\n"):
        return
    tokenizer = tokenizer_of(kind, opens=opens)
    one = written(kind, [("weather", {"city": "Rome"})]).lstrip()
    answers = [
        thought + written(kind, PARALLEL),
        thought + mention(kind) + one,
        thought + written(kind, [], "It is 20 degrees."),
    ]
    client = ScriptedClient(tokenizer, answers)
    agent = Weather(tokenizer=tokenizer, client=client)
    agent.ran = []
    finished = (await run_rollouts(agent, [{"prompt": "Weather?"}], max_new_tokens=1024))[0]
    assert finished.failure is None
    assert sorted(agent.ran) == sorted([*CITIES, "Rome"])  # calls of one answer run at the same time
    samples = finished.convert(tokenizer).samples
    assert samples[0].reward == 1.0
    tools = samples[0].metadata["tools"]
    assert (tools["calls"], tools["malformed"], tools["unknown"], tools["errors"]) == ({"weather": 4}, 0, 0, 0)


@pytest.mark.parametrize("kind", list(FORMATS))
async def test_a_broken_call_of_an_agent_runs_nothing_and_is_counted(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    agent = Weather(tokenizer=tokenizer, client=ScriptedClient(tokenizer, [broken(kind)]))
    agent.ran = []
    finished = (await run_rollouts(agent, [{"prompt": "Weather?"}], max_new_tokens=1024))[0]
    assert agent.ran == []
    (sample,) = finished.convert(tokenizer).samples
    assert sample.metadata["tools"]["malformed"] == 1
