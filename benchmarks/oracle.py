"""Continuations in tokens beside `renderers`' (PyPI) and beside each template's full rendering.

    python -m benchmarks.oracle --templates DIR [--models qwen3 glm-4.5] [--conversations 500] [--show 2]

For each model whose template is in the directory (``scripts/chat_templates.py``), seeded conversations are played
through the gateway: text, thinking, parallel calls, results in a row, results that are errors, reminders, second
questions, answers that are cut at the limit, in thinking or in a call, answers in other tokens than the tokenizer's
own. Each next prompt is compared with ``bridge_to_next_turn`` of the model's renderer, if there is one, and with the
template's rendering of thinking, content and calls in their fields: equal, equal but for sampled tokens, or different.
A prompt that forks is compared with the template's rendering, and its reason is counted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_slime.errors import AglSlimeError
from agl_slime.tokens.blanks import squash
from agl_slime.tokens.turn import Turn
from benchmarks.agl1_server import markdown
from benchmarks.answers import Play, Speaker, plays
from benchmarks.published import MODELS, Published, renderer_of, there, tokenizer_of
from benchmarks.scripted_gateway import ScriptedGateway, scripted_gateway

Message = dict[str, Any]

# -- the comparison ---------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """Counts of one model; a boundary is a prompt after an answer."""

    conversations: int = 0
    boundaries: int = 0
    beside_bridge: Counter[str] = field(default_factory=Counter)
    beside_template: Counter[str] = field(default_factory=Counter)
    firsts: Counter[str] = field(default_factory=Counter)
    forks: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    unplayable: Counter[str] = field(default_factory=Counter)
    misread: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def example(self, kind: str, text: str) -> None:
        self.examples.setdefault(kind, []).append(text)


def compared(model: Published, directory: Path, count: int, *, seed: int = 0) -> Found:
    tokenizer = tokenizer_of(model, directory)
    renderer = renderer_of(model, tokenizer)
    speaker, found = Speaker(model, tokenizer, renderer), Found()
    with scripted_gateway(tokenizer) as gateway:
        for play in plays(model, count, seed):
            _compare(model, play, speaker, gateway, found)
            found.conversations += 1
    return found


def _compare(model: Published, play: Play, speaker: Speaker, gateway: ScriptedGateway, found: Found) -> None:
    for said, after in zip(play.answers, play.after, strict=True):
        if not speaker.thinks:
            said.message.pop("reasoning_content", None)
        if not speaker.parallel and (calls := said.message.get("tool_calls")):
            del after[1 : len(calls)], calls[1:]
    true, sent = [*play.start], [*play.start]
    histories: list[tuple[list[Message], list[Message]]] = []
    with gateway.rollout() as rollout:
        for said, new in zip(play.answers, play.after, strict=True):
            try:
                sampled = speaker.sampled(said)
            except Exception as error:  # the template refuses this history itself
                found.unplayable[f"{error}"[:80]] += 1
                break
            rollout.engine.answers[:] = [sampled]
            body: dict[str, Any] = {"model": "m", "messages": sent, "tools": play.tools or []}
            if model.kwargs:
                body["chat_template_kwargs"] = model.kwargs
            try:
                served = rollout.chat(body)["choices"][0]["message"]
            except AglSlimeError as error:
                found.refused[f"{error}"[:160]] += 1
                break
            histories.append(([*true], new))
            whole = sampled.finish == "stop"
            if whole and (wrong := _misread(served, said.message)):
                found.misread[wrong] += 1
                found.example(f"misread {wrong}", f"{speaker.tokenizer.decode(sampled.ids)!r} -> {served}")
            sent.append(_echoed(served, play.echo))
            if whole:
                true.append(said.message)
                ids = [call["id"] for call in served.get("tool_calls") or ()]
                if len(ids) != len(said.message.get("tool_calls") or ()):
                    break  # results of calls that were not read have nowhere to go
                new_sent = _with_ids(new, ids)
            else:  # a client asks again after an answer that was cut
                new_sent = new = [{"role": "user", "content": "Go on."}]
                thought = served.get("reasoning_content")
                true.append({"role": "assistant", "content": served.get("content") or ""})
                true[-1] |= {"reasoning_content": thought} if thought else {}
                if calls := served.get("tool_calls"):  # complete calls
                    true[-1]["tool_calls"] = said.message["tool_calls"][: len(calls)]
                histories[-1] = (histories[-1][0], new)
            true += new
            sent += new_sent
        turns = rollout.turns
    if turns:
        _first(model, turns[0], play, speaker, found)
    for at in range(1, len(turns)):
        _, new = histories[at - 1]
        _boundary(model, turns, at, histories[at][0], new, play, speaker, found)


def _first(model: Published, turn: Turn, play: Play, speaker: Speaker, found: Found) -> None:
    text = speaker.render(play.start, play.tools, opening=True)
    ours = turn.prompt_ids.tolist()
    found.firsts["template"] += ours == speaker.encode(text)
    if speaker.renderer is not None:
        found.firsts["renderer"] += ours == speaker.renderer.render_ids(
            play.start, tools=_for_renderer(play.tools), add_generation_prompt=True
        )


def _boundary(
    model: Published,
    turns: list[Turn],
    at: int,
    history: list[Message],
    new: list[Message],
    play: Play,
    speaker: Speaker,
    found: Found,
) -> None:
    last, turn = turns[at - 1], turns[at]
    ours = turn.prompt_ids.tolist()
    found.boundaries += 1
    if turn.fork is not None:
        found.forks[f"{turn.fork.value}"] += 1
    beside_template = _beside_template(turns, at, history, play, speaker)
    way = "continues" if turn.fork is None else "forks"
    found.beside_template[f"{way}: {beside_template}"] += 1
    cut = last.finish_reason != "stop"
    roles = "+".join(dict.fromkeys(message["role"] for message in new))
    kind = f"{roles}{' after a cut' if cut else ''}"
    if speaker.renderer is not None:
        bridge = _bridge(speaker, last, new, play)
        if bridge is None and turn.fork is None:
            told = f"renders again, ours continues ({beside_template})"
        elif bridge is None:
            told = f"both render again ({beside_template})"
        elif turn.fork is not None:
            told = f"bridges, ours forks ({turn.fork.value}; {beside_template})"
        elif bridge == ours:
            told = "equal"
        else:
            told = f"differs ({beside_template})"
        found.beside_bridge[told] += 1
        if told.startswith(("bridges", "differs")):
            n = next((n for n, (a, b) in enumerate(zip(ours, bridge or [], strict=False)) if a != b), 0)
            parts = [speaker.tokenizer.decode(ids[max(0, n - 8) :]) for ids in (ours, bridge or [])]
            text = f"ours {parts[0]!r:.400} | theirs {parts[1]!r:.400}"
            found.example(f"{told} [{kind}]", text)
    if beside_template == "other":
        whole = speaker.render(history, play.tools, opening=True)
        text = speaker.tokenizer.decode(ours)
        n = next((n for n, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), min(len(text), len(whole)))
        around = slice(max(0, n - 60), n + 160)
        found.example(f"template {way} [{kind}]", f"ours {text[around]!r} | template {whole[around]!r}")


def _bridge(speaker: Speaker, last: Turn, new: list[Message], play: Play) -> list[int] | None:
    how: Any = {"tools": _for_renderer(play.tools)}
    new = speaker.fitted([{"role": "user"}, *new])[1:]
    made = speaker.renderer.bridge_to_next_turn(last.prompt_ids.tolist(), last.response_ids.tolist(), new, **how)
    return None if made is None else [*getattr(made, "token_ids", made)]


def _for_renderer(tools: Any) -> Any:
    return tools


_ORDER = ["same", "blanks", "opening", "cut", "thinking", "sampled", "reminder", "other", "refused"]
"""How a prompt stands to the template's rendering of the true history, the worst of its answers counts: the same;
white space and empty blocks within sampled answers; what opens an answer, which some templates write only before one
that is there, or only before one to come; an answer that was cut; thinking that the template leaves out;
something else within sampled answers; a later system message that the template would refuse, drop or move, and that
stands elsewhere than as a user's; something else; the template refuses the history."""


