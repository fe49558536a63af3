"""Agents behind the gateway against running engines: the embedded one and, under ``-m sglang``, a real SGLang."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from agl_slime.agent.access import EngineAccess
from agl_slime.agent.by_file import import_file
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.gateway.server import Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.agl import LLM
from agl_slime.tokens.formats import get_tool_parser
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import decode_turns
from tests.harness.engine_servers import Server
from tests.harness.gateway import WEATHER, trained_once, writer
from tests.harness.rollouts import run_rollouts
from tests.harness.tool_formats import FORMATS, template_of

ROOT = __file__.rpartition("/tests/")[0]
HELLO: list[Any] = [{"role": "user", "content": "Hello?"}]


async def test_openai_agent_is_trained_on_the_sampled_tokens(server: Server) -> None:
    module = import_file(f"{ROOT}/agents/lookup_openai.py")
    module.client = AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none")  # of this event loop
    rng = random.Random(0)
    tasks = [module.make_task(rng) for _ in range(32)]
    how: Any = {"endpoint": server.url, "model": str(server.policy)}
    done = await run_rollouts(module.lookup, tasks, **how, temperature=1.0, max_new_tokens=48)
    assert {one.status for one in done} == {"succeeded"}
    turns = 0
    for one in done:
        conversion = one.convert(None)
        assert len(conversion.samples) == 1
        assert conversion.samples[0].metadata["token_source"] == "engine"
        turns += len(conversion.trajectory.turns)
        trained_once(conversion.trajectory.turns, merge_turns(conversion.trajectory.turns))
    assert turns > len(tasks)


def opened(server: Server, gateway: Gateway, **sampling: Any) -> tuple[LLM, list[Any]]:
    spans: list[Any] = []
    parameters = {"temperature": 1.0, "max_new_tokens": 40, **sampling}
    llm = LLM(endpoint=server.url, model=str(server.policy), sampling_parameters=parameters)
    _, served = gateway.open("ro-1", "at-1", {"main_llm": llm}, writer(spans))
    return served["main_llm"], spans  # type: ignore[return-value]


def test_stream_equals_the_sampled_text(server: Server) -> None:
    with Gateway() as gateway:
        llm, spans = opened(server, gateway)
        client = OpenAI(base_url=llm.endpoint, api_key="any", max_retries=0)
        chunks = list(client.chat.completions.create(model="m", messages=HELLO, stream=True, n=4))
        for index in range(4):
            pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == index]
            assert (text := "".join(pieces)) in {turn.text for turn in decode_turns(spans)}
            assert len(pieces) > 2 or not text  # beside the first and the last chunk, which have none


async def test_recorded_log_probs_are_of_the_prompt_that_was_sent(server: Server) -> None:
    """The engine asked again for the same tokens, greedily by what it said: the same log-probs."""
    with Gateway() as gateway:
        llm, spans = opened(server, gateway)
        client = AsyncOpenAI(base_url=llm.endpoint, api_key="any", max_retries=0)
        said = await client.chat.completions.create(model="m", messages=HELLO, logprobs=True)
        told = [token.logprob for token in said.choices[0].logprobs.content]  # type: ignore[union-attr]
        [turn] = decode_turns(spans)
        assert np.allclose(told, turn.log_probs)
        async with SGLangClient(base_url=server.url) as engine:
            ids = [*turn.prompt_ids.tolist(), *turn.response_ids.tolist()]
            payload = {
                "input_ids": ids,
                "sampling_params": SamplingParams(max_new_tokens=1).to_payload(),
                "return_logprob": True,
                "logprob_start_len": len(turn.prompt_ids) - 1,
                "rid": "again",
            }
            answer = await engine._http.call("POST", "/generate", payload)
        again = [pair[0] for pair in answer["meta_info"]["input_token_logprobs"][1:]]
        assert np.allclose(again, turn.log_probs, atol=1e-4)


def test_constraints_work_on_real_engine_and_are_refused_by_embedded_one(server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    with Gateway(GatewaySettings(constraints="mask")) as gateway:
        llm, spans = opened(server, gateway, max_new_tokens=200)
        ask = OpenAI(base_url=llm.endpoint, api_key="any", max_retries=0).chat.completions.create
        if not server.real:
            with pytest.raises(openai.BadRequestError, match="not supported by the embedded engine"):
                ask(model="m", messages=HELLO, response_format=wanted)
            return
        said = ask(model="m", messages=HELLO, response_format=wanted).choices[0]
        if said.finish_reason == "stop":
            assert isinstance(json.loads(said.message.content or "")["n"], int)
        called = ask(model="m", messages=HELLO, tools=[WEATHER], tool_choice=forced).choices[0]
        ends = decode_turns(spans)[1].text.count("</tool_call>")  # a tiny policy may write one in a string
        if called.finish_reason != "length" and ends == 1:
            assert [call.function.name for call in called.message.tool_calls or ()] == ["weather"]
        assert (decode_turns(spans)[1].text).startswith('<tool_call>\n{"name": "weather", "arguments": ')
        assert [turn.untrained for turn in decode_turns(spans)] == ["constrained"] * 2


def test_top_log_probs_are_returned_on_request(server: Server) -> None:
    with Gateway() as gateway:
        llm, _ = opened(server, gateway, max_new_tokens=5)
        ask = OpenAI(base_url=llm.endpoint, api_key="any", max_retries=0).chat.completions.create
        told = ask(model="m", messages=HELLO, logprobs=True, top_logprobs=3).choices[0].logprobs
        for token in told.content:  # type: ignore[union-attr]
            values = [top.logprob for top in token.top_logprobs]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert token.logprob <= values[0] + 1e-6


@pytest.mark.parametrize("server", [pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True)
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if get_tool_parser(kind).call_grammar is not None])
def test_calls_are_forced_in_the_format_of_the_template(server: Server, kind: str) -> None:
    tokenizer = load_tokenizer(str(server.policy))
    tokenizer.chat_template = template_of(kind)  # type: ignore[attr-defined]
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    with Gateway(GatewaySettings(constraints="mask"), access=EngineAccess(tokenizer=tokenizer)) as gateway:
        llm, spans = opened(server, gateway, max_new_tokens=200)
        ask = OpenAI(base_url=llm.endpoint, api_key="any", max_retries=0).chat.completions.create
        said = ask(model="m", messages=HELLO, tools=[tool], tool_choice="required").choices[0]
        calls = said.message.tool_calls or []
        [turn] = decode_turns(spans)
        written = get_tool_parser(kind).call_grammar
        assert written is not None
        assert written[0].replace("NAME", "weather") in turn.text
        # a tiny policy may fill up the blanks that formats in XML allow
        assert calls or said.finish_reason == "length", turn.text
        assert {call.function.name for call in calls} <= {"weather"}  # type: ignore[union-attr]
        assert {json.loads(call.function.arguments)["city"] for call in calls} <= {"Rome", "Oslo"}  # type: ignore[union-attr]
        assert turn.untrained == "constrained"
