"""Programs of Python's clients, one question and one tool each: python clients.py FUNCTION [ARGUMENT]. The gateway's
address is BASE_URL. They run in another process, which may have another environment than the package."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib import import_module
from typing import Any

BASE_URL = os.environ["BASE_URL"]
ROOT = BASE_URL.removesuffix("/v1")
QUESTION = "Weather in Rome?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "How the weather is.", "parameters": SCHEMA}}
os.environ |= {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": BASE_URL, "ANTHROPIC_API_KEY": "any"}


def weather(city: str) -> str:
    """How the weather is.

    Args:
        city: Where.
    """
    return f"sunny in {city}"


def anthropic_runner(stream: str = "") -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=ROOT, api_key="any", max_retries=0)
    runner = client.beta.messages.tool_runner(
        model="m",
        max_tokens=200,
        tools=[anthropic.beta_tool(weather)],
        messages=[{"role": "user", "content": QUESTION}],
        stream=bool(stream),
    )
    if stream:
        for part in runner:
            last: Any = part.get_final_message()
    else:
        last = runner.until_done()
    return "".join(block.text for block in last.content if block.type == "text")


def instructor_client(mode: str) -> str:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    client = instructor.from_openai(OpenAI(base_url=BASE_URL, max_retries=0), mode=instructor.Mode[mode])
    return client.chat.completions.create(
        model="m", response_model=Weather, messages=[{"role": "user", "content": QUESTION}], max_retries=0
    ).city


def langchain(package: str) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage

    name, options = {
        "langchain_anthropic": ("ChatAnthropic", {"model": "claude-sonnet-4-5", "base_url": ROOT}),
        "langchain_openai": ("ChatOpenAI", {"model": "m", "use_responses_api": True}),
    }[package]
    model = getattr(import_module(package), name)(**options, max_retries=0)
    bound, messages = model.bind_tools([weather]), [HumanMessage(QUESTION)]
    while True:
        messages.append(answer := bound.invoke(messages))
        if not answer.tool_calls:
            return answer.text if isinstance(answer.text, str) else answer.text()
        messages += [ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]


def dspy() -> str:
    import dspy

    model = dspy.LM("openai/m", api_base=BASE_URL, api_key="any", cache=False, num_retries=0)
    dspy.configure(lm=model, adapter=dspy.ChatAdapter())
    return dspy.Predict("question -> answer")(question=QUESTION).answer


def haystack() -> str:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool

    tool = Tool(name="weather", description="How.", parameters=SCHEMA, function=weather)
    agent = Agent(chat_generator=OpenAIChatGenerator(model="m", api_base_url=BASE_URL, max_retries=0), tools=[tool])
    return agent.run(messages=[ChatMessage.from_user(QUESTION)])["messages"][-1].text


def agno() -> str:
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    return Agent(model=OpenAILike(id="m", base_url=BASE_URL, api_key="any"), tools=[weather]).run(QUESTION).content


def llama_index() -> str:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model="m", api_base=BASE_URL, api_key="any", is_chat_model=True, is_function_calling_model=True, max_retries=0
    )

    async def run() -> str:
        return str(await FunctionAgent(tools=[weather], llm=llm, system_prompt="Be brief.").run(QUESTION))

    return asyncio.run(run())


def aisuite() -> str:
    import aisuite

    client = aisuite.Client({"openai": {"base_url": BASE_URL, "api_key": "any"}})
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model="openai:m", messages=messages, tools=[weather], max_turns=3)
    return answer.choices[0].message.content


def llm_chat() -> str:
    from llm.default_plugins.openai_models import Chat

    model = Chat("m", model_name="m", api_base=BASE_URL, supports_tools=True)
    model.key = "any"
    return model.chain(QUESTION, tools=[weather], stream=False, key="any").text()


def qwen_agent() -> str:
    from qwen_agent.agents import Assistant
    from qwen_agent.tools.base import BaseTool, register_tool

    @register_tool("weather")
    class Weather(BaseTool):
        description = "How."
        parameters = SCHEMA

        def call(self, params: Any, **_: Any) -> str:
            return weather(**self._verify_json_format_args(params))

    bot = Assistant(llm={"model": "m", "model_server": BASE_URL, "api_key": "any"}, function_list=["weather"])
    return bot.run_nonstream(messages=[{"role": "user", "content": QUESTION}])[-1]["content"]


def mirascope() -> str:
    from mirascope import llm

    llm.register_provider("openai:completions", scope="openai/", base_url=BASE_URL, api_key="any")

    @llm.tool
    def weather(city: str) -> str:
        """How the weather is."""
        return f"sunny in {city}"

    @llm.call("openai/m:completions", tools=[weather])
    def ask() -> str:
        return QUESTION

    answer = ask()
    while answer.tool_calls:
        answer = answer.resume(answer.execute_tools())
    return answer.text()


def openai_stream_helper() -> str:
    from openai import OpenAI

    client = OpenAI(base_url=BASE_URL, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        with client.chat.completions.stream(model="m", messages=messages, tools=[TOOL]) as stream:
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    print(globals()[sys.argv[1]](*sys.argv[2:]))
