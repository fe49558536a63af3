"""``agl-slime try``: one task of an agent, with the messages of the model, its tools, the reward and the tokens."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from agl_slime.agent.loading import load_agent
from agl_slime.cli.options import split_env_flags
from agl_slime.cli.settings import train_config
from agl_slime.data.results import MemberResult
from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.report.files import RunDir
from agl_slime.support.terminal import PlainConsole, print_line
from agl_slime.tokens.turn import Trajectory
from agl_slime.tools.evaluation.command import MOST_TASKS, EvalConfig, OtherModel, Prepared, prepare, sampling_with
from agl_slime.tools.evaluation.settings import command_config, parse_command

_A_DAY_S = 86400.0  # a person reads, and a debugger stops, for as long as they like

_RUN_SETTINGS: dict[str, Any] = dict.fromkeys(("temperature", "max_new_tokens", "env", "env_python"), ...)
_RUN_SETTINGS |= {"sglang_url": None, "engine": "embedded"}


@dataclass(frozen=True, kw_only=True)
class TryCommand(OtherModel):
    """Run one task by hand and show the messages of the model, its tools, the reward and the tokens. Exit code 1 when
    the rollout failed."""

    agent: tyro.conf.Positional[str | None] = None
    """path/to/file.py:Class or module:Class; a file with one agent needs no name."""
    task: int = 0
    """The task's number, from 0: of --tasks, or of the tasks that `agl-slime eval` shows."""
    tasks: Path | None = None
    """Tasks as JSON lines; by default the agent's make_task(rng), or the tasks of --model's run."""
    model: Annotated[Path | None, tyro.conf.arg(aliases=["--model-path"])] = None
    """A Hugging Face directory, a run's directory, smollm2, or a name on the hub; by default the model at --sglang-url
    or --openai-url, or for agents of the lookup task the tiny policy."""
    settings: Annotated[Mapping[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Settings of a run by their names, which take precedence over the run's own."""


def main(arguments: Sequence[str]) -> None:
    ours, env_flags = split_env_flags(arguments)
    env_options = {"env_arguments": env_flags or None}
    config = parse_command(TryCommand, _RUN_SETTINGS, prog="agl-slime try", arguments=ours, **env_options)
    names = {each.name for each in fields(config)} - {"agent", "settings"}
    options = {name: getattr(config, name) for name in names}
    asyncio.run(try_task(config.agent, **options, **config.settings))


async def try_task(
    agent: str | None,
    task: int = 0,
    *,
    model: Path | None = None,
    write: Callable[[str], None] = print_line,
    **settings: Any,
) -> None:
    """Run task number ``task`` of ``agent`` and describe it; ``settings`` are fields of ``EvalConfig`` and settings
    of a run, by name. Raises ``AglSlimeError`` when the rollout failed."""
    if not 0 <= task < MOST_TASKS:
        raise ConfigError(f"--task must be from 0 to {MOST_TASKS - 1}, got {task}")
    settings = {"rollout_timeout": _A_DAY_S, "agent": agent, **settings}
    if model is None and settings.get("openai_url") is None:
        model = await _default_model(settings)
    models = () if model is None else (model,)
    ready = await prepare(command_config(EvalConfig, models=models, n_tasks=task + 1, **settings))
    if task >= len(ready.tasks):
        raise ConfigError(f"--task {task}: there are {len(ready.tasks)} tasks, numbered from 0")
    member = await _roll_out(ready, ready.tasks[task])
    for line in describe(member):
        write(line)
    if not member.ok:
        raise AglSlimeError("the rollout failed: it would not be trained on")


async def _default_model(settings: Mapping[str, Any]) -> Path:
    from agl_slime.cli.start import default_model
    from agl_slime.engine.client.client import SGLangClient

    settings_of_agent = {name: settings[name] for name in ("agent", "env") if settings.get(name) is not None}
    config, described = train_config(**settings_of_agent), None
    if (url := settings.get("sglang_url")) is not None:
        async with SGLangClient(base_url=url) as client:
            described = await client.probe()
    return default_model(config, None if "env" in settings_of_agent else load_agent(config.agent), described)


async def _roll_out(ready: Prepared, task: Any) -> MemberResult:
    """Start the engine of ``ready``, and return the finished rollout of the task."""
    from agl_slime.tools.evaluation.samples import SampleFile, take_samples

    with tempfile.TemporaryDirectory() as scratch, SampleFile(Path(scratch) / "one.jsonl") as file:
        options: dict[str, Any] = {"directory": RunDir(Path(scratch)), "console": PlainConsole(stderr=True)}
        async with sampling_with(ready, ready.models[0], max_concurrent=1, **options) as sampling:
            await take_samples([task], k=1, into=file, sampling=sampling, on_progress=lambda *_: None)
        assert file.last is not None  # take_samples returns when the sample has ended
        return file.last


def describe(member: MemberResult) -> Iterator[str]:
    """The rollout in lines: its conversations with the tokens of each turn, tools, reward or failure, and Samples."""
    trajectory = member.trajectory if isinstance(member.trajectory, Trajectory) else None
    if trajectory is not None:
        yield from _conversations(trajectory)
    counts: Mapping[str, Any] = (member.samples[0].metadata.get("tools") or {}) if member.samples else {}
    if counted := [f"{name} {_count(value)}" for name, value in counts.items() if value]:
        yield f"tools: {'; '.join(counted)}"
    if not member.ok:
        yield f"failed: {member.failure} {member.failure_message}"
    else:
        others = [*member.rewards.items()][1:]  # the first is trained
        rewards = ", ".join(f"{name} {value:g}" for name, value in others)
        yield f"reward: {member.reward:g}" + (f" ({rewards})" if rewards else "")
    if member.samples:
        trained = sum(sum(sample.loss_mask or ()) for sample in member.samples)
        lengths = " + ".join(str(len(sample.tokens)) for sample in member.samples)
        samples = f"{len(member.samples)} Sample{'s' if len(member.samples) > 1 else ''} of {lengths}"
        yield f"tokens: {trained} of {member.sampled_tokens} sampled are trained, in {samples}"
    if trajectory is not None and trajectory.truncated:
        yield f"cut off: {trajectory.stop_reason or trajectory.turns[-1].finish_reason}"


def _conversations(trajectory: Trajectory) -> Iterator[str]:
    """Each message once: of a turn the messages that no earlier turn began with, then its answer and its tokens."""
    printed: list[tuple[Mapping[str, Any], ...]] = []
    for number, turn in enumerate(trajectory.turns):
        messages = turn.messages or ()
        shared = max((len(turn) for turn in printed if messages[: len(turn)] == turn), default=0)
        if printed and not shared:
            yield "(another conversation)"
        # the next message is that turn's answer, which was shown as the model wrote it
        answered = shared and [message.get("role") for message in messages[shared : shared + 1]] == ["assistant"]
        for message in messages[shared + bool(answered) :]:
            yield f"{message.get('role')}: {_text(message)}"
        yield f"assistant: {turn.text}"
        if len(turn.prompt_ids):
            about = f"{len(turn.prompt_ids)} tokens of prompt, {len(turn.response_ids)} sampled"
            yield f"  [turn {number + 1}: {about}, {turn.finish_reason}, {turn.latency_s:.1f} s]"
        printed.append(messages)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = (part if isinstance(part, Mapping) else {"text": part} for part in content)
        content = " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in texts)
    calls = (call.get("function", call) for call in message.get("tool_calls") or ())
    called = [f"{call.get('name')}({call.get('arguments')})" for call in calls]
    return " ".join([str(content), *called] if content else called)


def _count(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
