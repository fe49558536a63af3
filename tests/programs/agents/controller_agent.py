"""An agent for Agent Lightning 1.0's local controller that is quick to start and notes what it does, one line each, in
the file that WITNESS names. Run by the controller's Python, which has neither this package nor pytest."""

from __future__ import annotations

import http.client
import json
import os
import urllib.parse


def _note(what: str) -> None:
    rollout = os.environ["AGL_EVENT_URL"].split("/api/rollouts/")[1].split("/")[0]
    line = f"{rollout} {what} {os.getpid()}\n".encode()
    descriptor = os.open(os.environ["WITNESS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line)  # one write of few bytes is whole, whoever else writes
    os.close(descriptor)


def _post(url: str, body: dict) -> dict:
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}", "Content-Type": "application/json"}
    connection.request("POST", address.path, json.dumps(body), headers)
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    if answer.status >= 300:
        raise RuntimeError(f"{answer.status} {said[:400]!r}")
    return json.loads(said)


class Agent:
    """Asks twice in one conversation; the reward is the share of its answers' letters that are lower case."""

    def run(self) -> None:
        _note("begun")
        messages = [{"role": "user", "content": os.environ["QUESTION"]}]
        said = ""
        for _ in range(2):
            body = {"model": "auto", "messages": messages}
            message = _post(f"{os.environ['AGL_OPENAI_BASE_URL']}/chat/completions", body)["choices"][0]["message"]
            said += message["content"]
            messages += [message, {"role": "user", "content": "again"}]
        _note("asked")
        reward = sum(letter.islower() for letter in said) / max(1, len(said))
        _post(os.environ["AGL_EVENT_URL"], {"event_type": "reward", "data": {"value": reward}})
        _note("rewarded")
