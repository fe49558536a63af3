"""An agent for Agent Lightning 1.0's local controller that is quick to start and writes a line for each step into the
file that WITNESS names. Run by the controller's Python, which has neither this package nor pytest."""

import http.client
import json
import os
import urllib.parse


def _note(step: str) -> None:
    rollout = os.environ["AGL_EVENT_URL"].split("/api/rollouts/")[1].split("/")[0]
    line = f"{rollout} {step} {os.getpid()}\n".encode()
    descriptor = os.open(os.environ["WITNESS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line)  # one write of few bytes is whole beside other writers
    os.close(descriptor)


def _post(url: str, body: dict) -> dict:
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}", "Content-Type": "application/json"}
    connection.request("POST", address.path, json.dumps(body), headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status >= 300:
        raise RuntimeError(f"{answer.status} {content[:400]!r}")
    return json.loads(content)


def ask(messages: list[dict]) -> dict:
    answer = _post(f"{os.environ['AGL_OPENAI_BASE_URL']}/chat/completions", {"model": "auto", "messages": messages})
    return answer["choices"][0]["message"]


def reward(value: object) -> None:
    _post(os.environ["AGL_EVENT_URL"], {"event_type": "reward", "data": {"value": value}})


class Agent:
    """Asks twice in one conversation; the reward is the share of its answers' letters that are lower case."""

    def run(self) -> None:
        _note("begun")
        messages, text = [{"role": "user", "content": os.environ["QUESTION"]}], ""
        for _ in range(2):
            message = ask(messages)
            text += message["content"]
            messages += [message, {"role": "user", "content": "again"}]
        _note("asked")
        reward(sum(letter.islower() for letter in text) / max(1, len(text)))
        _note("rewarded")
