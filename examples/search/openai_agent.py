"""OpenAI's Agents SDK, unchanged, on the same tasks with the same tools and reward.

pip install openai-agents
python train.py --agent examples/search/openai_agent.py:answer --tasks … --eval-tasks … --model …
"""

from __future__ import annotations

from typing import Any

from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError  # type: ignore
from openai import AsyncOpenAI
from search_agent import Library, SearchAgent, SmallSearchAgent, score_answer

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled  # type: ignore

set_tracing_disabled(True)  # else traces are sent to OpenAI
client = AsyncOpenAI(base_url="http://unset", api_key="unset")  # one for all rollouts


async def answer(task: dict[str, Any], llm: Any, *, like: type[SearchAgent] = SearchAgent) -> dict[str, float]:
    library = Library(task["index"], like.page_chars)
    model = OpenAIChatCompletionsModel(llm.model, client.with_options(base_url=llm.endpoint, api_key=llm.api_key))
    tools: list[Any] = [function_tool(library.search), function_tool(library.open)]
    agent = Agent(name="searcher", instructions=like.system, tools=tools, model=model)
    try:
        result = await Runner.run(agent, task["question"], max_turns=like.max_turns)
    except (MaxTurnsExceeded, ModelBehaviorError):  # no answer, or a call of a tool that does not exist
        return score_answer(task, "", library.opened)
    return score_answer(task, str(result.final_output), library.opened)


async def answer_small(task: dict[str, Any], llm: Any) -> dict[str, float]:
    """As ``SmallSearchAgent``: three turns, and pages of 160 characters."""
    return await answer(task, llm, like=SmallSearchAgent)
