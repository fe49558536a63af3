"""Agent Lightning's own example agents at v0.3.0, their files untouched, through runner, gateway and converter.

    git clone --branch v0.3.0 https://github.com/microsoft/agent-lightning DIR
    pip install "agl-slime[clients]" pandas sympy langchain-community sqlparse termcolor mcp mcp-server-calculator
    AGL_EXAMPLES=DIR/examples pytest -m clients tests/integration/test_gateway_examples.py

What they need beside their files: ``uvx`` (here a script that starts the calculator's module), ``datasets`` and ``trl``
importable for ``math_agent.py`` (which uses neither in its agent), a retriever at port 8099 for ``rag_agent.py``, a
database for ``sql_agent.py``, any ``AZURE_OPENAI_API_KEY`` for ``capital_agent.py``, one rollout at a time for
``room_selector.py``, which reads the environment only.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agl_slime.gateway.settings import GatewaySettings
from agl_slime.trace.converter import Conversion
from agl_slime.trace.segments import merge_turns
from agl_slime.trace.span_codec import decode_turns
from agl_slime.trace.turn import Turn
from tests.faults.scripted_engine import ScriptedEngine, in_thread
from tests.gateway_cases import TEMPLATE, talking, trained_once
from tests.integration.rollouts import run_rollouts
from tests.trace_tokenizers import small_tokenizer

EXAMPLES = Path(os.environ.get("AGL_EXAMPLES", "/nonexistent"))
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="AGL_EXAMPLES must name Agent Lightning's examples at v0.3.0"),
]


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Imports ``room/file`` of the examples as its own command line would."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    uvx = bin_dir / "uvx"
    uvx.write_text(f'#!/bin/sh\nexec {sys.executable} -m "$(echo "$1" | tr - _)"\n')
    uvx.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "any")
    for name, members in {"datasets": ("load_dataset",), "trl": ("SFTConfig", "SFTTrainer")}.items():
        stub = types.ModuleType(name)
        for member in members:
            setattr(stub, member, None)
        monkeypatch.setitem(sys.modules, name, stub)

    def load(room: str, module: str) -> Any:
        monkeypatch.syspath_prepend(str(EXAMPLES / room))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return importlib.import_module(module)

    return load


@contextmanager
def speaking(tmp_path: Path, *says: str) -> Iterator[tuple[str, str, Any]]:
    """An engine that says these, the directory of its model, its tokenizer."""
    tokenizer = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    engine = ScriptedEngine(
        vocab_size=len(tokenizer),
        context_length=100_000,
        eos_id=tokenizer.eos_token_id,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        next_id=talking(tokenizer, says),
    )
    with in_thread(engine):
        yield engine.url, str(tmp_path / "model"), tokenizer


async def roll(agent: Any, task: Any, tmp_path: Path, *says: str, **how: Any) -> tuple[Conversion, list[Turn]]:
    with speaking(tmp_path, *says) as (url, model, tokenizer):
        sampling = {"temperature": 1.0, "max_new_tokens": 512}
        [done] = await run_rollouts(agent, [task], endpoint=url, model=model, **how, **sampling)
    assert done.status == "succeeded", done.failure
    conversion = done.convert(tokenizer)
    turns = decode_turns(done.spans)
    untrained = {n for n, turn in enumerate(turns) if turn.untrained}
    trained_once(turns, merge_turns(turns, untrained=untrained))
    assert all(sample.metadata["token_source"] == "engine" for sample in conversion.samples)
    return conversion, turns


async def test_capital_agent(example: Any, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    agent = example("azure", "capital_agent").capital_agent
    task = {"input": "Capital of Japan?", "output": "Tokyo"}
    says = (call("country_capital_lookup", country="Japan"), "Tokyo.")
    conversion, turns = await roll(agent, task, tmp_path, *says)
    assert conversion.trajectory.reward == 1.0
    assert len(turns) == 2


async def test_room_selector(example: Any, tmp_path: Path) -> None:
    module = example("apo", "room_selector")
    slot = {"date": "2025-10-13", "time": "14:30", "duration_min": 30}
    task = {
        "id": "s02",
        "task_input": {**slot, "attendees": 12, "needs": ["whiteboard"], "accessible_required": True},
        "expected_choice": "Nova",
    }
    says = (
        call("get_rooms_and_availability", **slot),
        "final_choice: Nova",
        '{"reason": "right", "score": 1.0}',
    )
    settings = {"max_concurrent": 1, "gateway": GatewaySettings(untrained_models=("gpt-4.1-mini",))}
    how: Any = {"resources": {"main_prompt": module.prompt_template_baseline()}, "settings": settings}
    conversion, turns = await roll(module.room_selector, task, tmp_path, *says, **how)
    assert conversion.trajectory.reward == 1.0
    assert [turn.untrained for turn in turns] == ["", "", "role:gpt-4.1-mini"]


async def test_calc_agent(example: Any, tmp_path: Path) -> None:
    for needed in ("autogen_agentchat", "sympy", "mcp_server_calculator"):
        pytest.importorskip(needed)
    agent = example("calc_x", "calc_agent").calc_agent
    task = {"id": "1", "question": "What is 12 times 15?", "chain": "", "result": "180", "source": "x"}
    says = (call("calculate", expression="12 * 15"), "### ANSWER: 180 ###")
    conversion, turns = await roll(agent, task, tmp_path, *says)
    assert conversion.trajectory.reward == 1.0
    assert len(turns) == 2


async def test_math_agent(example: Any, tmp_path: Path) -> None:
    for needed in ("agents.mcp", "mcp_server_calculator"):
        pytest.importorskip(needed)
    agent = example("unsloth", "math_agent").math_agent
    says = (call("calculate", expression="2 + 3"), "### 5 ###")
    conversion, turns = await roll(agent, {"input": "2 + 3?", "target": 5.0}, tmp_path, *says)
    assert conversion.trajectory.reward == 1.0
    assert [turn.fork for turn in turns] == [None, None]


async def test_sql_agent(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("langchain_community", "langgraph", "sqlparse", "termcolor"):
        pytest.importorskip(needed)
    folder = tmp_path / "data" / "database" / "pets"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "pets.sqlite") as database:
        database.execute("create table pets (name text)")
        database.execute("insert into pets values ('Rex')")
    monkeypatch.setenv("VERL_SPIDER_DATA_DIR", str(tmp_path / "data"))
    module = example("spider", "sql_agent")
    query = "SELECT count(*) FROM pets"
    task = {"question": "How many pets?", "db_id": "pets", "query": query}
    says = (f"```sqlite\n{query}\n```", "THE QUERY IS CORRECT.")
    conversion, turns = await roll(module.LitSQLAgent(), task, tmp_path, *says)
    assert conversion.trajectory.reward == 1.0
    assert len(turns) == 2


_RETRIEVER = """
import sys
from mcp.server.fastmcp import FastMCP
server = FastMCP("wiki", host="127.0.0.1", port=8099)
@server.tool()
def retrieve(query: str) -> str:
    return "Paris is the capital of France."
server.run(transport="sse")
"""


@pytest.fixture
def retriever() -> Iterator[None]:
    pytest.importorskip("mcp.server.fastmcp")
    process = subprocess.Popen([sys.executable, "-c", _RETRIEVER], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", 8099)) == 0:
                    break
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(10)


async def test_rag_agent(example: Any, tmp_path: Path, retriever: None) -> None:
    pytest.importorskip("agents.extensions.models.litellm_model")
    agent = example("rag", "rag_agent").RAGAgent()
    says = (call("retrieve", query="capital of France"), "<answer>Paris</answer>")
    task = {"question": "What is the capital of France?", "answer": "Paris"}
    conversion, turns = await roll(agent, task, tmp_path, *says)
    assert conversion.trajectory.reward is not None
    assert len(turns) == 2
