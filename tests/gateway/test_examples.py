r"""Agent Lightning's own example agents at v0.3.0, their files untouched: collecting, through runner, gateway and
converter, from an engine that says what a good model would; and training a tiny policy that was shown those answers.

    git clone --branch v0.3.0 https://github.com/microsoft/agent-lightning DIR
    pip install --no-deps -r tests/clients.txt
    pip install torch pandas sympy nltk langchain-community sqlparse termcolor mcp-server-calculator
    AGL_EXAMPLES=DIR/examples AGL_SLIME_SGLANG_PYTHON=VENV/bin/python \
        pytest -s -m "clients or sglang" tests/gateway/test_examples.py

What they need beside their files: ``uvx`` (here a script that starts the calculator's module), ``datasets`` and ``trl``
importable for ``math_agent.py`` (which uses neither in its agent), a retriever at port 8099 for ``rag_agent.py``, a
database for ``sql_agent.py``, any ``AZURE_OPENAI_API_KEY`` for ``capital_agent.py``, one rollout at a time for
``room_selector.py``, which reads the environment only, and an engine with grammars for its judge.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import re
import socket
import sqlite3
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agl_slime.gateway.settings import GatewaySettings
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import decode_turns
from agl_slime.tokens.turn import Turn
from tests.harness.engine_servers import real_sglang
from tests.harness.gateway import engine_saying, trained_once
from tests.harness.loop_thread import in_thread
from tests.harness.rollouts import run_rollouts
from tests.harness.tokenizers import small_tokenizer

EXAMPLES = Path(os.environ.get("AGL_EXAMPLES", "/nonexistent"))
pytestmark = [
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="AGL_EXAMPLES must name Agent Lightning's examples at v0.3.0"),
]
NAMES = ("capital", "room", "calc", "math", "sql", "rag")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass(kw_only=True)
class Example:
    """An agent, its ``tasks`` each with the answers that earn its reward, ``wrong`` ones, and what it needs."""

    agent: Any
    tasks: list[tuple[dict[str, Any], tuple[str, ...]]]
    wrong: tuple[str, ...]
    needs: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, Any] = field(default_factory=dict)
    judged: list[tuple[dict[str, Any], tuple[str, ...]]] = field(default_factory=list)
    """Rollouts whose judge gives 0: what the model says in them is shown to it as far as it judges."""
    reward: float = 1.0  # of those of ``tasks``
    forks: int = 0  # where an agent leaves out its tools, or asks anew
    per_iteration: int = 4  # prompts
    samples: int = 8  # rollouts per prompt
    iterations: int = 8
    rises: bool = True  # the reward, within so few
    max_new_tokens: int = 64
    warmup: dict[str, Any] = field(default_factory=dict)  # PolicySettings


Load = Callable[[str, str], Any]


def capital(load: Load, _: Path) -> Example:
    pytest.importorskip("pandas")
    capitals = {"Japan": "Tokyo", "France": "Paris", "Canada": "Ottawa", "Kenya": "Nairobi"}
    tasks = [
        (
            {"input": f"{country}'s capital please", "output": city},
            (call("country_capital_lookup", country=country), city),
        )
        for country, city in capitals.items()
    ]
    agent = load("azure", "capital_agent").capital_agent
    return Example(agent=agent, tasks=tasks, wrong=("I do not know.", "Rome"), forks=1)


def room(load: Load, _: Path) -> Example:
    module = load("apo", "room_selector")
    lines = (EXAMPLES / "apo" / "room_tasks.jsonl").read_text().splitlines()
    tasks, judged = [], []
    for task in map(json.loads, lines[1:3]):
        slot = {name: task["task_input"][name] for name in ("date", "time", "duration_min")}
        look, right = call("get_rooms_and_availability", **slot), f"final_choice: {task['expected_choice']}"
        tasks.append((task, (look, right, '{"reason": "right", "score": 0.9}')))
        answers = {"final_choice: Nova", "final_choice: No Room", "final_choice: Orion", "I do not know.", look, ""}
        for wrong in sorted(answers - {right}):
            judged.append((task, (look, wrong, '{"reason": "wrong", "score": 0.0}')))
    needs = {"max_concurrent": 1, "untrained_models": ("gpt-4.1-mini",)}
    resources = {"main_prompt": module.prompt_template_baseline()}
    how: Any = {"needs": needs, "resources": resources, "judged": judged, "forks": 2, "per_iteration": 2}
    # its schema lets the score grow beyond 1 in digits: one that begins with 0 cannot
    how |= {"max_new_tokens": 128, "warmup": {"target": 0.97, "decay_steps": 60}, "reward": 0.9}
    return Example(agent=module.room_selector, tasks=tasks, wrong=("final_choice: Orion", "I do not know."), **how)


SUMS = {"12 * 15": 180, "2 + 3": 5}
# each rollout starts a calculator, a second of CPU; AutoGen gives up on one after 5 s
CALCULATES: dict[str, Any] = {"needs": {"max_concurrent": 4}, "per_iteration": 2, "iterations": 5}


def calc(load: Load, _: Path) -> Example:
    for needed in ("autogen_agentchat", "sympy", "mcp_server_calculator"):
        pytest.importorskip(needed)
    tasks = [
        (
            {"id": "1", "question": f"What is {written}?", "chain": "", "result": str(result), "source": "x"},
            (call("calculate", expression=written), f"### ANSWER: {result} ###"),
        )
        for written, result in SUMS.items()
    ]
    agent = load("calc_x", "calc_agent").calc_agent
    return Example(agent=agent, tasks=tasks, wrong=("### ANSWER: 7 ###", "I do not know."), forks=1, **CALCULATES)


def math(load: Load, _: Path) -> Example:
    for needed in ("agents.mcp", "mcp_server_calculator"):
        pytest.importorskip(needed)
    tasks = [
        (
            {"input": f"{written}?", "target": float(result)},
            (call("calculate", expression=written), f"### {result} ###"),
        )
        for written, result in SUMS.items()
    ]
    agent = load("unsloth", "math_agent").math_agent
    return Example(agent=agent, tasks=tasks, wrong=("### 7 ###", "I do not know."), **CALCULATES)


def sql(load: Load, tmp_path: Path) -> Example:
    for needed in ("langchain_community", "langgraph", "sqlparse", "termcolor"):
        pytest.importorskip(needed)
    folder = tmp_path / "data" / "database" / "pets"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "pets.sqlite") as database:
        database.execute("create table pets (name text)")
        database.execute("insert into pets values ('Rex')")
    os.environ["VERL_SPIDER_DATA_DIR"] = str(tmp_path / "data")  # as it was afterwards: see the fixture
    queries = {"How many pets?": "SELECT count(*) FROM pets", "Which pets?": "SELECT name FROM pets"}
    tasks = [
        (
            {"question": question, "db_id": "pets", "query": query},
            (f"```sqlite\n{query}\n```", "THE QUERY IS CORRECT."),
        )
        for question, query in queries.items()
    ]
    wrong = ("```sqlite\nSELECT 1\n```", "THE QUERY IS CORRECT.")
    how: Any = {"forks": 1, "per_iteration": 2, "iterations": 5}
    return Example(agent=load("spider", "sql_agent").LitSQLAgent(), tasks=tasks, wrong=wrong, **how)


def rag(load: Load, _: Path) -> Example:
    for needed in ("agents.extensions.models.litellm_model", "nltk", "mcp.server.fastmcp"):
        pytest.importorskip(needed)
    capitals = {"France": "Paris", "Japan": "Tokyo"}
    tasks = [
        (
            {"question": f"What is the capital of {country}?", "answer": city},
            (call("retrieve", query=f"capital of {country}"), f"<answer>{city}</answer>"),
        )
        for country, city in capitals.items()
    ]
    agent = load("rag", "rag_agent").RAGAgent()
    return Example(agent=agent, tasks=tasks, wrong=("<answer>Rome</answer>", "I do not know."), rises=False, **FEW)


FEW: dict[str, Any] = {"per_iteration": 2, "iterations": 5}
RETRIEVER = """
from mcp.server.fastmcp import FastMCP
server = FastMCP("wiki", host="127.0.0.1", port=8099)
@server.tool()
def retrieve(query: str) -> str:
    return "Paris is the capital of France, Tokyo that of Japan."
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
    """The example of that name, its module imported as its own command line would."""
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

    with ExitStack() as stack:
        made = globals()[request.param](load, tmp_path)
        if request.param == "rag":
            stack.enter_context(retriever())
        yield made


