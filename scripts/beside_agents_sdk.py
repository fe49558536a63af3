"""Is agl-slime a good neighbour of OpenAI's Agents SDK, which owns the import name ``agents``? Both are used.

python -c "$(cat scripts/beside_agents_sdk.py)"        # where the wheel of agl-slime and openai-agents are installed
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from typing import Any

from openai.types.chat import ChatCompletion

import agents
from agl_slime import SGLangLitAgent


class Capital(SGLangLitAgent):
    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return float(response == task["label"])


class OneAnswer:
    """Stands in for ``AsyncOpenAI``: the one call that the SDK makes, answered without a server."""

    def __init__(self) -> None:
        self.chat = self.completions = self
        self.base_url = "http://127.0.0.1"

    async def create(self, **request: Any) -> ChatCompletion:
        message = {"role": "assistant", "content": "Paris"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "1", "created": 0, "model": "m", "object": "chat.completion", "choices": [choice]}
        return ChatCompletion.model_validate(answer)


def main() -> None:
    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel(model="m", openai_client=OneAnswer())  # type: ignore[arg-type]
    answer = asyncio.run(agents.Runner.run(agents.Agent(name="capitals", model=model), "France?")).final_output
    reward = Capital().compute_reward({"label": "Paris"}, answer)
    assert reward == 1.0, f"expected the reward 1.0, got {reward} for {answer!r}"
    for name in ("tests", "examples", "benchmarks"):
        found = importlib.util.find_spec(name)
        inside = found is not None and "site-packages" in str(
            found.origin or list(found.submodule_search_locations or ())
        )
        assert not inside, f"the package {name!r} is installed: {found}"
    print(json.dumps({"agents": agents.__file__, "python": sys.version.split()[0], "reward": reward}))


if __name__ == "__main__":
    main()
