"""slime's agent rollout: training data from a Rollout Buffer.

    --rollout-function-path agl_slime.buffer.agent_rollout.generate_rollout

Settings that slime's parser does not have go into the YAML file of ``--custom-config-path``. The environment variable
applies when ``args`` has no value, or the default of slime's parser (``math``, ``qwen``):

- ``agent_rollout_buffer_url`` or slime's ``rollout_buffer_url``, ``AGL_SLIME_BUFFER_URL``: the buffer
  (``http://127.0.0.1:8889``)
- ``agent_rollout_buffer_token``, ``AGL_SLIME_BUFFER_TOKEN``: its token, where it has one
- ``rollout_task_type``, ``AGL_SLIME_BUFFER_TASK_TYPE``: the generator (``math``)
- ``agent_rollout_eval_task_type``, ``AGL_SLIME_BUFFER_EVAL_TASK_TYPE``: the generator of evaluations; none by default
- ``fetch_trajectory_retry_times``: failed requests before giving up (-1: never)
- ``loss_mask_type``, ``AGL_SLIME_LOSS_MASK_TYPE``: loss mask of items without token ids (``auto``), or ``module:Class``
- ``num_epoch``, ``rollout_num_process``: passed to the generator (3, 100)

With ``--disable-rewards-normalization`` samples have the rewards that the buffer normalised, else the raw rewards,
which slime then normalises.

Groups fetched beyond a batch wait for the next call. The names of trained groups are kept in the data buffer's
metadata, which slime saves with its checkpoints. A resumed run sends them to the buffer, which delivers again the
groups that were delivered but not trained on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl_slime.buffer.session import AgentRolloutSession, AgentRolloutSettings, Step, start_generator
from agl_slime.buffer.stages import BUFFER_GROUP
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.support.threads import run_blocking
from agl_slime.types import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample

logger = logging.getLogger(__name__)

# Prefix of our keys in the data buffer's metadata: the group names of a step. Other keys have instance ids, as slime's.
_GROUPS_PREFIX = "buffer_groups:"
# Defaults of slime's parser: such a value may not be the user's.
_PARSER_DEFAULTS = {"rollout_task_type": "math", "loss_mask_type": "qwen"}
# The buffer has long forgotten older groups.
_MOST_GROUP_NAMES = 20_000


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """slime's rollout function, called from a plain thread: ``rollout_batch_size`` groups, or evaluation results."""
    return run_blocking(_evaluate(args, data_source) if evaluation else _train(args, rollout_id, data_source))