async def collected(
    example: Example, task: dict[str, Any], says: tuple[str, ...], model: Path, *, reward: float
) -> list[Turn]:
    """The turns of a rollout of a task in which the engine says ``says``."""
    from agl_slime.cli.demo.tokenizer import CHAT_TEMPLATE

    tokenizer = small_tokenizer(CHAT_TEMPLATE)
    tokenizer.save_pretrained(model)
    engine = engine_saying(tokenizer, says, context_length=100_000)
    needs = dict(example.needs)
    settings = {"gateway": GatewaySettings(untrained_models=needs.pop("untrained_models", ())), **needs}
    with in_thread(engine):
        how: Any = {"endpoint": engine.url, "model": str(model), "resources": example.resources, "settings": settings}
        [done] = await run_rollouts(example.agent, [task], **how, temperature=1.0, max_new_tokens=512)
    assert done.status == "succeeded", done.failure
    conversion = done.convert(tokenizer)
    assert conversion.trajectory.reward == reward
    assert all(sample.metadata["token_source"] == "engine" for sample in conversion.samples)
    turns = decode_turns(done.spans)
    trained_once(turns, merge_turns(turns, untrained={n for n, turn in enumerate(turns) if turn.untrained}))
    return turns


@pytest.mark.clients
@pytest.mark.parametrize("example", NAMES, indirect=True)
async def test_examples_turns_are_recorded_as_sampled(example: Example, tmp_path: Path) -> None:
    task, says = example.tasks[0]
    turns = await collected(example, task, says, tmp_path / "model", reward=example.reward)
    assert [turn.text for turn in turns] == list(says)
    assert sum(turn.fork is not None for turn in turns) == example.forks
    judged = example.needs.get("untrained_models", ())
    assert [turn.untrained for turn in turns if turn.untrained] == [f"role:{model}" for model in judged]


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass
class Shown:
    """What a tiny policy learns its format from: the prompts that the agent really sends, each with its good answer
    and those that blur it; and what it says as a judge, which stays clean."""

    prompts: list[tuple[list[dict[str, Any]], str]] = field(default_factory=list)
    wrong: tuple[str, ...] = ()
    judged: list[tuple[list[dict[str, Any]], str]] = field(default_factory=list)

    def demonstrations(self, rng: random.Random, n: int, *, quality: str) -> list[list[dict[str, Any]]]:
        made = []
        for _ in range(n):
            judges = bool(self.judged) and rng.random() < 0.4
            messages, answer = rng.choice(self.judged if judges else self.prompts)
            blurred = quality == "imperfect" and not judges and rng.random() < 0.6
            made.append([*messages, {"role": "assistant", "content": rng.choice(self.wrong) if blurred else answer}])
        return made


