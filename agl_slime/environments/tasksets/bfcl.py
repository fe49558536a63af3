"""The multi-turn tasks of the Berkeley Function Calling Leaderboard, from its wheel: a user makes several requests, and
the model calls functions of simulated systems in this process. Prompts, decoding, execution and the verdict come from
the package, in its prompting mode (calls are text, `[cd(folder='a'), ls()]`); no network is needed.

    pip install --no-deps bfcl-eval
    pip install filelock mpmath tenacity tree_sitter==0.21.3 tree-sitter-java==0.21.0 tree-sitter-javascript==0.21.4
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import copy
import functools
import os
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from agl_slime.environments.tasksets.chat import LocalEnvConfig

# where the package makes directories; by default inside its installation
os.environ.setdefault("BFCL_PROJECT_ROOT", os.path.join(tempfile.gettempdir(), f"bfcl-{os.getuid()}"))
try:
    from bfcl_eval.constants.category_mapping import MULTI_TURN_CATEGORY
    from bfcl_eval.constants.default_prompts import (
        DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING,
        MAXIMUM_STEP_LIMIT,
    )
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils as backend
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
    from bfcl_eval.model_handler import utils as handler
    from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry
except ImportError as e:
    raise ImportError(f"The taskset bfcl needs its package ({e}): pip install --no-deps bfcl-eval") from e

Step = list[str]
_PLAIN = (ast.Expression, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Constant, ast.Call, ast.keyword, ast.Name)
_ARITHMETIC = (ast.expr_context, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.Add, ast.Sub, ast.Div)  # no endless powers
_RESERVED = {*vars(builtins), *vars(backend), *vars(handler)}


class BfclConfig(vf.TasksetConfig):
    category: str = ""
    """One or more multi-turn categories, separated by commas."""


class BfclData(vf.TaskData):
    category: str


class BfclTask(vf.Task[BfclData, vf.State, vf.TaskConfig]):
    pass


@functools.cache
def entries(category: str) -> dict[str, tuple[dict[str, Any], list[list[str]]]]:
    """Each task's entry and its ground truth, by name."""
    truth = {entry["id"]: entry["ground_truth"] for entry in load_ground_truth_entry(category)}
    return {entry["id"]: (entry, truth[entry["id"]]) for entry in load_dataset_entry(category)}


class BfclTaskset(vf.Taskset[BfclTask, BfclConfig]):
    def load(self) -> Iterator[BfclTask]:
        for category in self.config.category.split(","):
            if category.strip() not in MULTI_TURN_CATEGORY:
                listed = ", ".join(MULTI_TURN_CATEGORY)
                raise ValueError(f"bfcl has no multi-turn category {category!r}; it has {listed}")
            for name, (entry, _) in entries(category.strip()).items():
                first = copy.deepcopy(entry["question"][0])
                system, *_ = handler.system_prompt_pre_processing_chat_model(first, entry["function"], name)
                data = BfclData(name=name, system_prompt=system["content"], category=category.strip())
                yield BfclTask(data, self.config.task)


def parse_calls(reply: str, functions: set[str]) -> Step:
    """The calls in a reply, decoded by the package. It decodes and executes a model's text with `eval`, so anything but
    calls of the task's `functions` with plain values is refused first. Raises `ValueError`, and errors of `ast` and the
    package."""
    text = reply.strip("`\n ")
    text = ("" if text.startswith("[") else "[") + text + ("" if text.endswith("]") else "]")
    for node in ast.walk(ast.parse(text.strip().strip("'"), mode="eval")):
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if not isinstance(node, (*_PLAIN, *_ARITHMETIC)) or (isinstance(node, ast.Call) and name is None):
            raise ValueError(f"{type(node).__name__} is more than a call of a function with values")
        if name in _RESERVED and name not in functions:
            raise ValueError(f"{name} is not a function of the task")
    return handler.default_decode_execute_prompting(reply)


class Systems:
    """The simulated systems of one episode. The package keeps them as globals of a module, here under a unique name."""

    def __init__(self, name: str, category: str) -> None:
        self.entry, self.ground_truth = entries(category)[name]
        self.functions = {doc["name"] for doc in self.entry["function"]}
        self._key, self._category = f"agl_{uuid.uuid4().hex}", category

    def add(self, functions: list[dict[str, Any]]) -> None:
        self.functions |= {doc["name"] for doc in functions}

    def execute(self, step: Step) -> list[str]:
        entry = self.entry
        options = {"long_context": "long_context" in self._category, "is_evaL_run": False}
        return backend.execute_multi_turn_func_call(
            step, entry["initial_config"], entry["involved_classes"], self._key, entry["id"], **options
        )[0]

    def verdict(self, turns: list[list[Step]]) -> dict[str, Any]:
        return multi_turn_checker(turns, self.ground_truth, self.entry, self._category, self._key)

    def forget(self) -> None:
        for name in [name for name in list(vars(backend)) if name.startswith(self._key)]:
            del vars(backend)[name]


class BfclEnv(vf.Env[LocalEnvConfig]):
    async def run(self, task, agents) -> None:
        systems = await asyncio.to_thread(Systems, task.data.name, task.data.category)
        try:
            async with agents.agent.interaction(task) as talk:
                turns = await self._converse(systems, talk)
                verdict = {"valid": False, "error_type": "force_terminated"}
                if len(turns) == len(systems.ground_truth):
                    verdict = await asyncio.to_thread(systems.verdict, turns)
                talk.trace.record_reward("valid", float(verdict["valid"]), 1.0)
                talk.trace.record_metric("calls", float(sum(len(step) for turn in turns for step in turn)))
                talk.trace.info["error_type"] = verdict.get("error_type")
        finally:
            systems.forget()

    async def _converse(self, systems: Systems, talk: Any) -> list[list[Step]]:
        """The calls of each turn, without the last turn if it exceeded the package's limit of steps."""
        missed = systems.entry.get("missed_function", {})
        turns: list[list[Step]] = []
        for number, messages in enumerate(systems.entry["question"]):
            request = "\n\n".join(message["content"] for message in messages)
            if (functions := missed.get(str(number))) is not None:
                systems.add(functions)
                request = DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=functions)
            turn: list[Step] = []
            turns.append(turn)
            while True:
                answer = await talk.turn(request)
                if answer.terminated:
                    raise RuntimeError(f"the agent was stopped in turn {number}")
                try:
                    step = parse_calls(answer.last_reply, systems.functions)
                except Exception:  # as in the package, an unreadable reply ends the turn
                    break
                if not step:
                    break
                turn.append(step)
                results = await asyncio.to_thread(systems.execute, step)
                answers = zip(step, results, strict=True)
                request = repr([{"role": "tool", "name": call, "content": result} for call, result in answers])
                if len(turn) > MAXIMUM_STEP_LIMIT:
                    return turns[:-1]
        return turns
