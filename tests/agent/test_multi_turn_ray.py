"""``MultiTurnRollout`` as a Ray actor, used as its documentation shows. Needs Ray (marker ray)."""

from __future__ import annotations

from typing import Any

import pytest

from agl_slime.agent.batched.multi_turn import MultiTurnRollout
from agl_slime.agent.tools import ToolManager
from tests.agent.multi_turn_agents import CALL, look
from tests.agent.test_multi_turn_batched import ScriptedSampler, asking, trained
from tests.harness.vocabularies import chat_tokenizer

pytestmark = pytest.mark.ray


def test_the_rollout_runs_as_an_actor() -> None:
    ray: Any = pytest.importorskip("ray")
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    sampler = ScriptedSampler(tokenizer, {"a": [CALL, "Three."]})
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        rollout_actor = MultiTurnRollout.remote(sampler=sampler, template=tokenizer, tool_manager=ToolManager([look]))
        reference = rollout_actor.__call__.remote([asking("a")])
        (trajectory,) = ray.get(reference, timeout=120)
    finally:
        ray.shutdown()
    assert trajectory["turns"] == 2
    assert trajectory["stop_reason"] == "stop"
    assert tokenizer.decode(trained(trajectory)) == f"{CALL}<|im_end|>Three.<|im_end|>"
