"""What rollouts have sampled whose groups are not dealt with yet: a checkpoint keeps it, and a run that goes on from
there does not have it sampled again.

A rollout that is run again after ``--resume`` runs its agent from the beginning; a model call whose prompt and sampling
parameters are those of a call that was kept is answered with what the engine sampled then, ids, log-probs and weight
versions included, and one that was cut goes on behind it. A call that differs (a tool said something else) is sampled
anew, and so is what follows from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from agl_slime import events
from agl_slime.errors import ConfigError, EngineError, TraceError, format_exception
from agl_slime.sglang.client import SGLangClient
from agl_slime.sglang.generation import Generation, SamplingParams, WeightSpan
from agl_slime.sglang.replay import Nucleus, RoutedExperts
from agl_slime.sglang.resumable import Progress
from agl_slime.support.agl import Rollout
from agl_slime.support.arrays import array_from_json, array_to_json
from agl_slime.tokens.codec import (
    log_prob_array,
    pack_array,
    stored_bytes,
    token_array,
    unpack_log_probs,
    unpack_token_ids,
)

logger = logging.getLogger(__name__)

# How long requests may take to answer an abort with what they have; one that waits for a retry has nothing new to tell.
_CUT_TIMEOUT_S = 5.0
_PACKED = "output_ids", "log_probs", "weight_versions", "top_log_probs", "experts", "nucleus"
_PLAIN = [f.name for f in fields(Generation) if f.name not in _PACKED]


@dataclass(eq=False)
class _Call:
    key: str
    generation: Generation | None = None
    """What has been sampled; its reason is "abort" as long as there is more to come."""
    running: bool = True
    told: bool = False


@dataclass(eq=False)
class _Rollout:
    instance_id: str
    calls: list[_Call] = field(default_factory=list)
    kept: list[_Call] = field(default_factory=list)
    """Of before the restart, not asked for again so far."""


class PartialRollouts:
    """The calls of the rollouts of one process. Thread-safe; it is told of groups that are dealt with as an observer of
    the run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rollouts: dict[str, _Rollout] = {}
        self._kept: dict[str, deque[list[_Call]]] = {}  # of a checkpoint, by instance
        self.taken_up = 0
        """Tokens of before a restart that were not sampled again."""

    def client(self, client: Any, rollout: Rollout) -> Any:
        """``client`` for the calls of ``rollout``, which are kept; as it is for a rollout of no instance."""
        instance_id = (rollout.metadata or {}).get("instance_id")
        if instance_id is None or not isinstance(client, SGLangClient):
            return client
        with self._changed:
            record = self._rollouts[rollout.rollout_id] = _Rollout(str(instance_id))
            if waiting := self._kept.get(record.instance_id):
                record.kept = waiting.popleft()
        return _KeepingClient(self, client, record)

    def drop(self, rollout_id: str) -> None:
        """This rollout has failed: what it sampled would lead there again."""
        with self._changed:
            self._rollouts.pop(rollout_id, None)

    def handle(self, event: events.Event) -> None:
        """Forget the groups that training was given, or that were dropped."""
        if isinstance(event, events.GroupsCollected):
            done = {group.instance_id for group in event.groups}
            with self._changed:
                self._rollouts = {name: one for name, one in self._rollouts.items() if one.instance_id not in done}
                self._kept = {name: rows for name, rows in self._kept.items() if name not in done}

    def save(self, path: Path, *, base_url: str) -> None:
        """Write all that has been sampled; the engine at ``base_url`` is asked for what it has of running requests,
        which go on then."""
        with self._changed:
            running = [call for one in self._rollouts.values() for call in one.calls if call.running]
            for call in running:
                call.told = False
        if running:
            try:
                asyncio.run(asyncio.wait_for(_abort_all(base_url), _CUT_TIMEOUT_S))
            except (EngineError, TimeoutError) as error:
                why = str(error) or f"no answer within {_CUT_TIMEOUT_S:g} s"
                logger.warning("What the engine at %s is sampling is not in the checkpoint: %s", base_url, why)
            else:
                with self._changed:
                    self._changed.wait_for(lambda: all(call.told for call in running), _CUT_TIMEOUT_S)
        with self._changed:
            # also of rollouts that have not begun again, or not come so far again
            rows = [(one.instance_id, one.calls + one.kept) for one in self._rollouts.values()]
            rows += [(instance_id, calls) for instance_id, waiting in self._kept.items() for calls in waiting]
            lines = [
                {"instance_id": instance_id, "calls": [{"key": call.key, **_told(got)} for call, got in sampled]}
                for instance_id, calls in rows
                if (sampled := [(call, call.generation) for call in calls if call.generation is not None])
            ]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def load(self, path: Path, *, admitted: Collection[str] | None = None, version: str = "") -> None:
        """Resume from a file of ``save``; a missing file is an empty one. Raises ``ConfigError``.

        ``admitted`` are the instances whose groups keep their age over the restart (``None``: all). Groups of other
        instances are admitted again, by the weights of ``version``: they were dropped before the checkpoint, or begun
        while it was written. Their tokens of older weights would be staler than their new age, and are left out.
        """
        kept: dict[str, deque[list[_Call]]] = defaultdict(deque)
        try:
            for line in path.read_text().splitlines() if path.exists() else ():
                told = json.loads(line)
                calls = [_Call(call["key"], _generation(call)) for call in told["calls"]]
                if admitted is None or told["instance_id"] in admitted or _sampled_by(calls) <= {version}:
                    kept[told["instance_id"]].append(calls)
        except (OSError, ValueError, TypeError, KeyError, TraceError) as error:
            raise ConfigError(f"{path} cannot be read: {format_exception(error)}") from error
        with self._changed:
            self._kept = dict(kept)
        sampled = [len(c.generation.output_ids) for rows in kept.values() for row in rows for c in row if c.generation]
        if sampled:
            logger.info("%d tokens that were sampled before the restart are gone on with.", sum(sampled))

    def begin(self, rollout: _Rollout, key: str) -> _Call:
        """A call of this rollout: the first of those that were kept, if it is one of them, else a new one."""
        with self._changed:
            call = next((kept for kept in rollout.kept if kept.key == key), None)
            if call is None:
                call = _Call(key)
            else:
                rollout.kept.remove(call)
                self.taken_up += len(call.generation.output_ids) if call.generation is not None else 0
            call.running = True
            rollout.calls.append(call)
            return call

    def note(self, call: _Call, generation: Generation | None = None, *, running: bool = True) -> None:
        """So much has been sampled of a call."""
        with self._changed:
            call.generation = generation or call.generation
            call.told, call.running = True, running
            self._changed.notify_all()


