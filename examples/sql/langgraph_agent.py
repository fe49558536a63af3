"""LangChain's SQL agent on LangGraph, unchanged, on the same tasks with the same reward."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_community.agent_toolkits import SQLDatabaseToolkit
from langchain_community.utilities import SQLDatabase
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from sql_agent import SmallSqlAgent, SqlAgent, connect, score_query
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool


async def answer(task: dict[str, Any], llm: Any, *, small: bool = False) -> dict[str, float]:
    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)
    engine = create_engine("sqlite://", creator=lambda: connect(task["database"]), poolclass=NullPool)
    tools = SQLDatabaseToolkit(db=SQLDatabase(engine), llm=model).get_tools()
    if small:
        tools = [tool for tool in tools if tool.name == "sql_db_query"]
        tools[0].return_direct = True  # the rollout ends with the query
    system, question = (SmallSqlAgent() if small else SqlAgent()).build_prompt(task)
    agent = create_agent(model, tools, system_prompt=system["content"])
    try:
        state = await agent.ainvoke({"messages": [question]}, {"recursion_limit": 20})
    except GraphRecursionError:  # no answer within ten calls
        return score_query(task, "")
    calls = [call for message in state["messages"] for call in getattr(message, "tool_calls", ())]
    queries = [call["args"].get("query", "") for call in calls if call["name"] == "sql_db_query"]
    return score_query(task, queries[-1] if queries else "")


async def answer_small(task: dict[str, Any], llm: Any) -> dict[str, float]:
    """As ``SmallSqlAgent``: the schema is in the prompt, and the one tool is the query."""
    return await answer(task, llm, small=True)
