"""Partial rollouts: the sampled tokens of unfinished groups, saved in a checkpoint and reused by the resumed run.

After ``--resume`` an unfinished rollout runs its agent from the beginning. A model call with the prompt and sampling
parameters of a saved call returns the saved answer with its ids, log-probs and weight versions, or continues it where
it was cut. A call that differs (another tool result, say) is sampled again, as are the calls after it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from agl_slime import events
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import Generation, SamplingParams, WeightSpan
from agl_slime.engine.client.replay import Nucleus, RoutedExperts
from agl_slime.engine.client.resumable import Progress
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.errors import ConfigError, EngineError, TraceError, format_exception
from agl_slime.support.agl import Rollout
from agl_slime.support.arrays import array_from_json, array_to_json
from agl_slime.support.net import shown_url
from agl_slime.tokens.codec import (
    log_prob_array,
    pack_array,
    stored_bytes,
    token_array,
    unpack_log_probs,
    unpack_token_ids,
)

logger = logging.getLogger(__name__)

# How long to wait for the partial answers of aborted requests; one that waits for a retry has nothing to add.
_CUT_TIMEOUT_S = 5.0
_PACKED = "output_ids", "log_probs", "weight_versions", "top_log_probs", "experts", "nucleus"
_PLAIN = [f.name for f in fields(Generation) if f.name not in _PACKED]


@dataclass(eq=False)
class _Call:
    key: str
    generation: Generation | None = None
    """The tokens so far; its finish reason is "abort" until the answer is complete."""
    running: bool = True
    reported: bool = False
    """Whether tokens were reported since the last ``save`` began."""


@dataclass(eq=False)
class _Rollout:
    instance_id: str
    seed: str
    """Of its sampling, which names the member of its group."""
    calls: list[_Call] = field(default_factory=list)
    saved_calls: list[_Call] = field(default_factory=list)
    """Calls from before the restart that the agent has not repeated yet."""


class PartialRollouts:
    """The model calls of this process's rollouts. Thread-safe. As an observer of the run it forgets finished groups."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rollouts: dict[str, _Rollout] = {}
        self._saved: dict[str, list[_Rollout]] = {}  # from a checkpoint, by instance
        self.reused_tokens = 0
        """Tokens from before the restart that were not sampled again."""

    def client(self, client: Any, rollout: Rollout) -> Any:
        """A ``client`` that records the calls of ``rollout``; ``client`` itself for a rollout without instance id."""
        instance_id = (rollout.metadata or {}).get("instance_id")
        if instance_id is None or not isinstance(client, SGLangClient):
            return client
        record = _Rollout(str(instance_id), str((rollout.metadata or {}).get("seed", "")))
        with self._changed:
            self._rollouts[rollout.rollout_id] = record
            waiting = self._saved.get(record.instance_id, [])
            if (saved := next((each for each in waiting if each.seed in (record.seed, "")), None)) is not None:
                waiting.remove(saved)
                record.saved_calls = saved.saved_calls
        return _KeepingClient(self, client, record)

    def drop(self, rollout_id: str) -> None:
        """Forget a failed rollout: repeating its answers would repeat the failure."""
        with self._changed:
            self._rollouts.pop(rollout_id, None)

    def handle(self, event: events.Event) -> None:
        """Forget the groups that were trained on or dropped, and before weights change what no rollout has begun to
        repeat: its tokens would be too old for a group that is admitted later."""
        if isinstance(event, events.PhaseStarted) and event.phase == "sync":
            with self._changed:
                self._saved = {}
        if isinstance(event, events.GroupsCollected):
            done = {group.instance_id for group in event.groups}
            with self._changed:
                self._rollouts = {name: each for name, each in self._rollouts.items() if each.instance_id not in done}
                self._saved = {name: rows for name, rows in self._saved.items() if name not in done}

    def save(self, path: Path, *, base_url: str) -> None:
        """Write all sampled tokens. Running requests are aborted for their partial answers, then go on."""
        with self._changed:
            running = [call for rollout in self._rollouts.values() for call in rollout.calls if call.running]
            for call in running:
                call.reported = False
        if running:
            try:
                aborting = DiskWeightSync(base_url=base_url).ask_each_worker(SGLangClient.abort)
                asyncio.run(asyncio.wait_for(aborting, _CUT_TIMEOUT_S))
            except (EngineError, TimeoutError) as error:
                cause = str(error) or f"no answer within {_CUT_TIMEOUT_S:g} s"
                engine = shown_url(base_url)
                logger.warning("Answers that the engine at %s is sampling are not in the checkpoint: %s", engine, cause)
            else:
                with self._changed:
                    self._changed.wait_for(lambda: all(call.reported for call in running), _CUT_TIMEOUT_S)
        with self._changed:
            # including calls of an earlier checkpoint that no rollout has repeated yet
            rollouts = [*self._rollouts.values(), *(rollout for waiting in self._saved.values() for rollout in waiting)]
            lines = [
                {
                    "instance_id": rollout.instance_id,
                    "seed": rollout.seed,
                    "calls": [{"key": call.key, **_generation_to_json(generation)} for call, generation in sampled],
                }
                for rollout in rollouts
                if (sampled := [(call, g) for call in rollout.calls + rollout.saved_calls if (g := call.generation)])
            ]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def load(self, path: Path, *, admitted: Collection[str] | None = None, version: str = "") -> None:
        """Read a file of ``save``; a missing file counts as empty. Raises ``ConfigError``.

        ``admitted`` are the instances whose groups keep their age over the restart (``None``: all). Groups of other
        instances (dropped before the checkpoint, or begun while it was written) are admitted again at ``version``:
        their tokens of older weights would be staler than their new age, and are left out.
        """
        saved: dict[str, list[_Rollout]] = defaultdict(list)
        try:
            for line in path.read_text().splitlines() if path.exists() else ():
                row = json.loads(line)
                calls = [_Call(call["key"], _generation_from_json(call)) for call in row["calls"]]
                sampled = [call.generation for call in calls if call.generation]
                versions = {span.version for generation in sampled for span in generation.weight_versions}
                if admitted is None or row["instance_id"] in admitted or versions <= {version}:
                    rollout = _Rollout(row["instance_id"], row.get("seed", ""), saved_calls=calls)
                    saved[rollout.instance_id].append(rollout)
        except (OSError, ValueError, TypeError, KeyError, TraceError) as error:
            raise ConfigError(f"{path} cannot be read: {format_exception(error)}") from error
        with self._changed:
            self._saved = dict(saved)
        calls = [call for waiting in saved.values() for rollout in waiting for call in rollout.saved_calls]
        if sampled := sum(len(call.generation.output_ids) for call in calls if call.generation):
            logger.info("%d tokens that were sampled before the restart are reused.", sampled)

    def begin(self, rollout: _Rollout, key: str) -> _Call:
        """Start a call of this rollout: the first saved call with this key, else a new one."""
        with self._changed:
            call = next((saved for saved in rollout.saved_calls if saved.key == key), None)
            if call is None:
                call = _Call(key)
            else:
                rollout.saved_calls.remove(call)
                self.reused_tokens += len(call.generation.output_ids) if call.generation is not None else 0
            call.running = True
            rollout.calls.append(call)
            return call

    def note(self, call: _Call, generation: Generation | None = None, *, running: bool = True) -> None:
        """Store the tokens of a call so far."""
        with self._changed:
            call.generation = generation or call.generation
            call.reported, call.running = True, running
            self._changed.notify_all()


