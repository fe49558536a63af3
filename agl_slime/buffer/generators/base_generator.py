"""A generator for mathematics with rule-based rewards, and a template for others.

Copy this file to ``<name>_generator.py`` in another directory, change ``TASK_TYPE``, and pass a rollout function and a
reward function to ``BaseGenerator.entry``. Both may be sync (run in threads, with an ``openai.OpenAI`` client) or async
(with an ``openai.AsyncOpenAI`` client).
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import random
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from fractions import Fraction
from pathlib import Path
from typing import Any

from agl_slime.buffer.client import Row, failed_item, item_of, plan, read_rows, write_items
from agl_slime.buffer.stages import Item
from agl_slime.errors import RewardError
from agl_slime.support.threads import ThreadPool

logger = logging.getLogger(__name__)

TASK_TYPE = "math"

# Sent with every request; generators like those in slime's documentation fill it before they start.
SAMPLING_PARAMS: dict[str, Any] = {}

_ATTEMPTS = 6
_PAUSE_S = 0.5

Message = dict[str, Any]

# Of an item: the same draws of seeds in each run.
_draws: ContextVar[Any] = ContextVar("draws", default=random)


async def query_single_turn(
    client: Any, messages: Sequence[Message], sampling_params: Mapping[str, Any], tools: Any = None
) -> tuple[list[Message], str]:
    """One turn: returns the conversation with the answer, and the finish reason.

    A weight update aborts the engine's requests (``finish_reason == "abort"``); the text so far is then continued, with
    the rest of ``max_tokens``.
    """
    conversation = [dict(message) for message in messages]
    history = conversation[:-1] if conversation and conversation[-1]["role"] == "assistant" else conversation
    text, used = "", 0
    limit, seed = sampling_params.get("max_tokens"), _draws.get().randrange(1, 10_000_000)
    for attempt in range(_ATTEMPTS):
        request: dict[str, Any] = {**sampling_params, "messages": conversation, "model": "custom", "stream": False}
        request["seed"] = seed
        if tools:
            request["tools"] = tools
        if text:
            request["messages"] = [*conversation, {"role": "assistant", "content": text}]
            resumed = {"continue_final_message": True, "add_generation_prompt": False}
            request["extra_body"] = {**sampling_params.get("extra_body", {}), **resumed}
        if limit is not None:
            if used >= limit:
                return [*history, {"role": "assistant", "content": text}], "length"
            request["max_tokens"] = limit - used
        response = await client.chat.completions.create(**request)
        if not response.choices:
            raise RuntimeError("the engine answered without choices")
        choice = response.choices[0]
        text += choice.message.content or ""
        if choice.finish_reason != "abort":
            return [*history, {"role": "assistant", "content": text}], str(choice.finish_reason)
        used += response.usage.completion_tokens if response.usage is not None else 0
        await asyncio.sleep(_PAUSE_S * random.uniform(0.5, 1.0) * 2**attempt)
    raise RuntimeError(f"the engine aborted the answer {_ATTEMPTS} times")


def get_rule_based_math_reward(item: Mapping[str, Any]) -> float:
    r"""1.0 when the last ``\boxed{…}`` of the last message is ``item["label"]``, else 0.0. Raises ``RewardError``
    without a label."""
    label = item.get("label")
    if label is None:
        raise RewardError("the item has no label to compare the answer with", reason="no_label")
    return boxed_reward(str(item["messages"][-1].get("content") or ""), str(label))


class BaseGenerator:
    """Writes ``num_repeat_per_sample`` items for each instance of an input file, in each of ``num_epoch`` epochs.

    ``num_process`` rollouts run at a time. ``num_repeats`` multiplies the epochs. See ``agl_slime.buffer.client.plan``
    for ``skip_instance_ids`` and ``partial_groups``. ``queue_size`` exists for compatibility: there is no queue.
    """

    def __init__(
        self,
        remote_engine_url: str,
        remote_buffer_url: str,
        num_repeat_per_sample: int = 1,
        queue_size: int = 1_000_000,
        num_process: int = 10,
        task_type: str = TASK_TYPE,
        max_tokens: int | None = None,
        num_repeats: int = 1,
        skip_instance_ids: Iterable[Any] | None = None,
        *,
        partial_groups: Iterable[Mapping[str, Any]] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        url = remote_engine_url.rstrip("/")
        self._engine_url = url if "/v1" in url else f"{url}/v1"
        self._buffer_url, self._seed = remote_buffer_url, seed
        self._concurrency, self._repeats = max(1, num_process), num_repeats
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        self._sampling = {**SAMPLING_PARAMS, **limit, **(sampling_params or {})}
        self._payload: dict[str, Any] = {"num_repeat_per_sample": num_repeat_per_sample}
        self._payload |= {"skip_instance_ids": skip_instance_ids, "partial_groups": partial_groups}

    def entry(
        self, input_file: str, rollout_func: Callable[..., Any], reward_func: Callable[..., Any], num_epoch: int = 1
    ) -> None:
        """Run to the end of the last epoch."""
        asyncio.run(self.run(input_file, rollout_func, reward_func, num_epoch))

    async def run(
        self, input_file: str, rollout_func: Callable[..., Any], reward_func: Callable[..., Any], num_epoch: int = 1
    ) -> None:
        rows = read_rows(Path(input_file))
        client = self._make_client(inspect.iscoroutinefunction(rollout_func))
        pool = ThreadPool(name="rollout", max_running=self._concurrency)

        async def call(function: Callable[..., Any], *args: Any) -> Any:
            return await (function(*args) if inspect.iscoroutinefunction(function) else pool.run(function, *args))

        async def make_item(row: Row, epoch: int, member: int) -> Item:
            _draws.set(random.Random(f"{self._seed}/{row['instance_id']}/{epoch}/{member}"))
            uid = uuid.uuid4().hex
            try:
                result = await call(rollout_func, client, copy.deepcopy(row["prompt"]), dict(self._sampling))
                messages, finish_reason = result if isinstance(result, tuple) else (result, "stop")
                reward = float(await call(reward_func, {**row, "uid": uid, "messages": messages}))
                if not math.isfinite(reward):
                    raise RewardError(f"the reward is {reward}; expected a finite number")
                turns = sum(message["role"] == "assistant" for message in messages)
            except Exception as error:  # a rollout may fail in any way; its item has the error
                logger.warning("A rollout of %s failed: %s: %s", row["instance_id"], type(error).__name__, error)
                return failed_item(row, epoch, f"{type(error).__name__}: {error}", uid=uid)
            return item_of(row, epoch, uid, messages, reward, {"finish_reason": finish_reason, "round_number": turns})

        try:
            work = plan(rows, {**self._payload, "num_epoch": num_epoch * self._repeats})
            await write_items(work, make_item, url=self._buffer_url, limit=self._concurrency)
        finally:
            closed = client.close()
            if inspect.isawaitable(closed):
                await closed

    def _make_client(self, is_async: bool) -> Any:
        import openai  # comes with Agent Lightning; slow to import

        options: dict[str, Any] = {"api_key": "none", "base_url": self._engine_url, "max_retries": 5, "timeout": 3600.0}
        # the engine is in the cluster: ignore proxies of the environment
        if is_async:
            return openai.AsyncOpenAI(**options, http_client=openai.DefaultAsyncHttpxClient(trust_env=False))
        return openai.OpenAI(**options, http_client=openai.DefaultHttpxClient(trust_env=False))


def run_rollout(data: dict[str, Any]) -> None:
    """Entry point: the buffer passes the payload of ``/start_rollout``."""
    generator = BaseGenerator(
        data["remote_engine_url"],
        data["remote_buffer_url"],
        num_repeat_per_sample=int(data["num_repeat_per_sample"]),
        num_process=int(data.get("num_process", 100)),
        task_type=data["task_type"],
        skip_instance_ids=data.get("skip_instance_ids"),
        partial_groups=data.get("partial_groups"),
        max_tokens=int(data["max_tokens"]) if "max_tokens" in data else None,
        sampling_params=data.get("sampling_params"),
        seed=data.get("seed", 0),
    )
    generator.entry(data["input_file"], query_single_turn, get_rule_based_math_reward, int(data.get("num_epoch", 1)))


_BRACES = re.compile(r"\\boxed\{|[{}]")
_FRACTION = re.compile(r"^(-?)\\[dt]?frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}$")
_NOISE = re.compile(r"\\(?:left|right|,|;|!|:| )|\$|\\text\{([^{}]*)\}|\\(?:mathrm|mathbf)\{([^{}]*)\}|\s+")
# A number of limited size: commas between thousands only, and no huge exponent.
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d{1,400})?(\.\d{0,400})?(e[+-]?\d{1,3})?", re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{…}``, with nested braces; ``None`` when there is none."""
    opened: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match.group() != "}":
            opened.append((match.end(), match.group() != "{"))
        elif opened:
            start, is_box = opened.pop()
            if is_box and (last is None or start > last[0]):
                last = start, match.start()
    return None if last is None else text[slice(*last)]


