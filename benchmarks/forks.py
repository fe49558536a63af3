"""Samples per rollout: what agents send back of an answer, replayed through the gateway on published chat templates.

    python -m benchmarks.forks --templates DIR [--models qwen3 qwen3.8] [--agents "Claude Code" Codex]

Each agent is a pattern of messages, as its program sends them: kept parts of an answer (thinking, ids of calls, parts),
reminders, second questions. The engine is scripted: each answer thinks, calls a tool or several, and the last
one is text, in the format of the model's template. ``benchmarks/fork_programs.py`` runs programs themselves.

Printed per model and agent: turns, Samples, tokens of all Samples per token of the conversation, and reasons of forks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.agl1_server import markdown
from benchmarks.answers import Said, Speaker
from benchmarks.published import MODELS, Published, there, tokenizer_of
from benchmarks.scripted_gateway import Rollout, ScriptedGateway, scripted_gateway

Message = dict[str, Any]

_WORDS = [
    "the",
    "test",
    "still",
    "fails",
    "because",
    "of",
    "a",
    "missing",
    "import",
    "so",
    "read",
    "it",
    "again",
    "then",
    "run",
]


class Refused(Exception):
    """The gateway answered with an error."""


@dataclass
class Line:
    """One rollout of an agent: requests in its protocol, and the answers to come."""

    rollout: Rollout
    speaker: Speaker
    http: httpx.Client
    rng: random.Random
    tools: list[Message]

    def said(self, *, calls: int = 0) -> Said:
        """The next answer; with ``calls`` calls of the first tool, one where the template writes no more."""
        calls = calls if self.speaker.parallel else min(calls, 1)
        message: Message = {"role": "assistant", "content": "" if calls and self.rng.random() < 0.5 else self.text()}
        message["reasoning_content"] = self.text(3)
        if calls:
            name, argument = _first_argument(self.tools[0])
            made = [{"name": name, "arguments": {argument: self.text()}} for _ in range(calls)]
            message["tool_calls"] = [
                {"id": self.speaker.model.ids.format(name=name, number=at), "type": "function", "function": function}
                for at, function in enumerate(made)
            ]
        return Said(message)

    def text(self, lines: int = 1) -> str:
        return "\n".join(" ".join(self.rng.choices(_WORDS, k=self.rng.randint(4, 12))) for _ in range(lines))

    def post(self, path: str, body: Mapping[str, Any], said: Said) -> Any:
        self.rollout.engine.answers[:] = [self.speaker.sampled(said)]
        answer = self.http.post(f"{self.rollout.url}/{path}", json={"model": "m", **body})
        if answer.status_code != 200:
            raise Refused(answer.json()["error"]["message"])
        return answer.json()

    def chat(
        self, messages: Sequence[Message], said: Said, *, tools: bool = True, keeps: Sequence[str] = ()
    ) -> Message:
        """Request a chat completion; returns the parts that a client keeps: content, calls, and ``keeps``."""
        body = {"messages": messages, **({"tools": self.tools} if tools else {})}
        served = self.post("chat/completions", body, said)
        message = served["choices"][0]["message"]
        kept = ("role", "content", "tool_calls", *keeps)
        return {name: message[name] for name in kept if message.get(name) is not None}


# -- agents -----------------------------------------------------------------------------------------------------------


def claude_code(line: Line, turns: int = 47) -> None:
    """Messages, thinking sent back, a system message as a reminder about every ten turns."""
    tools = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in line.tools)
    ]
    body: dict[str, Any] = {"max_tokens": 32_000, "tools": tools, "thinking": {"type": "adaptive"}}
    body["system"] = [{"type": "text", "text": f"You are an agent. {line.text(4)}"}]
    reminder = {"type": "text", "text": f"<system-reminder>\n{line.text(2)}\n</system-reminder>"}
    messages: list[Message] = [{"role": "user", "content": [reminder, {"type": "text", "text": line.text()}]}]
    for turn in range(turns):
        last = turn == turns - 1
        said = line.said(calls=0 if last else line.rng.choice([1, 1, 1, 2]))
        served = line.post("messages", {**body, "messages": messages}, said)
        messages.append({"role": "assistant", "content": served["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": line.text(3)}
            for block in served["content"]
            if block["type"] == "tool_use"
        ]
        if not results and not last:
            raise Refused("the calls of the answer were served as text")
        if results:
            messages.append({"role": "user", "content": results})
        if turn % 10 == 9:
            messages.append({"role": "system", "content": f"<system-reminder>{line.text()}</system-reminder>"})


def codex(line: Line, turns: int = 32) -> None:
    """Responses that are not kept by the server: all items are sent back, reasoning too."""
    tools = [{"type": "function", **tool["function"]} for tool in line.tools]
    body: dict[str, Any] = {"instructions": f"You are an agent. {line.text(4)}", "tools": tools, "store": False}
    items: list[Message] = [
        _item("developer", f"<permissions>{line.text()}</permissions>"),
        _item("user", f"<environment_context>{line.text()}</environment_context>"),
        _item("user", line.text()),
    ]
    for turn in range(turns):
        last = turn == turns - 1
        said = line.said(calls=0 if last else line.rng.choice([1, 1, 1, 2]))
        served = line.post("responses", {**body, "input": items}, said)
        items += served["output"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": line.text(3)}
            for item in served["output"]
            if item["type"] == "function_call"
        ]
        if not results and not last:
            raise Refused("the calls of the answer were served as text")
        items += results


def _item(role: str, text: str) -> Message:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def _by_chat(
    turns: int, *, keeps: Sequence[str] = (), parts: bool = False, questions: int = 1
) -> Callable[[Line], None]:
    """Chat completions with tools: ``questions`` of ``turns`` turns each; contents as ``parts``."""

    def play(line: Line) -> None:
        def content(text: str) -> Any:
            return [{"type": "text", "text": text}] if parts else text

        messages: list[Message] = [{"role": "system", "content": content(f"You are an agent. {line.text(3)}")}]
        for _ in range(questions):
            messages.append({"role": "user", "content": content(line.text())})
            for turn in range(turns):
                last = turn == turns - 1
                said = line.said(calls=0 if last else line.rng.choice([1, 1, 2]))
                messages.append(served := line.chat(messages, said, keeps=keeps))
                calls = served.get("tool_calls", ())
                if not calls and not last:
                    raise Refused("the calls of the answer were served as text")
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": content(line.text(2))} for call in calls
                ]

    return play


def _with_title(play: Callable[[Line], None]) -> Callable[[Line], None]:
    """A title for the session is asked for first."""

    def both(line: Line) -> None:
        title = [{"role": "system", "content": "You write titles."}, {"role": "user", "content": line.text()}]
        line.chat(title, line.said(), tools=False)
        play(line)

    return both


def mini_swe_agent(line: Line, turns: int = 20) -> None:
    """No tools: commands are blocks of code in the text, their output is the user's next message."""
    messages: list[Message] = [
        {"role": "system", "content": f"You are an agent. {line.text(2)}"},
        {"role": "user", "content": line.text(3)},
    ]
    for _ in range(turns):
        said = line.said()
        said.message["content"] += f"\n\n```bash\n{line.text()}\n```"
        messages.append(line.chat(messages, said, tools=False))
        messages.append({"role": "user", "content": f"<returncode>0</returncode>\n<output>\n{line.text(2)}\n</output>"})


