"""Arguments of a chat template that keep earlier thinking, switch thinking or set its effort, found by rendering."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agl_slime.errors import PromptError
from agl_slime.tokens.reader import thinking_marks
from agl_slime.tokens.tokenizer import HashedArguments, render_chat

Arguments = dict[str, Any]
Show = Callable[[Mapping[str, Any]], str | None]  # the prompt with further arguments

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Levels of effort, as clients name them."""
_SPELLINGS = {"none": ("none", "no_think")}
_FREE = ("low", "medium", "high")  # of a template that writes any word
_DEFAULT = "high"  # of a template that knows other levels only
_NAMES = re.compile(r"(?<![\w.'\"])\w*(?:thinking|reasoning|history|effort)\w*(?!\w*['\"])")
_PROBE = "SENTINELthoughtSENTINEL"
_QUESTION = {"role": "user", "content": "?"}


def _names(source: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_NAMES.findall(source)))


def thinking_argument(template: Any) -> str:
    """The argument of a ``ChatTemplate`` that keeps earlier thinking, as ``NAME=true`` or ``NAME=false``, or empty."""
    thought = {template.fields.thinking or "": _PROBE}
    probe = [_QUESTION, {"role": "assistant", "content": "!", **thought}, _QUESTION]
    for arguments in ({}, *({name: value} for name in _names(template.source) for value in (True, False))):
        try:
            keeps = _PROBE in template.with_arguments(arguments).render(probe, generation_prompt=True)
        except PromptError:
            continue
        if keeps:
            return "".join(f"{name}={str(value).lower()}" for name, value in arguments.items())
    return ""


@dataclass(frozen=True, slots=True)
class ThinkingRequest:
    """A client's request to think or not (``on``; ``None``: neither), with an effort ``level`` and a ``budget`` of
    tokens. ``switch_field`` and ``level_field`` name the fields that say so."""

    on: bool | None = None
    level: str = ""
    budget: int = 0
    switch_field: str = ""
    level_field: str = ""

    @property
    def fields(self) -> frozenset[str]:
        return frozenset((self.switch_field, self.level_field)) - {""}


def thinking_arguments(template: Any, request: ThinkingRequest) -> tuple[Arguments, frozenset[str]]:
    """The arguments with which a ``ChatTemplate`` serves ``request``, and the fields of the request without effect: the
    template has no argument for them, or the run decides on it."""
    kwargs = HashedArguments(template.kwargs)
    arguments, switched, leveled = _search(template.tokenizer, template.source, kwargs, request)
    always = request.on is True and (template.opens_thinking or template.fields.thinking is not None)
    served = {request.switch_field: switched or always, request.level_field: leveled}
    return arguments, frozenset(name for name in request.fields if not served[name])


@functools.lru_cache(maxsize=64)
def _search(
    tokenizer: Any, source: str, kwargs: HashedArguments, request: ThinkingRequest
) -> tuple[Arguments, bool, bool]:
    """The arguments, and whether they serve the switch and the level."""

    def show(change: Mapping[str, Any]) -> str | None:
        try:
            return render_chat(tokenizer, [_QUESTION], generation_prompt=True, **{**kwargs, **change})
        except PromptError:
            return None

    names, level = _names(source), request.level
    on = request.on if request.on is not None or level not in LEVELS else level != "none"
    if on is None:
        return {}, False, False
    arguments: Arguments = {}
    switches = _switches(show, names, thinking_marks(source)[1], request.budget)
    switched = False
    if switches:
        _, pair = next(iter(switches.items()))
        arguments, switched = _added(show, {}, pair[on], run_decides=not kwargs.keys().isdisjoint(switches))
        if not on:
            return arguments, switched, switched
    levels = _levels(lambda change: show({**arguments, **change}), names)
    if not on:
        level = "none"
    elif level not in LEVELS and "none" in levels and show(levels["none"]) == show({}):
        level = "medium"  # without a level this template does not think
    if level not in LEVELS or not levels:
        return arguments, switched, switched and level in LEVELS
    place = LEVELS.index(level)
    nearest = min(levels, key=lambda word: (abs(LEVELS.index(word) - place), -LEVELS.index(word)))
    run_decides = any("effort" in name for name in kwargs)
    arguments, leveled = _added(show, arguments, levels[nearest], run_decides=run_decides)
    return arguments, switched or leveled, leveled and (bool(levels[nearest]) or nearest == level)


def _added(show: Show, arguments: Arguments, change: Arguments, *, run_decides: bool) -> tuple[Arguments, bool]:
    """``arguments`` with ``change`` if it alters the prompt and the run leaves it open; whether it is served."""
    if show({**arguments, **change}) == show(arguments):
        return arguments, True
    return (arguments, False) if run_decides else ({**arguments, **change}, True)


def _switches(show: Show, names: tuple[str, ...], closing: str, budget: int) -> dict[str, tuple[Arguments, Arguments]]:
    """The arguments that switch thinking, with the settings for off and for on: flags, and budgets of tokens."""
    switches: dict[str, tuple[Arguments, Arguments]] = {}
    for name in names:
        off, on = show({name: False}), show({name: True})
        if off is None or on is None or off == on or "effort" in name:
            continue
        if "True" in on and "True" not in off:
            switches[name] = {name: 0}, {name: budget} if budget else {}
        else:
            inverted = on.rstrip().endswith(closing) and not off.rstrip().endswith(closing)
            switches[name] = {name: inverted}, {name: not inverted}
    return switches


def _levels(show: Show, names: tuple[str, ...]) -> dict[str, Arguments]:
    """The arguments that set each level of effort; empty ones for the template's default."""
    plain, levels = show({}), dict[str, Arguments]()
    for name in names:
        flag = name.removesuffix("_effort")
        candidates = [(level, {name: word}) for level in LEVELS for word in _SPELLINGS.get(level, (level,))]
        without: str | None = show({name: _PROBE})
        if "effort" not in name:
            continue
        if flag in LEVELS:
            candidates, without = [(flag, {name: True})], plain
        elif without is not None and _PROBE in without:
            candidates = [(level, {name: level}) for level in _FREE]
        for level, arguments in candidates:
            if show(arguments) not in (None, without):
                levels.setdefault(level, arguments)
    if levels and plain not in map(show, levels.values()):
        levels.setdefault(_DEFAULT, {})
    return levels
