"""Demonstrations for agents of other frameworks: Samples of the warm-up, and answers for a scripted engine."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agl_slime import SGLangLitAgent
from agl_slime.tools.warm_up.recorded import read_conversations
from agl_slime.types import Sample
from tests.harness.tokenizers import small_tokenizer

TEMPLATE = (Path(__file__).parents[2] / "examples" / "tools.jinja").read_text()


def warm_up_sample(row: Mapping[str, Any], directory: Path) -> tuple[Any, Sample]:
    """The tokenizer with the recipes' template, and the demonstration as a Sample."""
    tokenizer = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(directory)
    ((sample,),) = asyncio.run(read_conversations([row], agent=SGLangLitAgent(), model=str(directory)))
    return tokenizer, sample


def answers(row: Mapping[str, Any]) -> list[str]:
    """The model's answers in a demonstration."""
    calls = [message.get("tool_calls") for message in row["messages"] if message["role"] == "assistant"]
    texts = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    return [text if call is None else _written(call[0]["function"]) for call, text in zip(calls, texts, strict=True)]


def _written(function: Mapping[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': function['name'], 'arguments': function['arguments']})}</tool_call>"
