"""``eval.html``: the results of an evaluation and its conversations, for two models next to each other.

A page without code: model output is escaped, and the content security policy allows no script.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError
from agl_slime.report.files import iter_jsonl, read_object
from agl_slime.report.page import MOST_BYTES
from agl_slime.support.files import write_file

MOST_CHARACTERS = 20_000  # of one text

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{digest}'">
<title>{title}</title><style>{styles}</style></head>
<body><header><p class="brand">agl-slime eval</p></header><main><h1>{title}</h1>
{body}
</main></body></html>
"""


def is_evaluation(directory: Path) -> bool:
    return (directory / "eval.json").is_file()


def write_eval_page(directory: Path, output: Path | None = None) -> Path:
    """Write the page of the evaluation in ``directory``, by default ``eval.html`` there. Raises ``ConfigError`` for
    files of another form."""
    target = output or directory / "eval.html"
    try:
        content = _page(directory)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{directory / 'eval.json'} is not as agl-slime eval writes it ({why:.200})") from error
    write_file(target, content.encode("utf-8", "replace"), durable=False)
    return target


def _page(directory: Path) -> str:
    result = read_object(directory / "eval.json")
    if result is None:
        raise ValueError("no JSON object")
    models = result["models"]
    samples = [_by_task(iter_jsonl(directory / f"samples-{number + 1}.jsonl")) for number in range(len(models))]
    inputs = list(iter_jsonl(directory / "tasks.jsonl"))
    names = [_short(str(model["model"])) for model in models]
    if len(set(names)) < len(names):
        names = [str(model["model"]) for model in models]
    difference = result.get("difference") or {"gained": [], "lost": []}
    changed = [*difference["gained"], *difference["lost"]]
    others = [task for task in range(len(inputs)) if task not in set(changed)]
    sections = [
        ("From wrong to right", difference["gained"]),
        ("From right to wrong", difference["lost"]),
        ("The other tasks" if changed else "Tasks", others),
    ]
    styles = (files("agl_slime.report") / "web" / "page.css").read_text(encoding="utf-8")
    body, left_out = [*_figures(result, names)], 0
    budget = MOST_BYTES - len(styles)
    for title, tasks in sections if len(models) > 1 else sections[2:]:
        body.append(f"<h2>{title}: {len(tasks)}</h2>")
        for task in tasks:
            block = _task(task, inputs[task], [by_task.get(task, []) for by_task in samples], names)
            budget -= len(block.encode("utf-8", "replace"))
            if budget < 0:
                left_out += 1
            else:
                body.append(block)
    if left_out:
        size = f"{MOST_BYTES / 1e6:g} MB"
        body.append(f'<p class="damage">{left_out} tasks are left out of this file to keep it under {size}.</p>')
    digest = base64.b64encode(hashlib.sha256(styles.encode()).digest()).decode()
    title = _escaped(f"{result['settings']['agent']}: {' and '.join(names)}")
    return _PAGE.format(title=title, digest=digest, styles=styles, body="\n".join(body))


def _short(model: str) -> str:
    """The name of a directory; an address unchanged."""
    return model if "://" in model else Path(model).name or model


def _by_task(lines: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    by_task: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_task.setdefault(line["task"], []).append(line)
    return by_task


def _figures(result: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    figures = [name for name in result["models"][0] if name == "reward" or name.startswith("pass@")]
    rows = [(name, model, model["failed"]) for name, model in zip(names, result["models"], strict=True)]
    if (difference := result.get("difference")) is not None:
        rows.append(("difference on the same tasks", difference, ""))
    yield '<div class="scrolls" tabindex="0"><table><caption>Means with 95 % intervals over tasks. '
    yield f"{result['tasks']} tasks, {result['k']} sample{'s' * (result['k'] > 1)} of each.</caption>"
    yield f"<tr><th></th>{''.join(f'<th>{_escaped(name)}</th>' for name in figures)}<th>failed</th></tr>"
    for name, row, failed in rows:
        estimates = (format_estimate(row.get(figure), of=result["tasks"], sign=row is difference) for figure in figures)
        cells = "".join(f"<td>{text}</td>" for text in estimates)
        yield f'<tr><th scope="row">{_escaped(name)}</th>{cells}<td>{_escaped(failed)}</td></tr>'
    yield "</table></div>"
    for name, model in zip(names, result["models"], strict=True):
        for reason, count in model["failures"].items():
            yield f'<p class="quiet">{_escaped(name)}: {int(count)} x {_escaped(reason)}</p>'


def format_estimate(value: Mapping[str, Any] | None, *, of: int, sign: bool = False) -> str:
    """The mean, its interval, and its number of tasks if it is not all ``of`` them; empty without a value."""
    if not value:
        return ""
    kind = "+.3f" if sign else ".3f"
    between = "" if value["low"] is None else f" [{float(value['low']):{kind}}, {float(value['high']):{kind}}]"
    number = "" if value["tasks"] == of else f" over {int(value['tasks'])} of {of} tasks"
    return f"{float(value['mean']):{kind}}{between}{number}"


def _task(number: int, task: Any, samples: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[str]) -> str:
    """One task: a line of rewards, which opens to the models' conversations next to each other."""
    rewards = " → ".join(", ".join(map(_reward, lines)) or "no sample" for lines in samples)
    sides = "".join(
        f"<section><h3>{_escaped(name)}</h3>{''.join(map(_sample, lines))}</section>"
        for name, lines in zip(names, samples, strict=True)
    )
    task_json = json.dumps(task, ensure_ascii=False, indent=1)
    return (
        f'<details class="task" id="task-{number}"><summary>Task {number}: {rewards}</summary>'
        f'<pre>{_escaped(task_json)}</pre><div class="sides">{sides}</div></details>'
    )


def _reward(line: Mapping[str, Any]) -> str:
    return _escaped(line["failure"] or "failed") if line["reward"] is None else f"{float(line['reward']):.3g}"


def _sample(line: Mapping[str, Any]) -> str:
    why = f": {line['message']}" if line["reward"] is None and line.get("message") else ""
    head = f"sample {line['sample']}, {'failed' if line['reward'] is None else 'reward'} {_reward(line)}{_escaped(why)}"
    messages = "".join(
        f'<p class="quiet">{_escaped(message.get("role", ""))}</p><pre>{_escaped(_message_text(message))}</pre>'
        for message in line.get("messages") or ()
    )
    return f'<article><p class="quiet">{head}</p>{messages}</article>'


def _message_text(message: Mapping[str, Any]) -> str:
    """The content of a message and its tool calls."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    return text + ("\n" + json.dumps(calls, ensure_ascii=False) if calls else "")


def _escaped(value: Any) -> str:
    text = str(value)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]} … ({len(text) - MOST_CHARACTERS} more characters)"
    return html.escape(text.encode("utf-8", "replace").decode())
