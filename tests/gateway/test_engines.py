"""Agents behind the gateway against running engines: the embedded one and, under ``-m sglang``, a real SGLang."""

import json
import random
from typing import Any

import httpx
import numpy as np
import pytest

from agl_slime.agent.access import EngineAccess
from agl_slime.agent.user_files import import_file
from agl_slime.gateway.server import Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.agl import LLM
from agl_slime.tokens.formats import get_tool_parser
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import decode_turns
from tests.harness.engine_servers import Server
from tests.harness.gateway import HELLO, trained_once, writer
from tests.harness.rollouts import run_rollouts
from tests.harness.tool_formats import FORMATS, template_of

ROOT = __file__.rpartition("/tests/")[0]


async def test_openai_agent_is_trained_on_the_sampled_tokens(server: Server) -> None:
    from openai import AsyncOpenAI

    module = import_file(f"{ROOT}/agents/lookup_openai.py")
    module.client = AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none")  # of this event loop
    rng = random.Random(0)
    tasks = [module.make_task(rng) for _ in range(32)]
    sampling: Any = {"temperature": 1.0, "max_new_tokens": 48}
    done = await run_rollouts(module.lookup, tasks, endpoint=server.url, model=str(server.policy), **sampling)
    assert {rollout.status for rollout in done} == {"succeeded"}
    conversions = [rollout.convert(None) for rollout in done]
    for conversion in conversions:
        (sample,) = conversion.samples
        assert sample.metadata["token_source"] == "engine"
        trained_once(conversion.trajectory.turns, merge_turns(conversion.trajectory.turns))
    assert sum(len(conversion.trajectory.turns) for conversion in conversions) > len(tasks)


def opened(server: Server, gateway: Gateway, **sampling: Any) -> tuple[LLM, list[Any]]:
    spans: list[Any] = []
    parameters = {"temperature": 1.0, "max_new_tokens": 40, **sampling}
    llm = LLM(endpoint=server.url, model=str(server.policy), sampling_parameters=parameters)
    _, served = gateway.open("ro-1", "at-1", {"main_llm": llm}, writer(spans))
    return served["main_llm"], spans  # type: ignore[return-value]


def chat(llm: LLM, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": HELLO, **fields}
    return httpx.post(f"{llm.endpoint}/chat/completions", json=body, timeout=120)


def test_a_client_gets_the_recorded_log_probs_and_the_best_ones(server: Server) -> None:
    with Gateway() as gateway:
        llm, spans = opened(server, gateway)
        tokens = chat(llm, logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]
        [turn] = decode_turns(spans)
        assert np.allclose([token["logprob"] for token in tokens], turn.log_probs)
        for token in tokens:
            best = [top["logprob"] for top in token["top_logprobs"]]
            assert len(best) == 3
            assert best == sorted(best, reverse=True)
            assert token["logprob"] <= best[0] + 1e-6


def test_constraints_work_on_real_engine_and_are_refused_by_embedded_one(server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    json_format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with Gateway(GatewaySettings(constraints="mask")) as gateway:
        llm, spans = opened(server, gateway, max_new_tokens=200)
        answer = chat(llm, response_format=json_format)
        if not server.real:
            assert (answer.status_code, "not supported by the embedded engine" in answer.text) == (400, True)
            return
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"] or "")["n"], int)
        assert [turn.untrained for turn in decode_turns(spans)] == ["constrained"]


@pytest.mark.parametrize("server", [pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True)
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if get_tool_parser(kind).call_grammar is not None])
def test_calls_are_forced_in_the_format_of_the_template(server: Server, kind: str) -> None:
    tokenizer = load_tokenizer(str(server.policy))
    tokenizer.chat_template = template_of(kind)  # type: ignore[attr-defined]
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    with Gateway(GatewaySettings(constraints="mask"), access=EngineAccess(tokenizer=tokenizer)) as gateway:
        llm, spans = opened(server, gateway, max_new_tokens=200)
        choice = chat(llm, tools=[tool], tool_choice="required").json()["choices"][0]
        functions = [call["function"] for call in choice["message"].get("tool_calls") or []]
        [turn] = decode_turns(spans)
        grammar = get_tool_parser(kind).call_grammar
        assert grammar is not None
        assert grammar[0].replace("NAME", "weather") in turn.text
        # a tiny policy may fill up the blanks that formats in XML allow
        assert functions or choice["finish_reason"] == "length", turn.text
        assert {function["name"] for function in functions} <= {"weather"}
        assert {json.loads(function["arguments"])["city"] for function in functions} <= {"Rome", "Oslo"}
        assert turn.untrained == "constrained"
