"""The server's descriptions of itself in the forms of SGLang and sglang-router: a function for each path."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from agl_slime.engine.engine import Engine

_WORKER_ID = str(uuid.uuid4())


def _info(engine: Engine, model_path: str, url: str) -> dict[str, Any]:
    """The fields of SGLang's ``/model_info`` and ``/server_info`` in one answer."""
    return {
        "model_path": model_path,
        "tokenizer_path": model_path,
        "served_model_name": model_path,
        "is_generation": True,
        "model_type": getattr(engine.config, "model_type", None),
        "architectures": getattr(engine.config, "architectures", None),
        "version": "embedded",
        "dtype": "float32",
        "status": "ready" if engine.alive else "failed",
        "weight_version": engine.weight_version,
        "context_length": engine.context_length,
        "vocab_size": engine.vocab_size,  # not SGLang's
        "max_running_requests": engine.max_running,
        "max_total_num_tokens": engine.max_total_tokens,
        "dp_size": 1,
        "tp_size": 1,
        "enable_return_routed_experts": engine.returns_routed_experts,
        "enable_memory_saver": False,  # slime asks for it before it uses an engine that runs already
        "tokens_sampled": engine.tokens_sampled,
    }


def _models(engine: Engine, model_path: str, url: str) -> dict[str, Any]:
    card = {"id": model_path, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
    return {"object": "list", "data": [{**card, "root": model_path, "max_model_len": engine.context_length}]}


def _loads(engine: Engine, model_path: str, url: str) -> dict[str, Any]:
    running, waiting, tokens = engine.load()
    core = {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_used_tokens": tokens,
        "max_total_num_tokens": engine.max_total_tokens,
        "token_usage": tokens / engine.max_total_tokens,
        "max_running_requests": engine.max_running,
    }
    return {"version": "embedded", "loads": [core]}


def _workers(engine: Engine, model_path: str, url: str) -> dict[str, Any]:
    """Itself, as sglang-router lists its workers."""
    running, waiting, _ = engine.load()
    worker = {
        "id": _WORKER_ID,
        "url": url,
        "model_id": model_path,
        "priority": 50,
        "cost": 1.0,
        "worker_type": "regular",
        "is_healthy": engine.alive,
        "load": running + waiting,
        "connection_mode": "HTTP",
        "metadata": {"tp_size": "1", "dp_size": "1", "model_path": model_path},
        "disable_health_check": False,
    }
    return {"workers": [worker], "total": 1, "stats": {"regular_count": 1}}


INFORMATION: Mapping[str, Callable[[Engine, str, str], dict[str, Any]]] = {
    **dict.fromkeys(("/model_info", "/get_model_info", "/server_info", "/get_server_info"), _info),
    "/v1/models": _models,
    "/v1/loads": _loads,
    "/workers": _workers,
}
