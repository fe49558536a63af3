"""The clients and frameworks that agents are written with, against the gateway: two turns with a tool each, streamed
and not. Every turn after the first holds the tokens of the one before: one Sample, nothing re-tokenized.

    pip install "agl-slime[clients]" && pytest -m clients
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.protocols import STREAMED, user
from tests.harness.gateway import CALL, WEATHER, calling, one_sample, serving, trained_once

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


def openai_agents(url: str, streamed: bool, model: str) -> Any:
    from openai import AsyncOpenAI

    import agents

    if not hasattr(agents, "Runner"):
        pytest.skip("agents is this repository's directory of that name, not OpenAI's Agents SDK")
    agents.set_tracing_disabled(True)

    async def run() -> str:
        chosen = getattr(agents, model)(model="m", openai_client=AsyncOpenAI(base_url=url, api_key="any"))
        tools = [agents.function_tool(weather)]
        agent = agents.Agent(name="a", instructions="Be brief.", model=chosen, tools=tools)
        if not streamed:
            return (await agents.Runner.run(agent, QUESTION)).final_output
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def langgraph(url: str, streamed: bool) -> Any:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="m", base_url=url, api_key="any", streaming=streamed, temperature=0)
    graph = create_react_agent(model, [weather], prompt="Be brief.")
    return graph.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content


def pydantic_ai(url: str, streamed: bool) -> Any:
    from pydantic_ai import Agent, Tool
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key="any"))
    agent = Agent(model, instructions="Be brief.", tools=[Tool(weather)])

    async def follow(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    # with a handler of events the model is asked to stream
    return asyncio.run(agent.run(QUESTION, event_stream_handler=follow if streamed else None)).output


def smolagents(url: str, streamed: bool) -> Any:
    import smolagents as smol

    model = smol.OpenAIServerModel("m", api_base=url, api_key="any")
    options = {"verbosity_level": 0, "stream_outputs": streamed}
    return smol.ToolCallingAgent(tools=[smol.tool(weather)], model=model, **options).run(QUESTION)


def litellm(url: str, streamed: bool) -> Any:
    import litellm

    request = {"model": "openai/m", "api_base": url, "api_key": "any", "tools": [WEATHER], "stream": streamed}
    messages: list[Any] = [user(QUESTION)]

    def ask() -> Any:
        answer = litellm.completion(messages=messages, **request)
        return (litellm.stream_chunk_builder(list(answer)) if streamed else answer).choices[0].message

    message = ask()
    messages.append(message.model_dump())
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": weather("Rome")})
    return ask().content


def autogen(url: str, streamed: bool) -> Any:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = {"family": "unknown", "vision": False, "function_calling": True, "json_output": False}
    info["structured_output"] = False
    client = OpenAIChatCompletionClient(model="m", base_url=url, api_key="any", model_info=info)
    options: Any = {"reflect_on_tool_use": True, "model_client_stream": streamed}
    agent = AssistantAgent("a", model_client=client, tools=[weather], **options)
    return asyncio.run(agent.run(task=QUESTION)).messages[-1].content


def strands(url: str, streamed: bool) -> Any:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": url, "api_key": "any"}, model_id="m")
    return str(Agent(model=model, tools=[tool(weather)], callback_handler=None)(QUESTION)).strip()


# by the required package: its program, and arguments
FRAMEWORKS = {
    "openai-agents, chat": (openai_agents, "OpenAIChatCompletionsModel"),
    "openai-agents, responses": (openai_agents, "OpenAIResponsesModel"),
    **{program.__name__: (program,) for program in (langgraph, pydantic_ai, smolagents, litellm, autogen, strands)},
}
# smolagents writes the history in its own words, AutoGen's last call comes without tools: a true fork, and each answer
# is trained where it was sampled
FORKS = {"smolagents": (CALL, calling("final_answer", answer=DONE)), "autogen": (THINKING, DONE)}


@STREAMED
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_clients_of_frameworks(streamed: bool, name: str) -> None:
    program, *arguments = FRAMEWORKS[name]
    with serving(*FORKS.get(name, (THINKING, DONE))) as case:
        try:
            assert program(case.llm.endpoint, streamed, *arguments) == DONE
        except ImportError as error:
            pytest.skip(f"{error}: pip install --no-deps -r tests/clients.txt")
        if name in FORKS:
            assert len(case.turns) == 2
            trained_once(case.turns, case.segments)
        else:
            one_sample(case)
            assert "sunny in Rome" in case.tokenizer.decode(case.turns[-1].prompt_ids)
