"""Agent Lightning's example agents at v0.3.0, their files untouched, through runner, gateway and converter, over an
engine that answers as a good model would.

    git clone --branch v0.3.0 https://github.com/microsoft/agent-lightning DIR
    pip install --no-deps -r tests/clients.txt
    pip install pandas sympy nltk langchain-community sqlparse termcolor mcp-server-calculator
    AGL_EXAMPLES=DIR/examples pytest -m clients tests/gateway/test_examples.py

Their needs beside their files: ``uvx`` (here a script that starts the calculator's module), ``datasets`` and ``trl``
importable for ``math_agent.py`` (which uses neither in its agent), a retriever at port 8099 for ``rag_agent.py``, a
database for ``sql_agent.py``, any ``AZURE_OPENAI_API_KEY`` for ``capital_agent.py``, and one rollout at a time for
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agl_slime.gateway.settings import GatewaySettings
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import decode_turns
from tests.harness.gateway import calling, engine_saying, trained_once
from tests.harness.loop_thread import in_thread
from tests.harness.rollouts import run_rollouts
from tests.harness.tokenizers import small_tokenizer

EXAMPLES = Path(os.environ.get("AGL_EXAMPLES", "/nonexistent"))
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="AGL_EXAMPLES must name Agent Lightning's examples at v0.3.0"),
]
NAMES = ("capital", "room", "calc", "math", "sql", "rag")


@dataclass(kw_only=True)
class Example:
    """An agent, a task with the answers that earn its reward, and its needs."""

    agent: Any
    task: dict[str, Any]
    says: tuple[str, ...]
    reward: float = 1.0
    forks: int = 0  # where an agent leaves out its tools, or begins a new conversation
    settings: dict[str, Any] = field(default_factory=dict)  # of the runner
    resources: dict[str, Any] = field(default_factory=dict)
    judges: tuple[str, ...] = ()


Load = Callable[[str, str], Any]


def capital(load: Load, _: Path) -> Example:
    pytest.importorskip("pandas")
    task = {"input": "Japan's capital please", "output": "Tokyo"}
    says = calling("country_capital_lookup", country="Japan"), "Tokyo"
    return Example(agent=load("azure", "capital_agent").capital_agent, task=task, says=says, forks=1)


def room(load: Load, _: Path) -> Example:
    module = load("apo", "room_selector")
    task = json.loads((EXAMPLES / "apo" / "room_tasks.jsonl").read_text().splitlines()[1])
    slot = {name: task["task_input"][name] for name in ("date", "time", "duration_min")}
    look, choice = calling("get_rooms_and_availability", **slot), f"final_choice: {task['expected_choice']}"
    return Example(
        agent=module.room_selector,
        task=task,
        says=(look, choice, '{"reason": "right", "score": 0.9}'),
        reward=0.9,
        forks=2,
        settings={"max_concurrent": 1},
        resources={"main_prompt": module.prompt_template_baseline()},
        judges=("gpt-4.1-mini",),
    )


def calc(load: Load, _: Path) -> Example:
    for module in ("autogen_agentchat", "sympy", "mcp_server_calculator"):
        pytest.importorskip(module)
    task = {"id": "1", "question": "What is 12 * 15?", "chain": "", "result": "180", "source": "x"}
    says = calling("calculate", expression="12 * 15"), "### ANSWER: 180 ###"
    return Example(agent=load("calc_x", "calc_agent").calc_agent, task=task, says=says, forks=1)


def math(load: Load, _: Path) -> Example:
    for module in ("agents.mcp", "mcp_server_calculator"):
        pytest.importorskip(module)
    task = {"input": "12 * 15?", "target": 180.0}
    says = calling("calculate", expression="12 * 15"), "### 180 ###"
    return Example(agent=load("unsloth", "math_agent").math_agent, task=task, says=says)


def sql(load: Load, tmp_path: Path) -> Example:
    for module in ("langchain_community", "langgraph", "sqlparse", "termcolor"):
        pytest.importorskip(module)
    folder = tmp_path / "data" / "database" / "pets"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "pets.sqlite") as database:
        database.execute("create table pets (name text)")
        database.execute("insert into pets values ('Rex')")
    os.environ["VERL_SPIDER_DATA_DIR"] = str(tmp_path / "data")  # the fixture restores it
    query = "SELECT count(*) FROM pets"
    task = {"question": "How many pets?", "db_id": "pets", "query": query}
    says = f"```sqlite\n{query}\n```", "THE QUERY IS CORRECT."
    return Example(agent=load("spider", "sql_agent").LitSQLAgent(), task=task, says=says, forks=1)


def rag(load: Load, _: Path) -> Example:
    for module in ("agents.extensions.models.litellm_model", "nltk", "mcp.server.fastmcp"):
        pytest.importorskip(module)
    task = {"question": "What is the capital of France?", "answer": "Paris"}
    says = calling("retrieve", query="capital of France"), "<answer>Paris</answer>"
    return Example(agent=load("rag", "rag_agent").RAGAgent(), task=task, says=says)


RETRIEVER = """
from mcp.server.fastmcp import FastMCP
server = FastMCP("wiki", host="127.0.0.1", port=8099)
@server.tool()
def retrieve(query: str) -> str:
    return "Paris is the capital of France, Tokyo the capital of Japan."
