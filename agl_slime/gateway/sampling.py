"""Sampling parameters of a call: the run's for trained tokens, with the client's limits.

A client's temperature, penalties or grammar would change the meaning of the engine's log-probs, so the run sets them;
overridden parameters are counted.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agl_slime.engine.client.generation import SamplingParams
from agl_slime.errors import ConfigError, GatewayRequestError
from agl_slime.gateway.calls import Call
from agl_slime.gateway.settings import Constraints
from agl_slime.tokens.formats import ToolParser

logger = logging.getLogger(__name__)

_FIELDS = frozenset({"temperature", "top_p", "top_k"})
_SGLANG_NAMES = {"seed": "sampling_seed"}
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}


def sampling_for(
    call: Call,
    run: SamplingParams,
    *,
    trained: bool,
    constraints: Constraints,
    parser: ToolParser | None,
    overridden: Counter[str],
) -> tuple[SamplingParams, str]:
    """The sampling parameters of a call, and the reason not to train its answer (empty to train it). ``overridden``
    counts the client's parameters that are not used."""
    limit = run.max_new_tokens if call.max_tokens is None else min(run.max_new_tokens, call.max_tokens)
    stops = tuple(dict.fromkeys((*run.stop, *call.stop)))
    stop_ids = tuple(dict.fromkeys((*run.stop_token_ids, *call.stop_token_ids)))
    sampling = replace(run, max_new_tokens=max(1, limit), stop=stops, stop_token_ids=stop_ids)
    constraint = _constraint(call, parser, constraints)
    if not trained:
        fields = {name: value for name, value in call.requested.items() if name in _FIELDS}
        extra = {_SGLANG_NAMES.get(name, name): value for name, value in call.requested.items() if name not in _FIELDS}
        try:
            return replace(sampling, **fields, extra={**run.extra, **extra, **constraint}), ""
        except ConfigError as error:  # begins with the field
            raise GatewayRequestError(str(error), param=str(error).partition(" ")[0]) from None
    for name, value in call.requested.items():
        decided = getattr(run, name) if name in _FIELDS else run.extra.get(name, _NEUTRAL.get(name, 0))
        overridden[f"overridden/{name}"] += value != decided and bool(value or name in _FIELDS)
    if call.max_tokens is not None:
        overridden["overridden/max_tokens"] += call.max_tokens > run.max_new_tokens
    overridden["overridden/allowed_tools"] += call.tool_choice == "auto" and call.allowed is not None
    if not constraint:
        return sampling, ""
    if constraints == "refuse":
        problem = f"{_name(call)} would be sampled under a constraint, which cannot be trained"
        message = f"{problem}; leave it out, or set constraints to mask or drop"
        raise GatewayRequestError(message, param=_name(call))
    _explain_once(_name(call), constraints)
    if constraints == "drop":
        overridden[f"overridden/{_name(call)}"] += 1
        return sampling, ""
    return replace(sampling, extra={**sampling.extra, **constraint}), "constrained"


@functools.cache
def _explain_once(name: str, constraints: Constraints) -> None:
    """Warn about the first constraint in ``name`` in this process."""
    effect = "its answers are sampled freely and trained" if constraints == "drop" else "its answers are NOT trained"
    logger.warning(
        "An agent asks for answers under a constraint (%s), which changes the meaning of log-probs: %s. --constraints "
        "drop samples freely and trains, mask obeys and does not train those answers, refuse answers 400; it is %s.",
        *(name, effect, constraints),
    )


def _name(call: Call) -> str:
    return "response_format" if call.constraint else "tool_choice"


def _constraint(call: Call, parser: ToolParser | None, constraints: Constraints) -> Mapping[str, Any]:
    offered = [tool["function"] for tool in call.offered]
    allowed = offered if call.allowed is None else [tool for tool in offered if tool["name"] in call.allowed]
    if call.tool_choice == "auto" and len(allowed) < len(offered) and constraints != "drop":
        problem = "tool_choice allowed_tools with mode auto cannot be enforced"
        raise GatewayRequestError(f"{problem}; use required, or set constraints to drop", param="tool_choice")
    if call.constraint or call.tool_choice in ("auto", "none"):
        return call.constraint
    forced = [tool for tool in allowed if call.tool_choice in ("required", tool["name"])]
    if not forced:
        raise GatewayRequestError(f"tool_choice {call.tool_choice!r} names none of the tools", param="tool_choice")
    form = parser.forced_grammar(forced) if parser is not None else None
    if constraints == "mask" and form is None:
        problem = f"tool_choice cannot force calls in the format of {type(parser).__name__}"
        raise GatewayRequestError(f"{problem}; use auto, or set constraints to drop", param="tool_choice")
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}
