"""Batched multi-turn rollouts: one sampling call per turn for all live trajectories. Each trajectory is a session in
the agents' loop of turns; the sessions' engine calls wait for each other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agl_slime.agent.scheduler import StopReason
from agl_slime.agent.session import RolloutSession, RolloutStopped, Session
from agl_slime.agent.tools import ToolManager
from agl_slime.agent.turns import run_turns
from agl_slime.buffer.masks import get_loss_mask_generator
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.describe import end_token_ids
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.engine.client.transport import ClientSettings
from agl_slime.errors import ConfigError, ContextOverflowError, EngineProtocolError, TraceError, missing_as_error
from agl_slime.support.threads import run_blocking
from agl_slime.tokens.converter import convert_trajectory
from agl_slime.tokens.formats import ToolParser, find_format, get_tool_parser, parser_for
from agl_slime.tokens.reward import check_reward, reward_number, select_reward
from agl_slime.tokens.segments import Segment, merge_turns
from agl_slime.tokens.template import ChatTemplate
from agl_slime.tokens.tokenizer import ChatTokenizer
from agl_slime.tokens.turn import Trajectory as FinishedTrajectory
from agl_slime.tokens.turn import is_truncated
from agl_slime.types import Sample, sample_from_fields

InputFeature = Mapping[str, Any]
"""``input_ids``: the prompt's token ids."""

Answers = Sequence[Generation | ContextOverflowError]

_TWINKLE_FIELDS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p", "num_samples")


def as_sampling(params: Any) -> SamplingParams | None:
    """``SamplingParams`` from themselves or from an object with twinkle's fields. Raises ``ConfigError``."""
    if params is None or isinstance(params, SamplingParams):
        return params
    if not all(hasattr(params, name) for name in _TWINKLE_FIELDS):
        raise ConfigError(f"sampling_params must be SamplingParams of agl_slime or twinkle, got {params!r:.99}")
    if getattr(params, "prompt_logprobs", None) is not None:
        raise ConfigError(
            f"prompt_logprobs is {params.prompt_logprobs}: rollouts have log-probs of answers only; leave it out"
        )
    penalty = getattr(params, "repetition_penalty", 1.0)
    fields = {name: getattr(params, name) for name in _TWINKLE_FIELDS}
    return SamplingParams(**fields, repetition_penalty=None if penalty == 1 else penalty)


class Sampler(Protocol):
    def sample(self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]) -> Answers:
        """One answer per input, in order, sampled together; ``sampling_params`` has one entry per input. The answer to
        a prompt that does not fit into the model's context is the error; if the error is raised instead, the caller
        bisects the batch."""
        ...


class SGLangSampler:
    """A ``Sampler`` over a running SGLang server or router. It keeps no connection between calls, so it can be pickled.
    ``tokenizer`` is needed to find the end and the text of answers that a weight update aborted."""

    def __init__(self, *, base_url: str, settings: ClientSettings | None = None, tokenizer: Any = None) -> None:
        ends = end_token_ids(getattr(tokenizer, "name_or_path", ""), tokenizer)
        self._options: dict[str, Any] = {"base_url": base_url, "settings": settings, "eos_token_ids": ends}
        self._options["decode"] = getattr(tokenizer, "decode", None)

    def sample(self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]) -> Answers:
        """Sample all inputs. Raises the client's error when the retries of a request fail."""
        return run_blocking(self._sample(inputs, sampling_params))

    async def _sample(self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]) -> Answers:
        async with SGLangClient(**self._options) as client:

            async def generate(input_ids: Sequence[int], params: SamplingParams) -> Generation | ContextOverflowError:
                try:
                    return await client.generate(input_ids, params)
                except ContextOverflowError as error:
                    return error

            pairs = zip(inputs, sampling_params, strict=True)
            return list(await asyncio.gather(*(generate(feature["input_ids"], params) for feature, params in pairs)))


logger = logging.getLogger(__name__)

IGNORED_LABEL = -100

Trajectory = dict[str, Any]
"""``messages`` and any other columns; a rollout returns it with more keys."""
Predicate = Callable[[Mapping[str, Any]], bool]

# Left out of trace files, which are for reading: token ids would make them many times as large.
_NOT_IN_TRACES = frozenset({"input_ids", "labels", "logprobs", "turn_records", "segments"})


