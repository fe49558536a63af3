"""The clients and frameworks that agents are written with, against the gateway: two turns with a tool each, streamed
and not. Every turn after the first holds the tokens of the one before: one Sample, nothing re-tokenized.

    pip install "agl-slime[clients]" && pytest -m clients
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.protocols import STREAMED, user
from tests.harness.gateway import CALL, WEATHER, Case, calling, one_sample, serving, trained_once

pytestmark = pytest.mark.clients

THINKING = f"<think>\nRome, so.\n</think>\n\nLet me see.\n{CALL}"
DONE = "It is sunny in Rome."
QUESTION = "Weather in Rome?"


def weather(city: str) -> str:
    """How the weather is.

    Args:
        city: Where.
    """
    return f"sunny in {city}"


def one_sample_with_result(case: Case) -> None:
    one_sample(case)
    assert "sunny in Rome" in case.tokenizer.decode(case.turns[-1].prompt_ids)


@STREAMED
@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(streamed: bool, model: str) -> None:
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    if not hasattr(agents, "Runner"):
        pytest.skip("agents is this repository's directory of that name, not OpenAI's Agents SDK")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    with serving(THINKING, DONE) as case:

        async def run() -> str:
            client = AsyncOpenAI(base_url=case.llm.endpoint, api_key="any")
            chosen = getattr(agents, model)(model="m", openai_client=client)
            tools = [agents.function_tool(weather)]
            agent = agents.Agent(name="a", instructions="Be brief.", model=chosen, tools=tools)
            if not streamed:
                return (await agents.Runner.run(agent, QUESTION)).final_output
            result = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return result.final_output

        assert asyncio.run(run()) == DONE
        one_sample_with_result(case)


@STREAMED
def test_langgraph(streamed: bool) -> None:
    prebuilt = pytest.importorskip("langgraph.prebuilt", reason="pip install langgraph langchain-openai")
    chat = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    with serving(THINKING, DONE) as case:
        model = chat.ChatOpenAI(model="m", base_url=case.llm.endpoint, api_key="any", streaming=streamed, temperature=0)
        graph = prebuilt.create_react_agent(model, [weather], prompt="Be brief.")
        assert graph.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content == DONE
        one_sample_with_result(case)


@STREAMED
def test_pydantic_ai(streamed: bool) -> None:
    ai = pytest.importorskip("pydantic_ai", reason="pip install 'pydantic-ai-slim[openai]'")
    with serving(THINKING, DONE) as case:
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=case.llm.endpoint, api_key="any"))
        agent = ai.Agent(model, instructions="Be brief.", tools=[ai.Tool(weather)])

        async def follow(_: Any, events: Any) -> None:
            async for _ in events:
                pass

        # with a handler of events the model is asked to stream
        answer = asyncio.run(agent.run(QUESTION, event_stream_handler=follow if streamed else None))
        assert answer.output == DONE
        one_sample_with_result(case)


@STREAMED
def test_smolagents(streamed: bool) -> None:
    smol = pytest.importorskip("smolagents", reason="pip install 'smolagents[openai]'")
    with serving(CALL, calling("final_answer", answer="sunny")) as case:
        model = smol.OpenAIServerModel("m", api_base=case.llm.endpoint, api_key="any")
        options = {"verbosity_level": 0, "stream_outputs": streamed}
        agent = smol.ToolCallingAgent(tools=[smol.tool(weather)], model=model, **options)
        assert agent.run(QUESTION) == "sunny"
        # it writes the history in its own words: a true fork, and each answer is trained where it was sampled
        assert len(case.turns) == 2
        trained_once(case.turns, case.segments)


@STREAMED
def test_litellm(streamed: bool) -> None:
    litellm = pytest.importorskip("litellm", reason="pip install litellm")
    with serving(THINKING, DONE) as case:
        request = {"model": "openai/m", "api_base": case.llm.endpoint, "api_key": "any", "tools": [WEATHER]}
        messages: list[Any] = [user(QUESTION)]

        def ask() -> Any:
            answer = litellm.completion(messages=messages, stream=streamed, **request)
            return litellm.stream_chunk_builder(list(answer)) if streamed else answer

        message = ask().choices[0].message
        messages.append(message.model_dump())
        messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": weather("Rome")})
        assert ask().choices[0].message.content == DONE
        one_sample_with_result(case)


@STREAMED
def test_autogen(streamed: bool) -> None:
    chat = pytest.importorskip("autogen_agentchat.agents", reason="pip install autogen-agentchat 'autogen-ext[openai]'")
    models = pytest.importorskip("autogen_ext.models.openai", reason="pip install 'autogen-ext[openai]'")
    info = {"family": "unknown", "vision": False, "function_calling": True, "json_output": False}
    with serving(THINKING, DONE) as case:
        address: Any = {"model": "m", "base_url": case.llm.endpoint, "api_key": "any"}
        client = models.OpenAIChatCompletionClient(**address, model_info={**info, "structured_output": False})
        options: Any = {"reflect_on_tool_use": True, "model_client_stream": streamed}
        agent = chat.AssistantAgent("a", model_client=client, tools=[weather], **options)
        assert asyncio.run(agent.run(task=QUESTION)).messages[-1].content == DONE
        assert len(case.turns) == 2  # the last call comes without tools: another prompt, a true fork
        trained_once(case.turns, case.segments)


def test_strands() -> None:
    strands = pytest.importorskip("strands", reason="pip install 'strands-agents[openai]'")
    models = pytest.importorskip("strands.models.openai", reason="pip install 'strands-agents[openai]'")
    with serving(THINKING, DONE) as case:
        model = models.OpenAIModel(client_args={"base_url": case.llm.endpoint, "api_key": "any"}, model_id="m")
        agent = strands.Agent(model=model, tools=[strands.tool(weather)], callback_handler=None)
        assert DONE in str(agent(QUESTION))
        one_sample_with_result(case)