def same_answer(answer: str, label: str) -> bool:
    """Whether two answers are equal: as numbers if both are (integers, decimals, fractions, percentages), else as text
    without spacing and markup."""
    numbers = _number(answer), _number(label)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _plain(answer) == _plain(label)


def boxed_reward(response: str, label: str) -> float:
    r"""1.0 when the last ``\boxed{…}`` of the response is the label (or the label's own box), else 0.0."""
    answer = last_boxed(response)
    expected = last_boxed(label)
    return 1.0 if answer is not None and same_answer(answer, expected if expected is not None else label) else 0.0


def _plain(text: str) -> str:
    plain = _NOISE.sub(lambda match: match.group(1) or match.group(2) or "", text).rstrip(".")
    return plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")


def _number(text: str) -> Fraction | None:
    plain = _plain(text).replace("\\%", "%")
    if (match := _FRACTION.match(plain)) is not None:
        plain = f"{match.group(1)}{match.group(2)}/{match.group(3)}"
    numerator, slash, denominator = plain.removesuffix("%").partition("/")
    if not _NUMBER.fullmatch(numerator) or not _NUMBER.fullmatch(denominator):
        return None
    try:
        value = Fraction(numerator.replace(",", ""))
        value /= Fraction(denominator.replace(",", "")) if slash else 1
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if plain.endswith("%") else value
