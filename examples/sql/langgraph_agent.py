"""LangChain's SQL agent on LangGraph, unchanged, on the same tasks with the same reward.

pip install langchain langchain-community langchain-openai
python train.py --agent examples/sql/langgraph_agent.py:answer --tasks … --eval-tasks … --model …
"""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_community.agent_toolkits import SQLDatabaseToolkit
from langchain_community.utilities import SQLDatabase
from langchain_openai import ChatOpenAI
from sql_agent import connect, score_query
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool


async def answer(task: dict[str, Any], llm: Any) -> dict[str, float]:
    model = ChatOpenAI(model=llm.model, base_url=llm.endpoint, api_key=llm.api_key)
    engine = create_engine("sqlite://", creator=lambda: connect(task["database"]), poolclass=NullPool)
    tools = SQLDatabaseToolkit(db=SQLDatabase(engine), llm=model).get_tools()
    agent = create_agent(model, tools, system_prompt="Answer the question with the tools.")
    state = await agent.ainvoke({"messages": [("user", task["question"])]}, {"recursion_limit": 20})
    calls = [call for message in state["messages"] for call in getattr(message, "tool_calls", ())]
    queries = [call["args"].get("query", "") for call in calls if call["name"] == "sql_db_query"]
    return score_query(task, queries[-1] if queries else "")
