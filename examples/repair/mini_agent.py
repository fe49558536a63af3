"""mini-swe-agent, unchanged, on the same tasks with the same reward: it works with bash in the sandbox.

pip install mini-swe-agent
python train.py --agent examples/repair/mini_agent.py:repair --tasks … --eval-tasks … --model …
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models.litellm_model import LitellmModel
from repair_agent import SmallRepairAgent, sandbox, score_source

CONFIG = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
PROMPT = "test.py fails because of one wrong line in NAME.py. Repair NAME.py."


def repair(task: dict[str, Any], llm: Any, *, prompt: str = PROMPT, **settings: Any) -> dict[str, float]:
    environment = BubblewrapEnvironment(
        wrapper_args=[*sandbox()[1:], "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin"]
    )
    try:
        code, name = environment.working_dir / f"{task['name']}.py", task["name"]
        code.write_text(task["source"])
        tests = [f"assert {name}(*{arguments!r}) == {expected!r}" for arguments, expected in task["tests"]]
        (environment.working_dir / "test.py").write_text("\n".join([f"from {name} import {name}", *tests]))
        reach = {"api_base": llm.endpoint, "api_key": llm.api_key}
        options = {**CONFIG["model"], "model_kwargs": reach, "cost_tracking": "ignore_errors"}
        model = LitellmModel(model_name=f"openai/{llm.model}", **options)
        settings = {**CONFIG["agent"], "step_limit": 10, **settings}
        DefaultAgent(model, environment, **settings).run(prompt.replace("NAME", name))
        return score_source(task, code.read_text(errors="replace") if code.is_file() else "")
    finally:
        environment.cleanup()


def repair_small(task: dict[str, Any], llm: Any) -> dict[str, float]:
    """As ``SmallRepairAgent``: the function and a test are in the prompt, and one command edits the file."""
    system, question = (message["content"] for message in SmallRepairAgent().build_prompt(task))
    return repair(task, llm, prompt=question, system_template=system, instance_template="{{task}}", step_limit=1)