AGENTS: dict[str, Callable[[Line], None]] = {
    "Claude Code": claude_code,
    "Codex": codex,
    "OpenCode": _with_title(_by_chat(20, keeps=["reasoning_content"])),
    "Qwen Code": _by_chat(20, keeps=["reasoning_content"]),
    "mini-SWE-agent": mini_swe_agent,
    "OpenHands": _by_chat(20, parts=True),
    "Agents SDK": _by_chat(3, questions=3),
    "LangChain": _by_chat(3, questions=3),
    "pydantic-ai": _by_chat(3, questions=3),
}


# -- the table --------------------------------------------------------------------------------------------------------


@dataclass
class Played:
    turns: int
    samples: int
    tokens: int
    conversation: int
    forks: Counter[str]
    refused: str = ""

    @property
    def cell(self) -> str:
        if self.refused:
            return "refused"
        return f"{self.samples} ({self.tokens / self.conversation:.1f})"


def played(play: Callable[[Line], None], gateway: ScriptedGateway, speaker: Speaker, *, seed: int = 0) -> Played:
    refused = ""
    with gateway.rollout(chat_template_kwargs=speaker.model.kwargs) as rollout, httpx.Client(timeout=120) as http:
        line = Line(rollout, speaker, http, random.Random(seed), _tools())
        try:
            play(line)
        except Refused as error:
            refused = str(error)
        turns, segments = rollout.turns, rollout.segments
    forks = Counter(turn.fork.value for turn in turns if turn.fork is not None)
    tokens, longest = (
        sum(len(segment.token_ids) for segment in segments),
        max((turn.length for turn in turns), default=1),
    )
    return Played(len(turns), len(segments), tokens, longest, forks, refused)


def _tools() -> list[Message]:
    def tool(name: str, argument: str) -> Message:
        parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
        function = {"name": name, "description": f"{name} of this machine.", "parameters": parameters}
        return {"type": "function", "function": function}

    return [tool("Bash", "command"), tool("Read", "file_path"), tool("Search", "pattern")]


def _first_argument(tool: Message) -> tuple[str, str]:
    return tool["function"]["name"], next(iter(tool["function"]["parameters"]["properties"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--templates", type=Path, required=True, help="directory of NAME.jinja")
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--agents", nargs="*", default=[*AGENTS], choices=[*AGENTS])
    parser.add_argument("--set", nargs="*", default=[], help="the run's template arguments, NAME=JSON")
    options = parser.parse_args()
    models = [MODELS[name] for name in options.models] or there(options.templates)
    agents = {name: AGENTS[name] for name in options.agents}
    table, details = [], []
    for model in models:
        cells = [model.name]
        for name, found in _of_model(model, agents, options).items():
            cells.append(found.cell)
            forks = ", ".join(f"{reason} {n}" for reason, n in found.forks.most_common())
            details.append([model.name, name, f"{found.turns}", f"{found.samples}", f"{found.tokens:,}"])
            details[-1] += [f"{found.tokens / found.conversation:.2f}", forks or "none", found.refused[:120]]
            print("…", *details[-1], sep=" | ", file=sys.stderr, flush=True)
        table.append(cells)
    columns = ["model", "agent", "turns", "Samples", "tokens of all", "over the conversation's", "forks", "refused"]
    print(markdown("Samples per rollout, and their tokens over the conversation's", ["model", *agents], table))
    print(markdown("Each", columns, details))
    return 0


def _of_model(model: Published, agents: Mapping[str, Callable[[Line], None]], options: Namespace) -> dict[str, Played]:
    given = {name: json.loads(value) for name, _, value in (setting.partition("=") for setting in options.set)}
    model = replace(model, kwargs={**model.kwargs, **given})
    tokenizer = tokenizer_of(model, options.templates, renderers=False)
    speaker = Speaker(model, tokenizer, None)
    with scripted_gateway(tokenizer) as gateway:
        return {name: played(play, gateway, speaker) for name, play in agents.items()}


if __name__ == "__main__":
    raise SystemExit(main())
