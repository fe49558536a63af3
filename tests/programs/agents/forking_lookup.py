"""The first command's agent with conversations that fork, and rollouts that fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agl_slime import RolloutSession
from tests.programs.agents.flaky_lookup import FlakyLookup


class ForkingLookup(FlakyLookup):
    """First thinks aloud for 160 tokens, long enough for new weights to come in the middle of them, then goes back to
    the start and does its task; some answers it edits, and asks again."""

    async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
        aloud = replace(session.sampling, max_new_tokens=160, extra={**session.sampling.extra, "ignore_eos": True})
        await session.branch(session.messages).ask(sampling=aloud)
        await super().run(task, session)
        if len(session.turns) > 2 and task["key"] > "m":
            session.messages[2]["content"] = session.messages[2]["content"] + "\n"
            session.messages.pop()
            await session.ask()