async def generate_agent_rollout(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> list[list[Sample]]:
    """Start the generator on the first call, and wait for ``rollout_batch_size`` groups of ``n_samples_per_prompt``
    samples.

    Raises:
        DataSourceError: the buffer failed more often than ``fetch_trajectory_retry_times`` allows, or its generator
            ended and no group is left.
        ConfigError: the buffer refused to start the generator.
    """
    if evaluation:
        output = await _evaluate(args, data_buffer)
        return [entry["samples"] for entry in output.data.values()]
    return (await _train(args, rollout_id, data_buffer)).samples


async def _train(args: Any, rollout_id: int, data_buffer: Any) -> RolloutFnTrainOutput:
    settings = settings_of(args, data_buffer)
    session = sessions.setdefault((settings.buffer_url, settings.task_type), AgentRolloutSession(settings))
    session.settings = settings

    def payload() -> dict[str, Any]:
        start = start_payload(args, _metadata_before(data_buffer, rollout_id), settings)
        start["skip_instance_ids"] += [group[0]["instance_id"] for group in session.fetched]
        return start

    if not session.started:
        await session.start(payload)
    step = await session.take_step(payload)
    _remember(data_buffer, rollout_id, step, session)
    log_raw_info(args, step.meta_infos, rollout_id)
    groups = _through_data_buffer(args, data_buffer, step.groups, settings.batch_size)
    samples = [sample for group in groups for sample in group]
    retokenized = sum(sample.metadata.get("token_source") == "retokenized" for sample in samples)
    metrics = {
        **raw_metrics(step.meta_infos),
        "rollout/buffer/wait_s": step.waited_s,
        "rollout/buffer/unusable_groups": len(step.unusable),
        "rollout/buffer/surplus_groups": len(session.fetched),
        "rollout/buffer/retokenized_ratio": retokenized / len(samples),
        "rollout/buffer/masked_samples": sum(bool(sample.remove_sample) for sample in samples),
    }
    return RolloutFnTrainOutput(samples=groups, metrics=metrics)


def start_rollout(api_base_url: str, args: Any, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """``start_generator`` for slime's ``args``; ``metadata`` of a resumed run names the groups trained so far."""
    settings = settings_of(args)
    payload = start_payload(args, metadata, settings)
    return run_blocking(start_generator(api_base_url, payload, token=settings.token))


def log_raw_info(args: Any, all_meta_info: Sequence[Mapping[str, Any]], rollout_id: int) -> None:
    """Log ``raw_metrics``, also to WandB and TensorBoard with ``use_wandb`` and ``use_tensorboard``."""
    figures = raw_metrics(all_meta_info)
    if not figures:
        return
    logger.info("rollout %d: %s", rollout_id, figures)
    step = rollout_id
    if getattr(args, "wandb_always_use_train_step", False):
        step = rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    if getattr(args, "use_wandb", False):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError("--use-wandb needs wandb: pip install wandb") from error
        wandb.log({**figures, "rollout/step": step})
    if getattr(args, "use_tensorboard", False):
        from slime.observability.tensorboard_utils import _TensorboardAdapter  # pyright: ignore[reportMissingImports]

        _TensorboardAdapter(args).log(data={**figures, "rollout/step": step}, step=step)


def raw_metrics(all_meta_info: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Count and mean reward of all samples before filtering; the mean is weighted by the number of samples."""
    counted = [meta for meta in all_meta_info if isinstance(meta.get("total_samples"), (int, float))]
    total = sum(meta["total_samples"] for meta in counted)
    if not total:
        return {}
    rewards = sum(
        meta["avg_reward"] * meta["total_samples"]
        for meta in counted
        if isinstance(meta.get("avg_reward"), (int, float))
    )
    return {"rollout/no_filter/total_samples": total, "rollout/no_filter/avg_reward": rewards / total}


def start_payload(args: Any, metadata: Mapping[str, Any] | None, settings: AgentRolloutSettings) -> dict[str, Any]:
    """The documented payload of ``/start_rollout``."""
    skip: list[Any] = []
    groups: list[str] = []
    for key, value in (metadata or {}).items():
        if isinstance(value, (list, tuple)):
            (groups if str(key).startswith(_GROUPS_PREFIX) else skip).extend(value)
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    limit = getattr(args, "rollout_max_response_len", None)
    sampling = {name: getattr(args, f"rollout_{name}", None) for name in ("temperature", "top_p")}
    seed = getattr(args, "rollout_seed", None)
    return {
        "num_process": int(getattr(args, "rollout_num_process", None) or 100),
        "num_epoch": int(getattr(args, "num_epoch", None) or 3),
        "remote_engine_url": f"http://{host}:{port}" if host else os.environ.get("AGL_SLIME_ENGINE_URL"),
        "task_type": settings.task_type,
        "input_file": getattr(args, "prompt_data", None),
        "num_repeat_per_sample": str(settings.group_size),
        **({} if limit is None else {"max_tokens": limit}),
        "sampling_params": {k: v for k, v in {"max_tokens": limit, **sampling}.items() if v is not None},
        "tokenizer_path": settings.hf_checkpoint,
        "skip_instance_ids": skip,
        **({} if seed is None else {"seed": seed}),
        # no names are kept with slime's own buffer
        **({"trained_groups": groups[-_MOST_GROUP_NAMES:]} if groups or not skip else {}),
    }


def settings_of(args: Any, data_source: Any = None) -> AgentRolloutSettings:
    """The settings in ``args`` and the environment; see the module's docstring."""

    def setting(name: str, variable: str) -> str | None:
        value = getattr(args, name, None)
        return (None if value == _PARSER_DEFAULTS.get(name) else value) or os.environ.get(variable) or None

    group_size = getattr(args, "n_samples_per_prompt", None) or getattr(data_source, "n_samples_per_prompt", None) or 1
    disabled = getattr(args, "disable_rewards_normalization", None)
    url = setting("agent_rollout_buffer_url", "") or setting("rollout_buffer_url", "AGL_SLIME_BUFFER_URL")
    return AgentRolloutSettings(
        buffer_url=(url or "http://127.0.0.1:8889").rstrip("/"),
        token=setting("agent_rollout_buffer_token", "AGL_SLIME_BUFFER_TOKEN"),
        task_type=setting("rollout_task_type", "AGL_SLIME_BUFFER_TASK_TYPE") or "math",
        eval_task_type=setting("agent_rollout_eval_task_type", "AGL_SLIME_BUFFER_EVAL_TASK_TYPE"),
        retry_times=int(getattr(args, "fetch_trajectory_retry_times", -1)),
        loss_mask_type=setting("loss_mask_type", "AGL_SLIME_LOSS_MASK_TYPE") or "auto",
        hf_checkpoint=getattr(args, "hf_checkpoint", None),
        # slime stores --disable-rewards-normalization as rewards_normalization=False
        normalized=bool(disabled) if disabled is not None else not getattr(args, "rewards_normalization", True),
        batch_size=getattr(args, "rollout_batch_size", None) or 1,
        group_size=int(group_size),
    )


sessions: dict[tuple[str, str], AgentRolloutSession] = {}
"""The sessions of this process, by buffer URL and task type."""


async def _evaluate(args: Any, data_source: Any) -> RolloutFnEvalOutput:
    """Run the evaluation generator to its end. Raises ``ConfigError`` without one."""
    settings = settings_of(args, data_source)
    task_type = settings.eval_task_type
    if task_type is None or task_type == settings.task_type:
        raise ConfigError(f"agent_rollout_eval_task_type is {task_type!r}; expected the generator of evaluations only")
    settings = replace(settings, task_type=task_type, normalized=False)
    session = AgentRolloutSession(settings)

    def payload() -> dict[str, Any]:
        session.fetched.clear()
        # fresh: drops items that an earlier evaluation left
        return {**start_payload(args, None, settings), "num_epoch": 1, "fresh": True}

    await session.start(payload)
    groups = await session.fetch_all(payload)
    samples = [
        sample for group in groups for sample in group if not sample.remove_sample or any(sample.loss_mask or ())
    ]
    if not samples:
        raise DataSourceError(f"the evaluation generator {task_type!r} made no usable group")
    truncated = [sample.status == Sample.Status.TRUNCATED for sample in samples]
    entry = {"rewards": [sample.reward for sample in samples], "truncated": truncated, "samples": samples}
    return RolloutFnEvalOutput(data={task_type: entry})


def _remember(data_buffer: Any, rollout_id: int, step: Step, session: AgentRolloutSession) -> None:
    """Note the step's groups, and instances without usable groups, in the data buffer's metadata, which slime saves."""
    update = getattr(data_buffer, "update_metadata", None)
    if update is None:
        return
    used = [*step.used, *step.unusable]
    fetched = [group[0]["instance_id"] for group in (*used, *session.fetched)]
    refused: list[Any] = []
    for instance_id in (entry for meta_info in step.meta_infos for entry in meta_info.get("finished_groups") or ()):
        if instance_id in fetched:
            fetched.remove(instance_id)
        else:
            refused.append(instance_id)
    update({str(rollout_id): [group[0]["instance_id"] for group in used] + refused})
    names = [group[0][BUFFER_GROUP] for group in used if BUFFER_GROUP in group[0]]
    if names:
        update({f"{_GROUPS_PREFIX}{rollout_id}": names})


def _through_data_buffer(
    args: Any, data_buffer: Any, groups: list[list[Sample]], batch_size: int
) -> list[list[Sample]]:
    """Let ``--buffer-filter-path`` choose groups, if slime's data buffer applies it."""
    if getattr(args, "buffer_filter_path", None) is None or not hasattr(data_buffer, "get_buffer_length"):
        return groups
    data_buffer.add_samples(groups)
    return data_buffer.get_samples(min(batch_size, data_buffer.get_buffer_length()))


def _metadata_before(data_buffer: Any, rollout_id: int) -> dict[str, Any]:
    """The metadata of earlier steps: a saved data buffer may have later ones, which a resumed trainer forgot."""
    get = getattr(data_buffer, "get_metadata", None)
    metadata: Mapping[str, Any] = get() if get is not None else {}
    steps = {key: str(key).removeprefix(_GROUPS_PREFIX) for key in metadata}
    return {key: value for key, value in metadata.items() if not steps[key].isdecimal() or int(steps[key]) < rollout_id}