class _KeepingClient:
    """``SGLangClient.generate`` that records the calls of one rollout and reuses saved ones."""

    def __init__(self, owner: PartialRollouts, client: SGLangClient, rollout: _Rollout) -> None:
        self._owner, self._client, self._rollout = owner, client, rollout

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Generation:
        if options.get("top_log_probs"):  # a checkpoint does not have them
            return await self._client.generate(input_ids, sampling, **options)
        call = self._owner.begin(self._rollout, _key(input_ids, sampling, options))
        saved = call.generation
        if saved is not None and saved.finish_reason != "abort":
            if options.get("on_progress") is not None:
                options["on_progress"](Progress(saved.text, lambda: saved))
            self._owner.note(call, running=False)
            return saved
        partial: Any = {"resume": saved, "on_part": lambda part: self._owner.note(call, part)}
        generation = None
        try:
            generation = await self._client.generate(input_ids, sampling, **partial, **options)
            return generation
        finally:
            self._owner.note(call, generation, running=False)


def _key(input_ids: Sequence[int], sampling: SamplingParams, options: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(stored_bytes(token_array(input_ids)), digest_size=16)
    payload = sampling.to_payload() | {"sampling_seed": None}  # of an attempt
    digest.update(json.dumps(payload, sort_keys=True, default=str).encode())
    if sampling.routed_experts is not None:
        digest.update(json.dumps([sampling.routed_experts, options.get("experts_start")]).encode())
    if (images := options.get("images")) is not None:  # images of one size have equal ids
        digest.update("".join(images.data).encode())
    return digest.hexdigest()


def _generation_to_json(generation: Generation) -> dict[str, Any]:
    experts, nucleus = generation.experts, generation.nucleus
    return {name: getattr(generation, name) for name in _PLAIN} | {
        "output_ids": pack_array(token_array(generation.output_ids)),
        "log_probs": pack_array(log_prob_array(generation.log_probs)),
        "weight_versions": [[span.version, span.start, span.end] for span in generation.weight_versions],
        "experts": None if experts is None else [experts.start, array_to_json(experts.rows)],
        "nucleus": None if nucleus is None else [array_to_json(nucleus.ids), array_to_json(nucleus.offsets)],
    }


def _generation_from_json(row: dict[str, Any]) -> Generation:
    plain: dict[str, Any] = {name: row[name] for name in _PLAIN} | {"speculated": tuple(row["speculated"])}
    experts, nucleus = row.get("experts"), row.get("nucleus")
    return Generation(
        output_ids=tuple(unpack_token_ids(row["output_ids"]).tolist()),
        log_probs=tuple(unpack_log_probs(row["log_probs"]).tolist()),
        weight_versions=tuple(WeightSpan(*span) for span in row["weight_versions"]),
        experts=None if experts is None else RoutedExperts(experts[0], array_from_json(experts[1])),
        nucleus=None if nucleus is None else Nucleus(*map(array_from_json, nucleus)),
        **plain,
    )
