"""A check, before a run depends on it, that an engine sends routed experts and nuclei."""

from __future__ import annotations

import logging
from dataclasses import replace

from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.client.transport import ClientSettings
from agl_slime.errors import ConfigError, EngineError, EngineProtocolError, EngineRequestError

logger = logging.getLogger(__name__)

_QUICK = ClientSettings(total_timeout_s=60.0, max_attempts=2)


async def check_replay(base_url: str, sampling: SamplingParams) -> bool:
    """Sample one token with ``sampling``. False when the engine cannot be reached now.

    Raises ``ConfigError``, naming flag and shape, when it sends no routed experts, some of another shape, or no
    nucleus, although ``sampling`` wants them.
    """
    if sampling.routed_experts is None and not sampling.nucleus:
        return True
    asked = replace(sampling, max_new_tokens=1, stop=(), stop_token_ids=())
    try:
        async with SGLangClient(base_url=base_url, settings=_QUICK) as client:
            await client.generate([0, 0], asked)
    except (EngineProtocolError, EngineRequestError) as error:
        raise ConfigError(str(error)) from error
    except EngineError as error:
        logger.debug("The replay data of %s cannot be checked yet: %s", base_url, error)
        return False
    return True
