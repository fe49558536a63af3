"""The one module that imports Agent Lightning.

``agentlightning/__init__`` imports all of it for any submodule (0.7 s and 82 MB), so modules that rarely need it import
this one inside functions. LiteLLM tries three times to download a price list unless a variable selects its own copy
(7 s without network); the variable is set before the first import.
"""

# ruff: noqa: F401  (other modules import these names from here)
from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import warnings
from typing import Any

from agl_slime.errors import MissingDependencyError, UnknownVersionError
from agl_slime.support.litellm_later import litellm_later

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

# its own __init__ imports the module that it deprecates
warnings.filterwarnings("ignore", "agentlightning.reward is deprecated", module="agentlightning")
try:
    with litellm_later():
        from agentlightning.adapter.messages import group_genai_dict
        from agentlightning.algorithm.base import Algorithm
        from agentlightning.emitter.exception import emit_exception
        from agentlightning.emitter.reward import emit_reward, find_final_reward, get_rewards_from_span
        from agentlightning.execution.events import ExecutionEvent
        from agentlightning.litagent import LitAgent, rollout
        from agentlightning.runner import LitAgentRunner
        from agentlightning.store.base import UNSET, LightningStore, Unset
        from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
        from agentlightning.store.collection.memory import InMemoryLightningCollections, ListBasedCollection
        from agentlightning.store.memory import InMemoryLightningStore
        from agentlightning.store.threading import LightningStoreThreaded
        from agentlightning.store.utils import rollout_status_from_attempt
        from agentlightning.tracer import Tracer, clear_active_tracer, get_active_tracer, set_active_tracer
        from agentlightning.tracer.otel import OtelSpanRecordingContext
        from agentlightning.types import (
            LLM,
            Attempt,
            AttemptedRollout,
            EnqueueRolloutRequest,
            NamedResources,
            ProxyLLM,
            ResourcesUpdate,
            Rollout,
            RolloutConfig,
            Span,
            SpanCoreFields,
            TraceStatus,
            Worker,
        )
        from agentlightning.utils.otel import extract_links_from_attributes, make_link_attributes, query_linked_spans
except ImportError as error:
    if (error.name or "").partition(".")[0] != "agentlightning":
        raise  # one of its dependencies is missing
    try:
        _version = importlib.metadata.version("agentlightning")
    except importlib.metadata.PackageNotFoundError:
        message = "agentlightning is not installed: pip install 'agentlightning>=0.3,<0.4'"
        raise MissingDependencyError(message) from error
    _missing = error.name if isinstance(error, ModuleNotFoundError) else str(error)
    raise UnknownVersionError(
        f"agentlightning {_version} is installed here, without {_missing}; agl-slime needs 0.3 in its own environment: "
        "pip install 'agentlightning>=0.3,<0.4' (agents of 1.0 run in another one, named by AGL_CONTROLLER_PYTHON)"
    ) from error

# Agent Lightning builds a new pydantic TypeAdapter for every reward that it reads: 0.13 ms, twice per rollout, more
# than the rest of the read. From sys.modules, because the package has functions with the names of its modules.
_reward_module = sys.modules["agentlightning.emitter.reward"]
_reward_module.TypeAdapter = functools.lru_cache(maxsize=8)(_reward_module.TypeAdapter)  # type: ignore[attr-defined]


def threaded(store: Any) -> Any:
    """``store``, or Agent Lightning's wrapper around an in-memory store made for one thread; each time the same."""
    if not isinstance(store, InMemoryLightningStore) or store.capabilities.get("thread_safe"):
        return store
    return vars(store).setdefault("_agl_slime_threaded", LightningStoreThreaded(store))


def otlp_export_misses_store() -> bool:
    """Whether spans that Agent Lightning exports over OTLP miss its store, after 10 s each: it redirects
    OpenTelemetry's exporter by an attribute that the exporter ignores from 1.45 on."""
    from agentlightning.utils.otlp import LightningStoreOTLPExporter

    return hasattr(LightningStoreOTLPExporter(), "_client")  # the client that 1.45 uses instead
