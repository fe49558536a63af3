"""Agents for Agent Lightning 1.0's local controller: run by its Python, which has neither this package nor pytest."""

import os
import signal

from controller_agent import ask, reward


def _messages() -> list[dict]:
    return [{"role": "user", "content": os.environ["QUESTION"]}]


class TwoTurns:
    def run(self) -> None:
        messages = _messages()
        messages += [ask(messages), {"role": "user", "content": "Are you sure?"}]
        answer = ask(messages)["content"]
        reward(1.0 if os.environ["LABEL"] in answer else 0.0)


class WithoutReward:
    async def run(self) -> None:
        ask(_messages())


class Raises:
    def run(self) -> None:
        ask(_messages())
        raise ValueError("this agent has a fault")


class Killed:
    def run(self) -> None:
        ask(_messages())
        os.kill(os.getpid(), signal.SIGKILL)
