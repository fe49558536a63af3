"""Which servers stand behind a URL: a router's workers, or the one server that it is.

Weights and pauses go to workers, since a router answers 404 to those endpoints; ``/generate`` goes to the URL that the
person gave.
"""

from __future__ import annotations

from agl_slime.errors import EngineProtocolError, EngineRequestError
from agl_slime.sglang.client import SGLangClient


async def find_workers(client: SGLangClient) -> tuple[str, ...]:
    """URLs of all workers behind ``client.base_url``, unhealthy ones included; the URL itself when it is no router.

    Raises ``EngineProtocolError`` when a router has no worker at all, and whatever the client raises when nobody
    answers.
    """
    try:
        workers = await client.workers()
    except EngineRequestError:
        return (client.base_url,)  # plain SGLang has no /workers
    if not workers:
        raise EngineProtocolError(
            f"the router at {client.base_url} has no workers; start some with --worker-urls, or add them by POST /workers"
        )
    return workers