class TurnsRollout(ABC):
    """A rollout in the agents' loop of turns: runs a list of trajectories, and returns as many, in the same order, with
    ``messages``, ``turns``, ``stop_reason`` and ``truncated``.

    Args:
        tool_manager: A ``ToolManager`` (or twinkle's) for all trajectories, a list with one for each, or a function
            that makes one for a trajectory; it is closed with the trajectory. Each call may override it, and
            ``sampling_params``.
        max_turns: Most answers of a trajectory.
        tool_parser: Format of tool calls; by default the one of the chat template.
        trace_dir: Directory for a JSON file per trajectory, ``{step}-{ok|fail}-{id}.json``, numbered if the name is
            taken; ``trace_callback`` selects trajectories, ``success_callback`` decides ``ok`` (by default: the model
            ended the trajectory).
    """

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """The rollout as a Ray actor: ``actor = MultiTurnRollout.remote(...)``, then
        ``ray.get(actor.__call__.remote(trajectories))``."""
        with missing_as_error(f"{cls.__name__}.remote needs Ray: pip install ray"):
            import ray
        return ray.remote(cls).remote(*args, **kwargs)

    def __init__(
        self,
        *,
        tool_manager: Any = None,
        sampling_params: Any = None,
        max_turns: int = 6,
        tool_parser: str | ToolParser | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Predicate | None = None,
        success_callback: Predicate | None = None,
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        self._tools = tool_manager
        self._sampling = as_sampling(sampling_params)
        self._max_turns = max_turns
        self._tool_parser = tool_parser
        if trace_dir is not None:
            Path(trace_dir).mkdir(parents=True, exist_ok=True)
        self._traces = trace_dir, trace_callback, success_callback
        self._calls = 0

    def __call__(
        self,
        trajectories: list[Trajectory],
        *,
        tool_manager: Any = None,
        sampling_params: Any = None,
        step: int | None = None,
        global_step: int | None = None,
        **kwargs: Any,
    ) -> list[Trajectory]:
        """Run ``trajectories`` to their ends. ``step``, or ``global_step``, is for the names of trace files; by default
        the number of the call."""
        if kwargs:
            raise ConfigError(f"{', '.join(kwargs)}: unknown; a call takes tool_manager, sampling_params and step")
        if not isinstance(trajectories, (list, tuple)):
            raise ConfigError(f"trajectories must be a list, got {type(trajectories).__name__}")
        step = next(number for number in (step, global_step, self._calls) if number is not None)
        self._calls += 1
        tools: Any = tool_manager if tool_manager is not None else self._tools
        is_factory = callable(tools) and not hasattr(tools, "run") and not hasattr(tools, "tool_infos")
        if is_factory:
            tools = [tools(trajectory) for trajectory in trajectories]
        elif not isinstance(tools, (list, tuple)):
            tools = [tools] * len(trajectories)
        if len(tools) != len(trajectories):
            raise ConfigError(f"tool_manager needs one for each trajectory, got {len(tools)} for {len(trajectories)}")
        tools, sampling = list(map(_tool_manager_of, tools)), as_sampling(sampling_params) or self._sampling
        finished = self._run(trajectories, tools, is_factory, sampling) if trajectories else []
        for number, trajectory in enumerate(finished):
            self._write_trace(trajectory, step, str(trajectory.get("id", number)))
        return finished

    @abstractmethod
    def _run(
        self, trajectories: list[Trajectory], tools: Sequence[Any], close: bool, sampling: SamplingParams | None
    ) -> list[Trajectory]:
        """Run ``trajectories``, each with its ``tools``, which ``close`` closes at its end."""

    def _output(self, trajectory: Trajectory, session: Session, **fields: Any) -> Trajectory:
        conversation = {"messages": session.messages, "turns": len(session.turns)}
        return {**trajectory, **conversation, "tools_called": session.stats.tool_counts(), **fields}

    def _write_trace(self, trajectory: Trajectory, step: int, name: str) -> None:
        directory, is_traced, is_success = self._traces
        try:
            if directory is None or (is_traced is not None and not is_traced(trajectory)):
                return
            ended = trajectory["stop_reason"] == "stop" and not trajectory["truncated"]
            outcome = "ok" if (ended if is_success is None else is_success(trajectory)) else "fail"
            readable = {key: value for key, value in trajectory.items() if key not in _NOT_IN_TRACES}
            name = re.sub(r"[^\w.-]", "_", name)[:100]
            stem = f"{step}-{outcome}-{name}"
            text = json.dumps(readable, ensure_ascii=False, indent=1, default=str) + "\n"
            for number in itertools.count(1):  # other rollouts may write here, too
                with contextlib.suppress(FileExistsError):
                    file = Path(directory) / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
                    with file.open("x", encoding="utf-8") as opened:
                        opened.write(text)
                    return
        except Exception:  # an error of a callback or of the disk must not cost the rollout
            logger.exception("The trace of a trajectory could not be written to %s.", directory)


class _TwinkleTool:
    """A tool of twinkle's ``ToolManager``, which takes calls in OpenAI's form."""

    def __init__(self, manager: Any, info: Mapping[str, Any]) -> None:
        self._manager, self._info = manager, info

    def tool_info(self) -> Mapping[str, Any]:
        return self._info

    def __call__(self, name: str, arguments: dict[str, Any]) -> Any:
        return self._manager({"type": "function", "function": {"name": name, "arguments": arguments}})


def _tool_manager_of(tools: Any) -> Any:
    infos = tools.tool_infos() if hasattr(tools, "tool_infos") else None
    return tools if infos is None else ToolManager(_TwinkleTool(tools, info) for info in infos)


class MultiTurnRollout(TurnsRollout):
    """Batched multi-turn rollouts over a ``Sampler``; other ``options`` as for ``TurnsRollout``. ``template`` is the
    tokenizer, with its chat template. Trajectories are truncated at ``max_trajectory_tokens``.

    A trajectory has ``messages``, and perhaps ``id`` and ``tools``: schemas to declare in place of the manager's (an
    empty list: none). It is returned with its input keys and:

    - ``messages``: the conversation, tool results included. ``turns``: the number of answers.
    - ``input_ids``, ``labels``, ``logprobs``: one entry per token of the whole sequence. For untrained tokens
    ``labels`` has -100, ``logprobs`` 0.0.
    - ``stop_reason``: ``"stop"`` or ``"length"``. ``truncated``: whether a limit ended it. ``end_reason``: its
      ``StopReason``. ``tools_called``: counts of calls.
    - ``segments``: all sequences; several if the chat template rewrites history, and ``input_ids`` is the last.
      ``turn_records``: the turns, for ``trajectory_to_samples``.
    """

    def __init__(
        self, *, sampler: Sampler, template: ChatTokenizer, max_trajectory_tokens: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._sampler = sampler
        self._tokenizer = template
        self._max_tokens = max_trajectory_tokens
        self._parser = get_tool_parser(self._tool_parser) if self._tool_parser else None

    def _run(
        self, trajectories: list[Trajectory], tools: Sequence[Any], close: bool, sampling: SamplingParams | None
    ) -> list[Trajectory]:
        batch = _Batch(self._sampler, live=len(trajectories))
        templates: dict[str, ChatTemplate] = {}
        limits: dict[str, Any] = {"max_turns": self._max_turns, "max_trajectory_tokens": self._max_tokens}

        def session_of(trajectory: Trajectory, manager: Any) -> RolloutSession:
            schemas = trajectory.get("tools", manager.schemas if manager is not None else None) or None
            parser = self._parser or (parser_for if schemas else find_format)(self._tokenizer)
            template = templates.setdefault(repr(schemas), ChatTemplate(tokenizer=self._tokenizer, tools=schemas))
            return RolloutSession(
                client=batch,
                sampling=sampling or SamplingParams(),
                messages=trajectory["messages"],
                tools=manager,
                template=template,
                parser=parser,
                traced=False,
                **limits,
            )

        sessions = [session_of(trajectory, manager) for trajectory, manager in zip(trajectories, tools, strict=True)]

        async def run(session: RolloutSession) -> None:
            try:
                await run_turns(session, task={})
            except RolloutStopped:
                pass
            except ContextOverflowError:  # in the first prompt; it ends only this trajectory
                session.stats.stop_reason = session.stats.stop_reason or StopReason.CONTEXT_OVERFLOW
            finally:
                batch.leave()
                if close and session.tools is not None:
                    await session.tools.aclose()

        async def run_all() -> None:
            await asyncio.gather(*map(run, sessions))

        run_blocking(run_all())
        return list(map(self._finished, trajectories, sessions))

    def _finished(self, trajectory: Trajectory, session: RolloutSession) -> Trajectory:
        segments = [_sequence(segment) for segment in merge_turns(session.turns, self._tokenizer)]
        prompt = [] if segments else session.context.prompt_ids()
        nothing = {"input_ids": prompt, "labels": [IGNORED_LABEL] * len(prompt), "logprobs": None}
        end = session.stats.stop_reason or StopReason.STOP
        cut_off = end in (StopReason.LENGTH, StopReason.ABORTED, StopReason.CONTEXT_OVERFLOW)
        return self._output(
            trajectory,
            session,
            **(segments[-1] if segments else nothing),
            segments=segments,
            stop_reason="length" if cut_off else "stop",
            truncated=end is not StopReason.STOP,
            end_reason=end.value,
            turn_records=session.turns,
        )


class _Batch:
    """The engine client of sessions that are sampled together: a call waits until every live session asks."""

    def __init__(self, sampler: Sampler, *, live: int) -> None:
        self._sampler = sampler
        self._live = live
        self._waiting: list[tuple[asyncio.Future[Generation], Sequence[int], SamplingParams]] = []

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingParams, *, routing_key: str | None = None
    ) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, [*input_ids], sampling))
        self._sample_when_all_ask()
        return await answer

    def leave(self) -> None:
        self._live -= 1
        self._sample_when_all_ask()

    def _sample_when_all_ask(self) -> None:
        self._waiting = [waiting for waiting in self._waiting if not waiting[0].cancelled()]
        if not self._waiting or len(self._waiting) < self._live:
            return
        futures, prompts, params = zip(*self._waiting, strict=True)
        self._waiting = []
        try:  # blocks only the loop of these sessions, which all wait
            answers = self._ask([{"input_ids": prompt} for prompt in prompts], list(params))
        except Exception as error:  # every session raises the engine's error
            answers = [error] * len(futures)
        for future, answer in zip(futures, answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _ask(self, inputs: list[Any], params: list[SamplingParams]) -> Sequence[Generation | Exception]:
        try:
            answers = self._sampler.sample(inputs, params)
        except ContextOverflowError as error:
            if len(inputs) == 1:
                return [error]
            half = len(inputs) // 2  # this sampler does not name the prompt: bisect
            return [*self._ask(inputs[:half], params[:half]), *self._ask(inputs[half:], params[half:])]
        if len(answers) != len(inputs):
            raise EngineProtocolError(f"the sampler returned {len(answers)} answers to {len(inputs)} prompts")
        return answers


def _sequence(segment: Segment) -> dict[str, Any]:
    pairs = zip(segment.token_ids.tolist(), segment.loss_mask.tolist(), strict=True)
    return {
        "input_ids": segment.token_ids.tolist(),
        "labels": [token if trained else IGNORED_LABEL for token, trained in pairs],
        "logprobs": None if segment.log_probs is None else segment.log_probs.tolist(),
    }


def trajectory_to_samples(
    trajectory: Mapping[str, Any],
    *,
    reward: float | Mapping[str, float],
    tokenizer: ChatTokenizer | None = None,
    reward_key: str | None = None,
    **numbers: Any,
) -> list[Sample]:
    """The token-exact Samples of a trajectory that ``MultiTurnRollout`` finished: one, or several when it forked. Of
    several rewards by name ``reward_key`` is trained on, by default the first. ``numbers``: ``index``, ``group_index``,
    ``rollout_id``.

    Raises ``TraceError`` when nothing was sampled, ``RewardError`` when ``reward`` is not finite.
    """
    name = str(trajectory.get("id", numbers.get("index")))
    named = check_reward(reward, source="the judge of a trajectory")
    judged = select_reward(named, first=next(iter(named)), reward_key=reward_key)
    finished = FinishedTrajectory(
        rollout_id=name,
        attempt_id=name,
        task={"label": trajectory["label"]} if "label" in trajectory else {},
        turns=tuple(trajectory["turn_records"]),
        reward=judged.primary,
        rewards=judged.named,
        stop_reason=str(trajectory["end_reason"]),
    )
    metadata: dict[str, Any] = {"tools": trajectory["tools_called"]}
    if judged.missing:
        metadata["rewards_missing"] = [*judged.missing]
    return convert_trajectory(finished, tokenizer, metadata=metadata, **numbers).samples


def messages_to_sample(
    messages: Sequence[Mapping[str, Any]],
    *,
    reward: float,
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] | None = None,
    stop_reason: str = "stop",
    loss_mask_type: str = "auto",
    label: str | None = None,
    **numbers: Any,
) -> Sample:
    """A Sample from text alone, such as a trajectory of ``APIMultiTurnRollout``: re-tokenized, without log-probs, and
    marked in ``metadata["token_source"]``. ``numbers``: ``index``, ``group_index``, ``rollout_id``.

    Raises ``TraceError`` when no message is to be trained, ``RewardError`` when ``reward`` is not finite.
    """
    generator = get_loss_mask_generator(tokenizer, loss_mask_type)
    token_ids, loss_mask = generator.get_loss_mask(messages, tools=tools)
    (response_length,) = generator.get_response_lengths([loss_mask])
    if not 0 < response_length < len(token_ids):
        raise TraceError(
            f"{response_length} of {len(token_ids)} tokens follow the first trained one; an answer is missing"
        )
    return sample_from_fields(
        **numbers,
        prompt=[dict(message) for message in messages if message.get("role") != "assistant"][:1],
        tokens=token_ids,
        response=tokenizer.decode(token_ids[-response_length:], skip_special_tokens=False),
        response_length=response_length,
        loss_mask=loss_mask[-response_length:],
        label=label,
        reward=reward_number(reward, "the judge of messages returned"),
        status=Sample.Status.TRUNCATED if is_truncated(stop_reason) else Sample.Status.COMPLETED,
        metadata={"token_source": "retokenized", "stop_reason": stop_reason, "loss_mask_type": loss_mask_type},
    )
