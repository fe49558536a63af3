"""Tools that clients declare by type, and what clients leave to a server, with the clients' own packages: two turns
each, streamed and not, one Sample.

    pip install "agl-slime[clients]" && pytest -m clients
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agl_slime.tokens.forks import ForkReason
from tests.harness.gateway import CALL, Case, calling, one_sample, prompts, serving, trained_once

pytestmark = pytest.mark.clients
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def agents_sdk() -> Any:
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    if not hasattr(agents, "Runner"):
        pytest.skip("agents is this repository's directory of that name, not OpenAI's Agents SDK")
    agents.set_tracing_disabled(True)
    return agents


async def run(case: Case, tools: list[Any], *, streamed: bool = False, session: Any = None, asks: int = 1) -> str:
    """What an agent of the Agents SDK says at last."""
    from openai import AsyncOpenAI

    agents = agents_sdk()
    model = agents.OpenAIResponsesModel(model="m", openai_client=AsyncOpenAI(base_url=case.llm.endpoint, api_key="x"))
    agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=tools)
    said = ""
    for _ in range(asks):
        if not streamed:
            said = (await agents.Runner.run(agent, "Go.", session=session)).final_output
            continue
        result = agents.Runner.run_streamed(agent, "Go.", session=session)
        async for _event in result.stream_events():
            pass
        said = result.final_output
    return said


class Editor:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []

    def _did(self, operation: Any) -> str:
        self.asked.append((operation.type, operation.path, operation.diff))
        return "patched"

    create_file = update_file = delete_file = _did


SHELL: dict[str, Any] = {"commands": ["ls", "pwd"], "timeout_ms": 500}
LOCAL: dict[str, Any] = {"command": ["ls"], "working_directory": "/tmp"}
PATCH: dict[str, Any] = {"type": "update_file", "path": "a.txt", "diff": "@@\n-x\n+y"}


@STREAMED
@pytest.mark.parametrize("kind", ["shell", "local_shell", "apply_patch"])
def test_agents_sdk_runs_its_own_tools(kind: str, streamed: bool) -> None:
    agents, ran, editor = agents_sdk(), [], Editor()

    async def shell(request: Any) -> str:
        ran.append(request.data.action.commands)
        return "a.txt"

    def local(request: Any) -> str:
        ran.append((request.data.action.command, request.data.action.env, request.data.action.working_directory))
        return "a.txt"

    arguments = {"shell": SHELL, "local_shell": LOCAL, "apply_patch": PATCH}[kind]
    with serving(calling(kind, **arguments), "Done.") as case:
        tool = {
            "shell": lambda: agents.ShellTool(executor=shell),
            "local_shell": lambda: agents.LocalShellTool(executor=local),
            "apply_patch": lambda: agents.ApplyPatchTool(editor=editor),
        }[kind]()
        assert asyncio.run(run(case, [tool], streamed=streamed)) == "Done."
        result = prompts(case)[1].partition("<|im_start|>tool\n")[2]
        if kind == "apply_patch":
            assert editor.asked == [(PATCH["type"], PATCH["path"], PATCH["diff"])]
            assert result.startswith("completed\npatched<|im_end|>")
        else:
            assert ran == [SHELL["commands"] if kind == "shell" else (LOCAL["command"], {}, "/tmp")]
            assert "a.txt" in result
        one_sample(case)


@pytest.mark.parametrize("mode", ["previous_response_id", "input"])
def test_agents_sdk_compacts_its_session_by_the_server(mode: Any) -> None:
    agents = agents_sdk()
    from openai import AsyncOpenAI

    with serving("One.", "So far, one.", "Two.") as case:
        session = agents.OpenAIResponsesCompactionSession(
            session_id="s",
            underlying_session=agents.SQLiteSession("s"),
            client=AsyncOpenAI(base_url=case.llm.endpoint, api_key="x"),
            compaction_mode=mode,
            should_trigger_compaction=lambda context: len(context["compaction_candidate_items"]) == 1,
        )
        assert asyncio.run(run(case, [], session=session, asks=2)) == "Two."
        assert "So far, one." in prompts(case)[2]
        assert "One.<|im_end|>" not in prompts(case)[2]
        assert case.turns[2].fork is ForkReason.COMPACTION
        trained_once(case.turns, case.segments)


@STREAMED
def test_agents_sdk_leaves_its_conversation_to_the_server(streamed: bool) -> None:
    agents = agents_sdk()
    from openai import AsyncOpenAI

    def weather(city: str) -> str:
        """How the weather is."""
        return f"sunny in {city}"

    with serving(CALL, "Sunny.", "Bye.") as case:
        client = AsyncOpenAI(base_url=case.llm.endpoint, api_key="x")
        model = agents.OpenAIResponsesModel(model="m", openai_client=client)
        agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(weather)])

        async def go() -> str:
            made = (await client.conversations.create()).id
            said = ""
            for asked in ("Weather?", "Thanks."):
                if streamed:
                    result = agents.Runner.run_streamed(agent, asked, conversation_id=made)
                    async for _event in result.stream_events():
                        pass
                else:
                    result = await agents.Runner.run(agent, asked, conversation_id=made)
                said = result.final_output
            return said

        assert asyncio.run(go()) == "Bye."
        one_sample(case, 3)


@STREAMED
def test_anthropics_tool_runner_keeps_its_memory(streamed: bool) -> None:
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    tools = pytest.importorskip("anthropic.lib.tools", reason="pip install 'anthropic>=0.70'")
    done: list[Any] = []

    class Memory(tools.BetaAbstractMemoryTool):
        def _did(self, command: Any) -> str:
            done.append((command.command, command.path))
            return "a.txt"

        view = create = str_replace = insert = delete = rename = clear_all_memory = _did

    with serving(calling("memory", command="view", path="/memories"), "Done.") as case:
        client = anthropic.Anthropic(base_url=case.llm.endpoint.removesuffix("/v1"), api_key="any", max_retries=0)
        how: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "Go."}]}
        runner = client.beta.messages.tool_runner(tools=[Memory()], stream=streamed, **how)
        if streamed:
            for stream in runner:
                last = stream.get_final_message()
        else:
            last = runner.until_done()
        assert last.content[0].text == "Done."
        assert done == [("view", "/memories")]
        one_sample(case)
