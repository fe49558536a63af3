"""Two multi-turn schedulers that make a model think again about a wrong answer to a mathematical problem.

``math_tip_trick_multi_turn`` adds a message that the answer is wrong. ``math_tip_trick`` cuts the answer back to its
thinking and has the model continue from there.

    python train.py --agent examples/math_retry.py:MathAgent --external-plugins examples/math_retry.py \\
        --multi-turn-scheduler math_tip_trick_multi_turn --max-turns 3 --tasks problems.jsonl --model-path DIR

A task has ``problem`` and ``solution``; an answer is the content of the last ``\\boxed{}``. Run as a program, this file
demonstrates both schedulers with a scripted answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agl_slime import SGLangLitAgent
from agl_slime.agent.scheduler import (
    ChatMessage,
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutResponseChoice,
    register_scheduler,
    schedulers,
)

TIP = "The answer is not correct, it seems that you made a mistake. Go through it again step by step."
CONTINUATION_TIP = " But wait... it seems that I made a mistake somewhere."


def boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{}`` of a text, which may contain braces; ``None`` without a closed one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at].strip()
    return None


def is_right(answer: str, task: Mapping[str, Any]) -> bool:
    """Whether an answer has the solution of ``task`` in its box; numbers are compared as numbers."""
    value, solution = boxed(answer), boxed(str(task["solution"])) or str(task["solution"]).strip()
    if value is None:
        return False
    try:
        return float(value.replace(",", "")) == float(solution.replace(",", ""))
    except ValueError:
        return re.sub(r"\s", "", value) == re.sub(r"\s", "", solution)


class _UntilRight(MultiTurnScheduler):
    def check_finished(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> bool:
        if is_right(result.message.content, infer_request.data_dict):
            return True
        return super().check_finished(infer_request, result, current_turn)


class MathNewRound(_UntilRight):
    """New round: a message says that the answer is wrong, and the model answers again."""

    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        infer_request.messages.append({"role": "user", "content": TIP})
        return infer_request


class MathContinuation(_UntilRight):
    """Continuation: cut the answer at the end of its thinking, or before the answer's tag, and append a doubt."""

    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        content: str = infer_request.messages[-1]["content"]
        for mark in ("</think>", "<answer>"):
            if mark in content:
                content = content[: content.rindex(mark)].rstrip()
                break
        infer_request.messages[-1]["content"] = content + CONTINUATION_TIP
        return infer_request


# this file may be loaded twice, as a plug-in and as the agent's module
if "math_tip_trick" not in schedulers:
    register_scheduler("math_tip_trick_multi_turn")(MathNewRound)
    register_scheduler("math_tip_trick")(MathContinuation)


class MathAgent(SGLangLitAgent):
    """Solves ``task["problem"]``."""

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{task['problem']}\nPut the final answer into \\boxed{{}}."}]

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0 if is_right(response, task) else 0.0


def main() -> None:
    problem = {"problem": "What is the square root of 36 times the square root of 16?", "solution": "\\boxed{12}"}
    wrong = "<think>\n6 times 4 is 144.\n</think>\n\nIt is \\boxed{144}."
    for name, scheduler in (("new round", MathNewRound(max_turns=3)), ("continuation", MathContinuation(max_turns=3))):
        messages = [{"role": "user", "content": problem["problem"]}, {"role": "assistant", "content": wrong}]
        result = RolloutResponseChoice(index=0, message=ChatMessage("assistant", wrong), finish_reason="stop")
        request = RolloutInferRequest(messages=messages, data_dict=problem)
        print(f"{name}: finished {scheduler.check_finished(request, result, 1)}, then")
        for message in scheduler.step(request, result, 1).messages:
            print(f"  {message['role']}: {message['content']!r}")


if __name__ == "__main__":
    main()