server.run(transport="sse")
"""


@contextmanager
def retriever() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", RETRIEVER], stderr=subprocess.DEVNULL)
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


@pytest.fixture
def example(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Example]:
    """The example of that name; its module is imported as its command line imports it."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    uvx = bin_dir / "uvx"
    uvx.write_text(f'#!/bin/sh\nexec {sys.executable} -m "$(echo "$1" | tr - _)"\n')
    uvx.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "any")
    monkeypatch.setenv("VERL_SPIDER_DATA_DIR", "")
    for name, members in {"datasets": ("load_dataset",), "trl": ("SFTConfig", "SFTTrainer")}.items():
        stub = types.ModuleType(name)
        for member in members:
            setattr(stub, member, None)
        monkeypatch.setitem(sys.modules, name, stub)

    def load(directory: str, module: str) -> Any:
        monkeypatch.syspath_prepend(str(EXAMPLES / directory))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return importlib.import_module(module)

    loaded = globals()[request.param](load, tmp_path)
    with retriever() if request.param == "rag" else nullcontext():
        yield loaded


@pytest.mark.parametrize("example", NAMES, indirect=True)
async def test_examples_turns_are_recorded_as_sampled(example: Example, tmp_path: Path) -> None:
    from agl_slime.cli.demo.tokenizer import CHAT_TEMPLATE

    tokenizer = small_tokenizer(CHAT_TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    engine = engine_saying(tokenizer, example.says, context_length=100_000)
    settings = {"gateway": GatewaySettings(untrained_models=example.judges), **example.settings}
    with in_thread(engine):
        model: Any = {"endpoint": engine.url, "model": str(tmp_path / "model"), "resources": example.resources}
        sampling: Any = {"temperature": 1.0, "max_new_tokens": 512}
        [done] = await run_rollouts(example.agent, [example.task], settings=settings, **model, **sampling)
    assert done.status == "succeeded", done.failure
    conversion = done.convert(tokenizer)
    assert conversion.trajectory.reward == example.reward
    assert all(sample.metadata["token_source"] == "engine" for sample in conversion.samples)
    turns = decode_turns(done.spans)
    trained_once(turns, merge_turns(turns, untrained={n for n, turn in enumerate(turns) if turn.untrained}))
    assert [turn.text for turn in turns] == list(example.says)
    assert sum(turn.fork is not None for turn in turns) == example.forks
    assert [turn.untrained for turn in turns if turn.untrained] == [f"role:{model}" for model in example.judges]
