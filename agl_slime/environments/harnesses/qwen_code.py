"""``QwenCodeHarness``: one run of Qwen Code per task."""

from __future__ import annotations

import json

import verifiers.v1 as vf
from verifiers.v1.configs.harness import PinnedVersion

from agl_slime.environments.harnesses.npm import NpmHarness


class QwenCodeConfig(vf.HarnessConfig):
    version: PinnedVersion = "0.24.4"


class QwenCodeHarness(NpmHarness, vf.Harness[QwenCodeConfig]):
    PACKAGE = "@qwen-code/qwen-code"
    BINARY = "qwen"
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if mcp_urls or self.config.disabled_tools:
            raise ValueError("the harness agl_qwen_code passes on neither MCP servers nor disabled tools")
        system, prompt = self.resolve_text_prompt(data)
        settings = {
            "telemetry": {"enabled": False},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
            "security": {"auth": {"selectedType": "openai"}},
        }
        home = f"/tmp/qwen-{trace.id}"
        await runtime.write(f"{home}/.qwen/settings.json", json.dumps(settings).encode())
        env = {
            **self.program_env,
            "HOME": home,
            "OPENAI_API_KEY": secret,
            "OPENAI_BASE_URL": endpoint,
            "OPENAI_MODEL": ctx.model,
        }
        system_flags = ["--append-system-prompt", system] if system else []
        return await runtime.run_program([self.program, "--yolo", *system_flags, "--prompt", prompt or ""], env)