def _beside_template(turns: list[Turn], at: int, history: list[Message], play: Play, speaker: Speaker) -> str:
    try:
        whole = speaker.render(history, play.tools, opening=True)
    except Exception:
        return "refused"
    ours = turns[at].prompt_ids.tolist()
    if speaker.tokenizer.decode(ours) == whole:
        return "same"
    if squash(speaker.tokenizer.decode(ours)) == squash(whole):
        return "blanks"
    pieces, sampled, done = [], [], 0
    for turn in turns[:at]:
        start, end = turn.length - len(turn.response_ids), turn.length
        if start >= done and ours[:end] == turn.token_ids.tolist():
            between = speaker.tokenizer.decode(ours[done:start])
            pieces.append(between.removesuffix(speaker.opened))
            sampled.append(turn)
            done = end - (turn.finish_reason == "stop")
    pieces.append(speaker.tokenizer.decode(ours[done:]))
    fits, ways = _between(pieces, whole), ["same"]
    if fits is None:  # white space in answers of earlier turns, which the prompt has as the template writes them
        fits, ways = _between([*map(squash, pieces)], squash(whole)), ["blanks"]
    if fits is None:
        return "reminder" if speaker.moved(history) else "other"
    ways += [_way(turn, written, speaker) for turn, written in zip(sampled, fits, strict=True)]
    return max(ways, key=_ORDER.index)


