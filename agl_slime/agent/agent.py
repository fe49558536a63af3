"""``SGLangLitAgent``: the base class of agents that talk to SGLang.

A subclass implements ``compute_reward``, perhaps ``build_prompt``, and for several turns declares ``tools`` or a
``scheduler``, or overrides ``run``. Sync user code runs in threads; async methods run on the event loop that all
rollouts share.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from agl_slime.agent.access import LLM_RESOURCE, EngineAccess, limits_of, sampling_of
from agl_slime.agent.chat_api import ChatApi
from agl_slime.agent.chat_session import ChatSession
from agl_slime.agent.outcome import (
    LossScale,
    check_functions,
    check_loss_scale,
    make_functions,
    reward_of,
    untrained_turns,
)
from agl_slime.agent.partial import PartialRollouts
from agl_slime.agent.scheduler import MultiTurnScheduler, schedulers
from agl_slime.agent.session import RolloutSession, RolloutStopped, write_span
from agl_slime.agent.tools import ToolError, ToolManager, check_tools
from agl_slime.agent.turns import run_turns
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.client.transport import ClientSettings
from agl_slime.errors import ConfigError
from agl_slime.support.agl import LLM, LitAgent, NamedResources, Rollout, emit_reward, make_link_attributes
from agl_slime.support.ranges import check_ranges, takes
from agl_slime.support.threads import call_user_code, run_user_code
from agl_slime.tokens import attributes as names
from agl_slime.tokens.formats import ToolParser, get_tool_parser, parser_for
from agl_slime.tokens.images import ImageSettings
from agl_slime.tokens.reward import check_reward, split_missing
from agl_slime.tokens.tokenizer import ChatTokenizer, check_template_kwargs, has_chat_template
from agl_slime.tokens.turn import Trajectory

logger = logging.getLogger(__name__)


class SGLangLitAgent(LitAgent[dict[str, Any]]):
    """Runs one task as a conversation with SGLang and scores it.

    Subclass it and implement ``compute_reward``. Several turns by declaration::

        class Searcher(SGLangLitAgent):
            tools = [search, OpenPage]      # functions, objects with a schema, or classes made for each rollout
            max_turns = 6

            def compute_reward(self, task, response):
                return 1.0 if response.strip() == task["label"] else 0.0

    The engine, the model (whose tokenizer is loaded from ``LLM.model``) and the sampling parameters come from the
    resource ``main_llm``; ``tokenizer``, ``sampling``, ``client`` and ``client_settings`` override it.
    """

    tools: Sequence[Any] = ()  # the model's tools; see agl_slime.agent.tools
    tools_in_prompt: bool = True  # False: the prompt itself, not the chat template, declares the tools
    tool_parser: str | ToolParser | None = None  # format of tool calls; None: as the chat template writes them
    tool_timeout_s: float = 60.0  # time limit of one tool call
    max_tool_result_chars: int | None = None  # longer results are cut
    stop_on_tool_error: bool = False  # end the rollout when a tool fails; False: the model sees the error
    scheduler: MultiTurnScheduler | type[MultiTurnScheduler] | str | None = None
    """Decides what follows an answer without calls: one object for all rollouts, its class, or its registered name."""
    keep_stop_token: bool = False  # continue a finished answer after its stop token, in one Sample
    max_turns: int | None = None  # most answers of a rollout
    max_trajectory_tokens: int | None = None  # prompt and answers; None: the model's context length
    reward_functions: Sequence[Any] = ()  # in the form of ms-swift's ORMs, instead of compute_reward: see agent.outcome
    loss_scale: LossScale = "default"  # answers to train: all, "last_round", or chosen by a function
    template_kwargs: Mapping[str, Any] = {}  # chat template arguments, over the run's: {"enable_thinking": False}
    image_settings: ImageSettings = ImageSettings()  # limits of images in messages and tool results
    partial: PartialRollouts | None = None  # keeps sampled tokens of unfinished rollouts for a resumed run
    _functions: Mapping[str, Any] | None = None  # reward_functions by name, made at the first reward
    chat_api: ChatApi | None = None  # replaces the engine in rollouts that are scored and never trained on

    def __init__(
        self,
        *,
        tokenizer: ChatTokenizer | None = None,
        sampling: SamplingParams | None = None,
        client: Any = None,
        client_settings: ClientSettings | None = None,
        trained_agents: str | None = None,
    ) -> None:
        super().__init__(trained_agents=trained_agents)
        self._sampling = sampling
        self._client = client
        self._access = EngineAccess(tokenizer=tokenizer, settings=client_settings)

    def check_settings(self) -> None:
        """Raise ``ConfigError`` for an attribute that no rollout could use, before rollouts are spent on it."""

        def is_instance(kind: type) -> Callable[[Any], bool]:
            return lambda value: isinstance(value, kind)

        checked_by_type = "tools_in_prompt stop_on_tool_error keep_stop_token template_kwargs tools reward_functions"
        check_ranges(
            self,
            ("max_turns max_trajectory_tokens max_tool_result_chars", lambda value: value >= 1, "at least 1"),
            ("tool_timeout_s", lambda value: value > 0, "above 0 seconds"),
            ("image_settings", is_instance(ImageSettings), "ImageSettings"),
            (checked_by_type, lambda _: True, ""),
            (
                "scheduler",
                lambda value: isinstance(value, str) or callable(getattr(value, "run", None)),
                "a MultiTurnScheduler, its class or registered name",
            ),
            ("chat_api", is_instance(ChatApi), "a ChatApi"),
            ("partial", is_instance(PartialRollouts), "PartialRollouts"),
            ("_sampling", is_instance(SamplingParams), "SamplingParams"),
            named=lambda name: f"{name.lstrip('_')} of {type(self).__name__}",
        )
        check_loss_scale(self.loss_scale)
        check_functions(self.reward_functions)
        check_tools(self.tools)
        check_template_kwargs(self.template_kwargs, f"template_kwargs of {type(self).__name__}")
        if isinstance(self.scheduler, str):
            _ = schedulers[self.scheduler]
        if self.tool_parser is not None:
            get_tool_parser(self.tool_parser)
        counts = {"build_prompt": 1, "build_tools": 1, "run": 2, "score": 2, "compute_reward": 2}
        for name, count in counts.items():
            if not callable(method := getattr(self, name)):
                raise ConfigError(f"{name} of {type(self).__name__} must be a method, got {method!r:.80}")
            if not takes(method, count):
                words = f"must take {count} argument{'s' if count > 1 else ''}"
                raise ConfigError(f"{name}{inspect.signature(method)} of {type(self).__name__} {words}")

    def compute_reward(self, task: dict[str, Any], response: str) -> Any:
        """The reward of the last answer: a number, or a dict of named numbers. A run trains on one name: its
        reward key, or the first of the first rollout."""
        raise NotImplementedError(f"{type(self).__name__} must implement compute_reward(task, response)")

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]] | str:
        """Chat messages for a task, or a string: a user message, or the raw prompt of a model without chat template.
        The default takes ``task["messages"]`` or ``task["prompt"]``, without an assistant's (the dataset's) answer."""
        prompt: Any = task.get("messages", task.get("prompt"))
        last = prompt[-1] if isinstance(prompt, list) and len(prompt) > 1 else None
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            _log_dropped_answer()
            return prompt[:-1]
        if prompt and isinstance(prompt, (str, list)):
            return prompt
        keys = sorted(map(str, task))
        raise ConfigError(f"the task has neither `prompt` nor `messages` (it has {keys}); or override build_prompt")

    def build_tools(self, task: dict[str, Any]) -> Sequence[Any]:
        """The tools of one rollout; by default ``tools``."""
        return self.tools

    async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
        """The conversation. The default asks until an answer calls no tool and the scheduler ends the rollout."""
        scheduler = self._scheduler(session)
        errors = get_args(ToolError) if self.stop_on_tool_error else ()
        await run_turns(session, task=task, scheduler=scheduler, stop_on_tool_errors=errors)

    async def score(self, task: dict[str, Any], trajectory: Trajectory) -> Any:
        """The reward of the rollout: by ``reward_functions``, else by ``compute_reward`` of the last answer."""
        if self.reward_functions:
            if self._functions is None:
                self._functions = await run_user_code(make_functions, self.reward_functions)
            return await reward_of(self._functions, task, trajectory)
        return await call_user_code(self.compute_reward, task, trajectory.response)

    async def rollout_async(self, task: dict[str, Any], resources: NamedResources, rollout: Rollout) -> None:
        """One rollout: conversation and reward, written as spans. Raises every error but ``RolloutStopped``."""
        tools = ToolManager(timeout_s=self.tool_timeout_s, max_result_chars=self.max_tool_result_chars, task=task)
        try:
            session = await self._open_session(task, resources, rollout, tools)
            try:
                await self.run(task, session)
            except RolloutStopped as stopped:  # a limit, not a failure: score the answers so far
                logger.debug("rollout %s stopped: %s", rollout.rollout_id, stopped)
            await self._emit_reward(task, rollout, session)
        except Exception:
            if self.partial is not None:
                self.partial.drop(rollout.rollout_id)
            raise
        finally:
            await tools.aclose(keep=self.tools)

    async def _emit_reward(self, task: dict[str, Any], rollout: Rollout, session: RolloutSession) -> None:
        stats, scale = session.stats, self.loss_scale
        if callable(scale):
            if inspect.ismethod(scale) and len(inspect.signature(scale).parameters) == 2:
                scale = scale.__func__  # a plain function declared on the class, bound by attribute access
            stats.untrained_turns = await run_user_code(untrained_turns, scale, session.turns)
        else:
            stats.untrained_turns = untrained_turns(scale, session.turns)
        trajectory = Trajectory(
            rollout_id=rollout.rollout_id,
            attempt_id=getattr(getattr(rollout, "attempt", None), "attempt_id", ""),
            task=task,
            mode=rollout.mode,
            turns=tuple(session.turns),
            stop_reason=stats.stop_reason.value if stats.stop_reason is not None else "",
            metadata=stats.metadata(),
            tools={} if session.tools is None else session.tools.objects,
        )
        reward = await call_user_code(self.score, task, trajectory)
        emit_named(reward, source=f"{type(self).__name__}.compute_reward", attributes=stats.attributes())
        for role, reward in stats.rewards.items():
            link = make_link_attributes({names.ROLE: role})
            emit_named(reward, source=f"the reward of role {role!r}", attributes=link)

    async def aclose(self) -> None:
        """Close the connections. The runner calls it on its event loop when it ends."""
        await self._access.aclose()
        if self.chat_api is not None:
            await self.chat_api.aclose()

    async def _open_session(
        self, task: dict[str, Any], resources: NamedResources, rollout: Rollout, tools: ToolManager
    ) -> Any:
        """A ``RolloutSession``, or with ``chat_api`` a ``ChatSession``."""
        llm = resources.get(LLM_RESOURCE)
        if not isinstance(llm, LLM):
            raise ConfigError(f"the resources must hold an LLM named {LLM_RESOURCE!r}, they hold {sorted(resources)}")
        api, llm = self.chat_api, llm if self.chat_api is not None else await self._access.engine(llm)
        tokenizer = None if api is not None else await self._access.tokenizer(llm)

        def prepare() -> Any:
            for tool in self.build_tools(task) or ():
                tools.register(tool)
            chat = tokenizer is None or has_chat_template(tokenizer) or self.template_kwargs.get("chat_template")
            role = "user" if chat else "text"
            return _messages(self.build_prompt(task), f"{type(self).__name__}.build_prompt", role)

        cls, base = type(self), SGLangLitAgent
        no_user_code = (cls.build_prompt, cls.build_tools) == (base.build_prompt, base.build_tools) and not self.tools
        messages = prepare() if no_user_code else await call_user_code(prepare)
        offered = bool(tools.names)
        common: dict[str, Any] = {
            "sampling": self._sampling or sampling_of(llm),
            "messages": messages,
            "tools": tools if offered else None,
            "rollout_id": rollout.rollout_id,
            "max_turns": self.max_turns,
        }
        declared = tools.schemas if offered else _schemas_of(task)
        schemas = declared if self.tools_in_prompt else None
        if tokenizer is None:
            assert api is not None
            parser = get_tool_parser(self.tool_parser) if offered and self.tool_parser else None
            complete = functools.partial(api.complete, tools=schemas)
            return ChatSession(complete=complete, write=write_span, parser=parser, **common)
        client = self._client or self._access.client(llm, tokenizer)
        parser = None
        if offered:
            parser = get_tool_parser(self.tool_parser or parser_for(tokenizer, self.template_kwargs))
        return RolloutSession(
            client=client if self.partial is None else self.partial.client(client, rollout),
            parser=parser,
            template=self._access.template(tokenizer, schemas, self.template_kwargs, llm=llm),
            model=llm.model,
            max_trajectory_tokens=self.max_trajectory_tokens,
            keep_stop_token=self.keep_stop_token,
            image_settings=self.image_settings,
            **limits_of(rollout),
            **common,
        )

    def _scheduler(self, session: RolloutSession) -> MultiTurnScheduler | None:
        scheduler = self.scheduler
        if isinstance(scheduler, str):
            self.scheduler = scheduler = schedulers[scheduler](max_turns=self.max_turns)
        elif isinstance(scheduler, type):
            self.scheduler = scheduler = scheduler(max_turns=self.max_turns)
        if scheduler is not None and getattr(scheduler, "tokenizer", None) is None:
            scheduler.tokenizer = session.tokenizer
        return scheduler


def _schemas_of(task: Any) -> list[Any] | None:
    """Tools that a task declares by ``tools`` in OpenAI's form, for an agent that has none of its own: their calls are
    not executed, and the reward reads them."""
    declared = task.get("tools") if isinstance(task, Mapping) else None
    if not isinstance(declared, list) or not all(isinstance(tool, Mapping) and "function" in tool for tool in declared):
        return None
    return declared or None


@functools.cache
def _log_dropped_answer() -> None:
    logger.info(
        "A task ends with an assistant message, taken for the dataset's answer and not shown to the model. To have the "
        "model continue that message, return it from build_prompt."
    )


def emit_named(reward: Any, *, source: str, attributes: Mapping[str, Any]) -> None:
    """Emit a number, or numbers by name, as a reward span. Raises ``RewardError``."""
    rewards, missing = split_missing(check_reward(reward, source=source))
    emit_reward(rewards, primary_key=next(iter(rewards)), attributes={**attributes, **missing})


def _messages(prompt: Any, source: str, role: str) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": role, "content": prompt}]
    if isinstance(prompt, (list, tuple)) and all(isinstance(message, Mapping) for message in prompt):
        return list(prompt)
    raise ConfigError(f"{source} must return chat messages (a list of dicts) or a string, got {prompt!r:.99}")