def _sampled_by(calls: Sequence[_Call]) -> set[str]:
    """The weight versions of all tokens of these calls."""
    return {span.version for call in calls if call.generation for span in call.generation.weight_versions}


class _KeepingClient:
    """``generate`` of a client for one rollout."""

    def __init__(self, owner: PartialRollouts, client: SGLangClient, rollout: _Rollout) -> None:
        self._owner, self._client, self._rollout = owner, client, rollout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, **how: Any) -> Generation:
        if how.get("top_log_probs"):  # which are not kept
            return await self._client.generate(input_ids, sampling, **how)
        call = self._owner.begin(self._rollout, _key(input_ids, sampling, how))
        kept = call.generation
        if kept is not None and kept.finish_reason != "abort":
            if how.get("on_progress") is not None:
                how["on_progress"](Progress(kept.text, lambda: kept))
            self._owner.note(call, running=False)
            return kept
        told: Any = {"resume": kept, "on_part": lambda part: self._owner.note(call, part)}
        got = None
        try:
            got = await self._client.generate(input_ids, sampling, **told, **how)
            return got
        finally:
            self._owner.note(call, got, running=False)


async def _abort_all(base_url: str) -> None:
    async with SGLangClient(base_url=base_url) as client:
        urls = await client.workers()
    for url in urls:
        async with SGLangClient(base_url=url) as client:
            await client.abort()


def _key(input_ids: Sequence[int], sampling: SamplingParams, how: Mapping[str, Any]) -> str:
    asked = hashlib.blake2b(stored_bytes(token_array(input_ids)), digest_size=16)
    asked.update(json.dumps(sampling.to_payload(), sort_keys=True, default=str).encode())
    if sampling.routed_experts is not None:
        asked.update(json.dumps([sampling.routed_experts, how.get("experts_start")]).encode())
    if (images := how.get("images")) is not None:  # two of one size have the same ids
        asked.update("".join(images.data).encode())
    return asked.hexdigest()


def _told(generation: Generation) -> dict[str, Any]:
    return {name: getattr(generation, name) for name in _PLAIN} | {
        "output_ids": pack_array(token_array(generation.output_ids)),
        "log_probs": pack_array(log_prob_array(generation.log_probs)),
        "weight_versions": [[span.version, span.start, span.end] for span in generation.weight_versions],
        "experts": None if (got := generation.experts) is None else [got.start, array_to_json(got.rows)],
        "nucleus": None
        if (kept := generation.nucleus) is None
        else [array_to_json(kept.ids), array_to_json(kept.offsets)],
    }


def _generation(told: dict[str, Any]) -> Generation:
    plain: dict[str, Any] = {name: told[name] for name in _PLAIN} | {"speculated": tuple(told["speculated"])}
    return Generation(
        output_ids=tuple(unpack_token_ids(told["output_ids"]).tolist()),
        log_probs=tuple(unpack_log_probs(told["log_probs"]).tolist()),
        weight_versions=tuple(WeightSpan(*span) for span in told["weight_versions"]),
        experts=None if (kept := told.get("experts")) is None else RoutedExperts(kept[0], array_from_json(kept[1])),
        nucleus=None if (kept := told.get("nucleus")) is None else Nucleus(*map(array_from_json, kept)),
        **plain,
    )
