"""The clients and frameworks that agents are written with, against the gateway: two turns with a tool each, streamed
and not. Every turn after the first holds the tokens of the one before: one Sample, nothing tokenized again.

    pip install "agl-slime[clients]" && pytest -m clients
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.harness.gateway import CALL, Case, serving, trained_once

pytestmark = pytest.mark.clients

THINKING = f"<think>\nRome, so.\n</think>\n\nLet me see.\n{CALL}"
DONE = "It is sunny in Rome."
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def weather(city: str) -> str:
    """How the weather is.

    Args:
        city: Where.
    """
    return f"sunny in {city}"


def one_sample(case: Case, *, turns: int = 2) -> None:
    made = case.turns
    assert len(made) == turns
    assert [turn.fork for turn in made] == [None] * turns
    assert len(case.segments) == 1
    trained_once(made, case.segments)
    assert "sunny in Rome" in case.tokenizer.decode(made[-1].prompt_ids)


@STREAMED
def test_openai_agents(streamed: bool) -> None:
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    if not hasattr(agents, "Runner"):
        pytest.skip("agents is this repository's directory of that name, not OpenAI's Agents SDK")
    from openai import AsyncOpenAI

    with serving(THINKING, DONE) as case:

        async def run(model_class: Any) -> str:
            client = AsyncOpenAI(base_url=case.llm.endpoint, api_key="any")
            model = model_class(model="m", openai_client=client)
            agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[agents.function_tool(weather)])
            if not streamed:
                return (await agents.Runner.run(agent, "Weather in Rome?")).final_output
            result = agents.Runner.run_streamed(agent, "Weather in Rome?")
            async for _ in result.stream_events():
                pass
            return result.final_output

        agents.set_tracing_disabled(True)
        assert asyncio.run(run(agents.OpenAIChatCompletionsModel)) == DONE
        one_sample(case)
    with serving(THINKING, DONE) as case:
        assert asyncio.run(run(agents.OpenAIResponsesModel)) == DONE
        one_sample(case)


@STREAMED
def test_langgraph(streamed: bool) -> None:
    prebuilt = pytest.importorskip("langgraph.prebuilt", reason="pip install langgraph langchain-openai")
    chat = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    with serving(THINKING, DONE) as case:
        model = chat.ChatOpenAI(model="m", base_url=case.llm.endpoint, api_key="any", streaming=streamed, temperature=0)
        graph = prebuilt.create_react_agent(model, [weather], prompt="Be brief.")
        result = graph.invoke({"messages": [("user", "Weather in Rome?")]})
        assert result["messages"][-1].content == DONE
        one_sample(case)


@STREAMED
@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
def test_pydantic_ai(streamed: bool, protocol: str) -> None:
    ai = pytest.importorskip("pydantic_ai", reason="pip install 'pydantic-ai-slim[openai,anthropic]'")
    with serving(THINKING, DONE) as case:
        if protocol == "openai":
            from pydantic_ai.models.openai import OpenAIChatModel
            from pydantic_ai.providers.openai import OpenAIProvider

            model: Any = OpenAIChatModel("m", provider=OpenAIProvider(base_url=case.llm.endpoint, api_key="any"))
        else:
            from anthropic import AsyncAnthropic
            from anthropic.types.beta import BetaMessageParam

            if not isinstance(BetaMessageParam, type):
                pytest.skip("this pydantic-ai makes messages as anthropic before 1.0 took them")
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            client = AsyncAnthropic(base_url=case.llm.endpoint.removesuffix("/v1"), api_key="any")
            model = AnthropicModel("claude", provider=AnthropicProvider(anthropic_client=client))
        agent = ai.Agent(model, instructions="Be brief.", tools=[ai.Tool(weather)])

        async def run() -> str:
            async def follow(_: Any, events: Any) -> None:
                async for _ in events:
                    pass

            # with a handler of events the model is asked to stream
            return (await agent.run("Weather in Rome?", event_stream_handler=follow if streamed else None)).output

        assert asyncio.run(run()) == DONE
        one_sample(case)


@STREAMED
def test_smolagents(streamed: bool) -> None:
    smol = pytest.importorskip("smolagents", reason="pip install 'smolagents[openai]'")
    answer = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "sunny"}}\n</tool_call>'
    with serving(CALL, answer) as case:
        model = smol.OpenAIServerModel("m", api_base=case.llm.endpoint, api_key="any")
        agent = smol.ToolCallingAgent(
            tools=[smol.tool(weather)], model=model, verbosity_level=0, stream_outputs=streamed
        )
        assert agent.run("Weather in Rome?") == "sunny"
        # it tells the history as text of its own: a true fork, and what was sampled is trained where it was
        assert len(case.turns) == 2
        trained_once(case.turns, case.segments)


@STREAMED
def test_litellm(streamed: bool) -> None:
    litellm = pytest.importorskip("litellm", reason="pip install litellm")
    from tests.harness.gateway import WEATHER

    with serving(THINKING, DONE) as case:
        how = {"model": "openai/m", "api_base": case.llm.endpoint, "api_key": "any", "tools": [WEATHER]}
        messages: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]

        def ask() -> Any:
            answer = litellm.completion(messages=messages, stream=streamed, **how)
            return litellm.stream_chunk_builder(list(answer)) if streamed else answer

        said = ask().choices[0].message
        messages.append(said.model_dump())
        messages.append({"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": weather("Rome")})
        assert ask().choices[0].message.content == DONE
        one_sample(case)


@STREAMED
def test_autogen(streamed: bool) -> None:
    chat = pytest.importorskip("autogen_agentchat.agents", reason="pip install autogen-agentchat 'autogen-ext[openai]'")
    models = pytest.importorskip("autogen_ext.models.openai", reason="pip install 'autogen-ext[openai]'")
    family = {"family": "unknown", "vision": False, "function_calling": True, "json_output": False}
    with serving(THINKING, DONE) as case:
        info = {**family, "structured_output": False}
        client = models.OpenAIChatCompletionClient(
            model="m", base_url=case.llm.endpoint, api_key="any", model_info=info
        )
        agent = chat.AssistantAgent(
            "a", model_client=client, tools=[weather], reflect_on_tool_use=True, model_client_stream=streamed
        )
        result = asyncio.run(agent.run(task="Weather in Rome?"))
        assert result.messages[-1].content == DONE
        assert len(case.turns) == 2  # the last call comes without tools: another prompt, a true fork
        trained_once(case.turns, case.segments)


def test_strands() -> None:
    strands = pytest.importorskip("strands", reason="pip install 'strands-agents[openai]'")
    models = pytest.importorskip("strands.models.openai", reason="pip install 'strands-agents[openai]'")

    with serving(THINKING, DONE) as case:
        model = models.OpenAIModel(client_args={"base_url": case.llm.endpoint, "api_key": "any"}, model_id="m")
        agent = strands.Agent(model=model, tools=[strands.tool(weather)], callback_handler=None)
        assert DONE in str(agent("Weather in Rome?"))
        one_sample(case)
