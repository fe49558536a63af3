"""A setting out of its range is one sentence with its name and its value, in every room."""

import math
from typing import Any

import pytest

from agl_slime.buffer.settings import PipelineSettings
from agl_slime.data.policy import MinimumViableGroup, RetryGroup
from agl_slime.data.source import DataSourceSettings
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.client.transport import ClientSettings
from agl_slime.errors import ConfigError
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.loop.settings import LoopSettings
from agl_slime.runner.base import RunnerSettings
from agl_slime.store.bridge import Retention
from agl_slime.train.local.settings import LocalTrainerSettings

OUT_OF_RANGE: dict[Any, list[tuple[str, Any]]] = {
    RunnerSettings: [
        *(("max_concurrent", 0), ("max_sync_threads", 0), ("claim_batch", 0), ("max_restarts", -1)),
        *(("poll_interval_s", 0.0), ("flush_interval_s", 0.0), ("timeout_s", 0.0)),
        *(("heartbeat_interval_s", -1.0), ("lag_warning_s", -1.0)),
    ],
    LoopSettings: [
        *(("num_iterations", 0), ("n_samples_per_prompt", -1), ("rollout_timeout_s", 0.0)),
        *(("num_iterations", 1.5), ("max_attempts", True), ("rollout_timeout_s", "60"), ("save_interval", None)),
    ],
    DataSourceSettings: [("get_timeout_s", 0), ("poll_interval_s", 0), ("get_timeout_s", math.nan)],
    ClientSettings: [("total_timeout_s", 0), ("backoff_cap_s", math.nan), ("max_attempts", 0), ("resume_limit", -1)],
    Retention: [("released_rollouts", -1), ("released_bytes", -1), ("unreleased_bytes", 0)],
    PipelineSettings: [("group_size", 0), ("reward_range", (1.0, 0.0)), ("min_valid_item_size_ratio", 0)],
    GatewaySettings: [
        ("max_turns", 0),
        ("branches", "some"),
        ("max_turns", 2.5),
        ("max_messages", "9"),
        ("untrained_models", ("a",)),
    ],
    SamplingParams: [
        *(("max_new_tokens", 1.5), ("max_new_tokens", "16"), ("temperature", "hot"), ("top_k", True)),
        *(("stop", (2.5,)), ("stop_token_ids", ("a",)), ("skip_special_tokens", "no"), ("extra", 5)),
        *(("seed", "x"), ("repetition_penalty", -3.0)),
    ],
    MinimumViableGroup: [("min_ratio", 0), ("timeout_s", 0), ("max_retries", -1)],
    RetryGroup: [("max_retries", -1)],
    LocalTrainerSettings: [
        *(("lr", 0.0), ("lr", math.nan), ("warmup_steps", -1), ("betas", (0.9, 1.0)), ("weight_decay", -0.1)),
        *(("grad_clip", 0.0), ("grad_clip", math.nan), ("clip", 0.0), ("clip", 1.5), ("clip_high", 0.0)),
        *(("n_minibatches", 0), ("epochs", 0), ("kl_coef", -1.0), ("max_tokens_per_microbatch", 0)),
        *(("aggregation", "mean"), ("old_log_probs", "trainer"), ("compute_dtype", "float16")),
        *(("lora_rank", -1), ("lora_alpha", 0.0)),
    ],
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, wrong in OUT_OF_RANGE.items() for name, value in wrong],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_setting_out_of_range_is_named_with_its_value(kind: Any, name: str, value: Any) -> None:
    needed = {PipelineSettings: {"group_size": 1}, GatewaySettings: {"trained_models": ("a",)}}.get(kind, {})
    with pytest.raises(ConfigError, match=f"^{name} must be .*, got ") as caught:
        kind(**{**needed, name: value})
    assert str(caught.value).endswith((str(value), repr(value)))
