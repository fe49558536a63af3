"""A chat harness without processes, and a local environment, for tasksets of pure conversation.

verifiers' chat harness starts a Python process for each turn; this one calls the model from the event loop, so one
process can run hundreds of conversations.
"""

from __future__ import annotations

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import MODEL_TRANSPORT_ERROR_EXIT_CODE
from verifiers.v1.runtimes import ProgramResult


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One model call for each segment, without tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http,
                http.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                ) as answer,
            ):
                text = await answer.text()
        except aiohttp.ClientError as error:
            return ProgramResult(MODEL_TRANSPORT_ERROR_EXIT_CODE, "", f"{type(error).__name__}: {error}")
        return ProgramResult(0 if answer.status == 200 else 1, "", text[-2000:])


class LocalEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class LocalEnv(vf.Env[LocalEnvConfig]):
    """One agent per task, on this machine: verifiers' default is a hosted sandbox."""

    async def run(self, task, agents) -> None:
        await agents.agent.run(task)
