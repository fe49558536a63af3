"""The clients and frameworks that agents are written with, against the gateway: two turns with a tool each, streamed
and not. Every turn after the first holds the tokens of the one before: one Sample, nothing re-tokenized. Tools that
clients declare by type, and conversations that they leave to a server.

    pip install "agl-slime[clients]" && pytest -m clients
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agl_slime.tokens.forks import ForkReason
from tests.gateway.protocols import STREAMED, anthropic_client, user
from tests.harness.gateway import CALL, WEATHER, Case, calling, one_sample, prompts, serving, trained_once

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


# -- OpenAI's Agents SDK ----------------------------------------------------------------------------------------------


def agents_sdk() -> Any:
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    if not hasattr(agents, "Runner"):
        pytest.skip("agents is this repository's directory of that name, not OpenAI's Agents SDK")
    agents.set_tracing_disabled(True)
    return agents


def async_client(case: Case) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=case.llm.endpoint, api_key="any")


def run_agent(
    case: Case, tools: list[Any], *questions: str, streamed: bool, model: str = "OpenAIResponsesModel", **options: Any
) -> str:
    """The last answer of an agent of the Agents SDK."""
    agents = agents_sdk()

    async def run() -> str:
        chosen = getattr(agents, model)(model="m", openai_client=async_client(case))
        agent = agents.Agent(name="a", instructions="Be brief.", model=chosen, tools=tools)
        output = ""
        for question in questions:
            if streamed:
                result = agents.Runner.run_streamed(agent, question, **options)
                async for _event in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, question, **options)
            output = result.final_output
        return output

    return asyncio.run(run())


@STREAMED
@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(streamed: bool, model: str) -> None:
    with serving(THINKING, DONE) as case:
        tools = [agents_sdk().function_tool(weather)]
        assert run_agent(case, tools, QUESTION, streamed=streamed, model=model) == DONE
        one_sample_with_result(case)


SHELL: dict[str, Any] = {"commands": ["ls", "pwd"], "timeout_ms": 500}
LOCAL: dict[str, Any] = {"command": ["ls"], "working_directory": "/tmp"}
PATCH: dict[str, Any] = {"type": "update_file", "path": "a.txt", "diff": "@@\n-x\n+y"}


@STREAMED
@pytest.mark.parametrize("kind", ["shell", "local_shell", "apply_patch"])
def test_agents_sdk_runs_its_own_tools(kind: str, streamed: bool) -> None:
    agents, ran = agents_sdk(), []

    async def shell(request: Any) -> str:
        ran.append(request.data.action.commands)
        return "a.txt"

    def local(request: Any) -> str:
        action = request.data.action
        ran.append((action.command, action.env, action.working_directory))
        return "a.txt"

    class Editor:
        def _edit(self, operation: Any) -> str:
            ran.append((operation.type, operation.path, operation.diff))
            return "patched"

        create_file = update_file = delete_file = _edit

    tool, arguments, call, output = {
        "shell": (lambda: agents.ShellTool(executor=shell), SHELL, SHELL["commands"], "a.txt"),
        "local_shell": (lambda: agents.LocalShellTool(executor=local), LOCAL, (LOCAL["command"], {}, "/tmp"), "a.txt"),
        "apply_patch": (lambda: agents.ApplyPatchTool(editor=Editor()), PATCH, (*PATCH.values(),), "patched<|im_end|>"),
    }[kind]
    with serving(calling(kind, **arguments), "Done.") as case:
        assert run_agent(case, [tool()], "Go.", streamed=streamed) == "Done."
        assert ran == [call]
        assert output in prompts(case)[1].partition("<|im_start|>tool\n")[2]
        one_sample(case)


@pytest.mark.parametrize("mode", ["previous_response_id", "input"])
def test_agents_sdk_compacts_its_session_by_the_server(mode: Any) -> None:
    agents = agents_sdk()
    with serving("One.", "So far, one.", "Two.") as case:
        session = agents.OpenAIResponsesCompactionSession(
            session_id="s",
            underlying_session=agents.SQLiteSession("s"),
            client=async_client(case),
            compaction_mode=mode,
            should_trigger_compaction=lambda context: len(context["compaction_candidate_items"]) == 1,
        )
        assert run_agent(case, [], "Go.", "Go.", streamed=False, session=session) == "Two."
        assert "So far, one." in prompts(case)[2]
        assert "One.<|im_end|>" not in prompts(case)[2]
        assert case.turns[2].fork is ForkReason.COMPACTION
        trained_once(case.turns, case.segments)


@STREAMED
def test_agents_sdk_leaves_its_conversation_to_the_server(streamed: bool) -> None:
    tools = [agents_sdk().function_tool(weather)]
    with serving(CALL, "Sunny.", "Bye.") as case:
        conversation = asyncio.run(async_client(case).conversations.create()).id
        options = {"streamed": streamed, "conversation_id": conversation}
        assert run_agent(case, tools, "Weather?", "Thanks.", **options) == "Bye."
        one_sample(case, 3)


# -- other clients ----------------------------------------------------------------------------------------------------


@STREAMED
def test_anthropics_tool_runner_keeps_its_memory(streamed: bool) -> None:
    tools = pytest.importorskip("anthropic.lib.tools", reason="pip install 'anthropic>=0.70'")
    done: list[Any] = []

    class Memory(tools.BetaAbstractMemoryTool):
        def _run(self, command: Any) -> str:
            done.append((command.command, command.path))
            return "a.txt"

        view = create = str_replace = insert = delete = rename = clear_all_memory = _run

    with serving(calling("memory", command="view", path="/memories"), "Done.") as case:
        request: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": [user("Go.")]}
        runner = anthropic_client(case).beta.messages.tool_runner(tools=[Memory()], stream=streamed, **request)
        if streamed:
            for stream in runner:
                last = stream.get_final_message()
        else:
            last = runner.until_done()
        assert last.content[0].text == "Done."
        assert done == [("view", "/memories")]
        one_sample(case)


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
