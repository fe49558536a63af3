"""Clients, agents and frameworks against the gateway: a question and a tool each, in this process or as a program,
streamed and not. Samples are trained once, and the second turn continues the tokens of the first.

    pip install --no-deps -r tests/clients.txt && pytest -m clients tests/gateway/test_clients.py

npm's are installed into a temporary directory, unless AGL_SLIME_NPM_CLIENTS names one where
tests/programs/clients/package.json is installed.
"""

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.protocols import STREAMED, user
from tests.harness.chat_templates import SYSTEM_FIRST
from tests.harness.gateway import CALL, WEATHER, Case, calling, one_sample, serving, trained_once

pytestmark = pytest.mark.clients

HERE = Path(__file__).parents[1] / "programs" / "clients"
DONE = "It is sunny in Rome."
TWO_TURNS = (f"<think>\nRome, so.\n</think>\n\nLet me see.\n{CALL}", DONE)
OBJECT = '{"city": "Rome"}'
FIELD = f"[[ ## answer ## ]]\n{DONE}\n\n[[ ## completed ## ]]"
INSTRUCTED = calling("Weather", city="Rome")

# by program of clients.py: the required module, and the answers of the model
PYTHON: dict[str, tuple[str, tuple[str, ...]]] = {
    "anthropic_runner": ("anthropic", TWO_TURNS),
    "anthropic_runner streamed": ("anthropic", TWO_TURNS),
    "instructor_client TOOLS": ("instructor", (INSTRUCTED,)),
    "instructor_client JSON": ("instructor", (OBJECT,)),
    "instructor_client JSON_SCHEMA": ("instructor", (OBJECT,)),
    "langchain langchain_anthropic": ("langchain_anthropic", TWO_TURNS),
    "langchain langchain_openai": ("langchain_openai", TWO_TURNS),
    "dspy": ("dspy", (FIELD,)),
    "llm_chat": ("llm", TWO_TURNS),
    "openai_stream_helper": ("openai", TWO_TURNS),
    **{name: (name, TWO_TURNS) for name in ["haystack", "agno", "llama_index", "aisuite", "qwen_agent", "mirascope"]},
}
NPM = """
    ai-openai ai-openai-streamed ai-openai-chat ai-openai-chat-streamed ai-compatible ai-anthropic
    ai-anthropic-streamed anthropic-runner anthropic-runner-streamed openai-run-tools openai-agents langchain-openai
    langchain-anthropic
"""


def answer_of(command: list[str], case: Case, home: Path, **settings: str) -> str:
    """The output of a program, which sees none of this environment's settings."""
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "BASE_URL": case.llm.endpoint, **settings}
    run = subprocess.run(
        command, cwd=home, env=env, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def one_unrefused_sample(case: Case, turns: int = 2) -> None:
    one_sample(case, turns)
    assert not [name for name in case.attempt.counts if name.startswith("refused")]


@pytest.mark.parametrize("name", PYTHON)
def test_clients_of_python(name: str, tmp_path: Path) -> None:
    module, says = PYTHON[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install --no-deps -r tests/clients.txt")
    with serving(*says, context_length=10**6) as case:
        answer = answer_of([sys.executable, str(HERE / "clients.py"), *name.split()], case, tmp_path)
        assert "Rome" in answer
        one_unrefused_sample(case, len(says))


@pytest.fixture(scope="session")
def npm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the packages of npm."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed; with them npm's clients are run")
    if directory := os.environ.get("AGL_SLIME_NPM_CLIENTS"):
        return Path(directory)
    directory = tmp_path_factory.mktemp("npm")
    shutil.copy(HERE / "package.json", directory)
    command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error"]
    installed = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=500, check=False)
    if installed.returncode:
        pytest.skip(f"npm could not install the clients: {installed.stderr[-200:]}")
    return directory


@pytest.mark.parametrize("name", NPM.split())
def test_clients_of_npm(name: str, npm: Path, tmp_path: Path) -> None:
    program = tmp_path / "clients.mjs"
    shutil.copy(HERE / "clients.mjs", program)
    (tmp_path / "node_modules").symlink_to(npm / "node_modules")
    with serving(*TWO_TURNS, context_length=10**6) as case:
        assert DONE in answer_of(["node", str(program), name], case, tmp_path)
        one_unrefused_sample(case)


def xml_call(name: str, **arguments: str) -> str:
    fields = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{fields}</function>\n</tool_call>"


def claude_code(npm: Path, url: str) -> tuple[list[str], dict[str, str]]:
    """The command and its settings."""
    builds = [*(npm / "node_modules" / "@anthropic-ai").glob("claude-code-*/claude")]
    if not builds:
        pytest.skip("there is no build of Claude Code for this machine")
    settings = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "ANTHROPIC_API_KEY": "any"}
    settings["ANTHROPIC_BASE_URL"] = url.removesuffix("/v1")
    command = [str(builds[0]), "-p", "Weather in Rome?", "--model", "claude-sonnet-4-5", "--allowedTools", "Bash"]
    return command, settings


def codex(npm: Path, url: str) -> tuple[list[str], dict[str, str]]:
    provider = f'{{name="agl",base_url="{url}",wire_api="responses",env_key="OPENAI_API_KEY"}}'
    command = ["node", str(npm / "node_modules/@openai/codex/bin/codex.js"), "exec", "-m", "m"]
    command += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-c", "model_provider=agl"]
    return [*command, "-c", f"model_providers.agl={provider}", "Weather in Rome?"], {"OPENAI_API_KEY": "any"}


CALLS = {
    claude_code: xml_call("Bash", command="echo sunny in Rome", description="Look."),
    codex: xml_call("exec_command", cmd="echo sunny in Rome"),
}


@pytest.mark.parametrize("program", CALLS)
def test_terminal_agents_on_a_template_with_its_system_first(npm: Path, tmp_path: Path, program: Any) -> None:
    with serving(CALLS[program], DONE, template=SYSTEM_FIRST, context_length=10**6) as case:
        command, settings = program(npm, case.llm.endpoint)
        assert DONE in answer_of(command, case, tmp_path, **settings)
        one_unrefused_sample(case)
        first, second = case.turns
        assert "sunny in Rome" in case.tokenizer.decode(second.prompt_ids[first.length :])


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
FORKS = {"smolagents": (CALL, calling("final_answer", answer=DONE)), "autogen": TWO_TURNS}


@STREAMED
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_clients_of_frameworks(streamed: bool, name: str) -> None:
    program, *arguments = FRAMEWORKS[name]
    with serving(*FORKS.get(name, TWO_TURNS)) as case:
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