def _between(pieces: list[str], whole: str) -> tuple[str, ...] | None:
    """What ``whole`` has between ``pieces``; ``None`` where it is not made of them."""
    fits = re.fullmatch("(.*?)".join(map(re.escape, pieces)), whole, re.DOTALL)
    return fits and fits.groups()


def _way(turn: Turn, written: str, speaker: Speaker) -> str:
    stopped = turn.finish_reason == "stop"
    said = speaker.tokenizer.decode(turn.response_ids.tolist()[: -1 if stopped else None])
    if speaker.opened + said == written:
        return "same"
    if squash(speaker.opened + said) == squash(written):
        return "blanks"
    if squash(said) == squash(written.removeprefix(speaker.header)):
        return "opening"
    said = speaker.opened + said
    if not stopped:
        return "cut"
    return (
        "thinking" if squash(said.rpartition("</think>")[2]) == squash(written.rpartition("</think>")[2]) else "sampled"
    )


def _echoed(served: Message, echo: bool) -> Message:
    kept = ("role", "content", "tool_calls", *(("reasoning_content",) if echo else ()))
    return {name: served[name] for name in kept if served.get(name) is not None}


def _with_ids(new: list[Message], ids: list[str]) -> list[Message]:
    left = iter(ids)
    return [{**message, "tool_call_id": next(left)} if message["role"] == "tool" else message for message in new]


def _misread(served: Message, true: Message) -> str:
    """Which parts of an answer were served as others than the model wrote them; white space does not count."""
    wrong = []
    if (served.get("reasoning_content") or "").strip() != (true.get("reasoning_content") or "").strip():
        wrong.append("thinking")
    if (served.get("content") or "").strip() != true["content"].strip():
        wrong.append("content")
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in served.get("tool_calls") or ()
    ]
    if calls != [(call["function"]["name"], call["function"]["arguments"]) for call in true.get("tool_calls", ())]:
        wrong.append("calls")
    return " and ".join(wrong)


# -- the table --------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--templates", type=Path, required=True, help="directory of NAME.jinja")
    parser.add_argument("--models", nargs="*", default=[], choices=[*MODELS, []])
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="examples of each difference")
    options = parser.parse_args()
    rows, models = [], [MODELS[name] for name in options.models] or there(options.templates)
    for model in models:
        found = compared(model, options.templates, options.conversations, seed=options.seed)
        rows.append(row(model, found))
        print("…", *rows[-1], sep=" | ", file=sys.stderr, flush=True)
        _show(found, options)
    print(markdown("Continuations beside renderers and the template", COLUMNS, rows))
    return 0


COLUMNS = ["model", "conversations", "prompts after an answer", "continued", "forks", "beside the template"]
COLUMNS += ["beside its renderer", "parts misread", "refused"]


def row(model: Published, found: Found) -> list[str]:
    continued = sum(n for way, n in found.beside_template.items() if way.startswith("continues"))
    return [
        model.name,
        f"{found.conversations}",
        f"{found.boundaries}",
        f"{continued}",
        _counts(found.forks),
        _counts(found.beside_template),
        _counts(found.beside_bridge) if model.renderer else "no renderer",
        _counts(found.misread),
        _counts(found.refused + found.unplayable),
    ]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counter.most_common())


def _show(found: Found, options: Namespace) -> None:
    for kind, texts in found.examples.items() if options.show else ():
        print(f"  {kind}: {len(texts)}", file=sys.stderr)
        for text in texts[: options.show]:
            print(f"      {text}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