def said_in(prompt: str) -> list[dict[str, Any]]:
    """The messages of a rendered prompt, tools and results as they stand in it."""
    found = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", prompt, re.DOTALL)
    return [{"role": role, "content": content} for role, content in found]


SGLANG = pytest.mark.sglang  # the judge of the room selector is held to a JSON schema, which takes grammars
TRAINED = [pytest.param(name, marks=SGLANG if name == "room" else pytest.mark.clients) for name in NAMES]


@pytest.mark.parametrize("example", TRAINED, indirect=True)
async def test_an_example_trains(example: Example, tmp_path: Path, request: Any) -> None:
    pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')
    from agl_slime.cli.demo.warmup import PolicySettings, make_policy
    from agl_slime.cli.local import run_training
    from agl_slime.cli.parts import RunParts
    from agl_slime.cli.settings import train_config
    from agl_slime.report import read_metrics

    name = request.node.callspec.params["example"]
    shown, tokenizer = Shown(wrong=example.wrong), small_tokenizer()
    for reward, rollouts in ((example.reward, example.tasks), (0.0, example.judged)):
        for task, says in rollouts:
            for turn in await collected(example, task, says, tmp_path / "model", reward=reward):
                if reward or turn.untrained:
                    kind = shown.judged if turn.untrained else shown.prompts
                    kind.append((said_in(tokenizer.decode(turn.prompt_ids)), turn.text))
    began = time.monotonic()
    settings = PolicySettings(**{"batch_size": 8, "decay_steps": 15, "imperfect_steps": 30, **example.warmup})
    policy = make_policy(tmp_path / "policy", demonstrations=shown, settings=settings)
    warmed = time.monotonic() - began
    with ExitStack() as stack:
        url = stack.enter_context(real_sglang(policy, tmp_path / "sglang.log")).url if name == "room" else None
        config = train_config(
            model_path=policy,
            sglang_url=url,
            num_iterations=example.iterations,
            rollout_batch_size=example.per_iteration,
            n_samples_per_prompt=example.samples,
            max_new_tokens=example.max_new_tokens,
            eval_interval=0,
            output_dir=tmp_path / "run",
            **example.needs,
        )
        tasks = [task for task, _ in example.tasks]
        parts = RunParts(tasks=tasks, agent=example.agent, resources=example.resources)
        await run_training(config, given=parts, console=Console(file=io.StringIO()))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    told = {
        "reward": [round(row["rollout/reward_mean"], 2) for row in rows],
        "tokens trained": sum(row["train/tokens_trained"] for row in rows),
        "log-prob difference": max(row["train/logprob_diff_max"] for row in rows),
        "failed": sum(row["rollout/failed"] for row in rows),
        "warm-up s": round(warmed),
        "training s": round(time.monotonic() - began - warmed),
    }
    for column in ("rollout/tokens_sampled", "trace/forks", "trace/retokenized", "gateway/answers"):
        told[column] = sum(row[column] for row in rows)
    print(f"\n{name}: {json.dumps(told)}")
    assert len(rows) == example.iterations
    assert told["tokens trained"] > 0
    assert told["log-prob difference"] < 1e-3
    assert told["failed"] == 0
    assert told["trace/retokenized"] == 0
    if "untrained_models" in example.needs:  # the judge's tokens
        assert told["tokens trained"] < told["rollout/tokens_sampled"]
    assert max(told["reward"]) > told["reward"][0] or not example.rises
