"""Agents for Agent Lightning 1.0's local controller: run by its Python, which has neither this package nor pytest."""

from __future__ import annotations

import json
import os
import signal
import urllib.request


def _post(url: str, body: dict) -> dict:
    headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def _ask(messages: list[dict]) -> dict:
    answer = _post(f"{os.environ['AGL_OPENAI_BASE_URL']}/chat/completions", {"model": "auto", "messages": messages})
    return answer["choices"][0]["message"]


def _reward(value: object) -> None:
    _post(os.environ["AGL_EVENT_URL"], {"event_type": "reward", "data": {"value": value}})


class TwoTurns:
    def run(self) -> None:
        messages = [{"role": "user", "content": os.environ["QUESTION"]}]
        messages += [_ask(messages), {"role": "user", "content": "Are you sure?"}]
        said = _ask(messages)["content"]
        _reward(1.0 if os.environ["LABEL"] in said else 0.0)


class WithoutReward:
    async def run(self) -> None:
        _ask([{"role": "user", "content": os.environ["QUESTION"]}])


class Raises:
    def run(self) -> None:
        _ask([{"role": "user", "content": os.environ["QUESTION"]}])
        raise ValueError("this agent has a fault")


class Killed:
    def run(self) -> None:
        _ask([{"role": "user", "content": os.environ["QUESTION"]}])
        os.kill(os.getpid(), signal.SIGKILL)
