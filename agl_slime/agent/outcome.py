"""The end of a rollout: its reward functions and the choice of its answers that are trained.

Reward functions are in the form of ms-swift's outcome reward models (ORMs), called with lists, here of one rollout.

    class Accuracy(ORM):
        def __call__(self, completions, solution, **kwargs):
            return [float(wanted in text) for text, wanted in zip(completions, solution)]

    class MathAgent(SGLangLitAgent):
        reward_functions = [Accuracy]  # classes, functions, or registered names: orms["accuracy"] = Accuracy

``completions`` are last answers. Every column of the task is passed as a list, and so are ``messages`` (the
conversation), ``is_truncated`` and ``rollout_infos`` (a scheduler's notes). A function that does not apply returns
``[None]``.

``loss_scale`` "default" trains every sampled answer, "last_round" the last one. A function ``scale(messages, turn,
turns)`` gets the conversation up to and including an answer, the answer's number from 1 and the number of turns, and
returns 1 to train it or 0 to keep it as context. Other weights are refused: slime's loss masks are 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from agl_slime.errors import ConfigError, RewardError
from agl_slime.support.ranges import makes_callables, takes
from agl_slime.support.registry import Registry
from agl_slime.support.threads import call_user_code
from agl_slime.tokens.turn import Trajectory, Turn

LossScale: TypeAlias = Literal["default", "last_round"] | Callable[[list[dict[str, Any]], int, int], float]


def check_loss_scale(scale: Any) -> None:
    """Raise ``ConfigError`` when ``scale`` is no loss scale."""
    if scale not in ("default", "last_round") and not (callable(scale) and (takes(scale, 3) or takes(scale, 2))):
        raise ConfigError(f"loss_scale must be 'default', 'last_round' or a function, got {scale!r}")


def untrained_turns(scale: LossScale, turns: Sequence[Turn]) -> tuple[int, ...]:
    """Indices of the turns that are context only. Raises ``ConfigError`` when ``scale`` leaves no turn to train,
    returns another weight than 0 or 1, or is no loss scale."""
    sampled = [index for index, turn in enumerate(turns) if len(turn.response_ids)]
    if scale == "default":
        return ()
    if scale == "last_round":
        return tuple(sampled[:-1])
    check_loss_scale(scale)
    assert callable(scale)
    left_out = []
    for index in sampled:
        messages = [*map(dict, turns[index].messages or ()), {"role": "assistant", "content": turns[index].text}]
        weight = scale(messages, index + 1, len(turns))
        if weight not in (0, 1):
            raise ConfigError(f"loss_scale must return 0 or 1 for each answer, got {weight!r} for answer {index + 1}")
        if not weight:
            left_out.append(index)
    if sampled and len(left_out) == len(sampled):
        raise ConfigError(f"loss_scale leaves all {len(sampled)} answers of a rollout out; nothing could be trained")
    return tuple(left_out)


PROMPT_COLUMNS = frozenset({"messages", "prompt"})
_COLUMNS = ("messages", "is_truncated", "rollout_infos")  # beside the task's


class ORM:
    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, completions: list[str], **kwargs: Any) -> list[Any]:
        """A number, or ``None``, for each completion."""
        raise NotImplementedError(f"{type(self).__name__} must implement __call__(completions, **kwargs)")


class AsyncORM(ORM):
    async def __call__(self, completions: list[str], **kwargs: Any) -> list[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError(f"{type(self).__name__} must implement __call__(completions, **kwargs)")


orms: Registry[Any] = Registry("reward function")


def check_functions(reward_functions: Sequence[Any]) -> None:
    """Raise ``ConfigError`` for an unregistered name, and for what cannot be made or called."""
    for entry in reward_functions:
        function = orms[entry] if isinstance(entry, str) else entry
        is_class = isinstance(function, type)
        calls = makes_callables(function) if is_class else callable(function)
        if not calls or (is_class and not takes(function, 0)):
            raise ConfigError(f"reward_functions has {entry!r:.80}: give classes, functions, or registered names")
        if not takes(function.__call__ if is_class else function, 1 + is_class, *_COLUMNS):
            raise ConfigError(f"reward_functions has {entry!r:.80}, which must take completions and **kwargs")


def make_functions(reward_functions: Sequence[Any]) -> dict[str, Any]:
    """The functions of an agent's ``reward_functions`` by name. Raises ``ConfigError`` for an unregistered name."""
    functions: dict[str, Any] = {}
    for entry in reward_functions:
        function = orms[entry] if isinstance(entry, str) else entry
        name = entry if isinstance(entry, str) else getattr(entry, "__name__", type(entry).__name__)
        name = name if name not in functions else f"{name}_{len(functions)}"
        functions[name] = function() if isinstance(function, type) else function
    return functions


async def reward_of(functions: Mapping[str, Any], task: Mapping[str, Any], trajectory: Trajectory) -> Any:
    """The value of a single function; with several their sum as ``reward``, and each under its name.

    Raises ``RewardError`` for a function that returned no list of one entry, and any error of the functions."""
    columns = {name: [value] for name, value in task.items() if name not in PROMPT_COLUMNS}
    infos = dict(trajectory.metadata.get("rollout_infos") or {})
    columns |= zip(_COLUMNS, ([[*map(dict, trajectory.messages)]], [trajectory.truncated], [infos]), strict=True)
    rewards: dict[str, Any] = {}
    for name, function in functions.items():
        values = await call_user_code(function, [trajectory.response], **columns)
        if not isinstance(values, (list, tuple)) or len(values) != 1:
            raise RewardError(f"reward function {name} returned {values!r:.80}; expected a list with one number")
        rewards[name] = values[0]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    applied = {name: value for name, value in rewards.items() if value is not None}
    return {"reward": sum(applied.values()) if applied else None, **applied}
