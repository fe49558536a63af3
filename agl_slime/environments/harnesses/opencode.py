"""``OpenCodeHarness``: one run of OpenCode per task."""

from __future__ import annotations

import json

import verifiers.v1 as vf
from verifiers.v1.configs.harness import PinnedVersion

from agl_slime.environments.harnesses.npm import NpmHarness


class OpenCodeConfig(vf.HarnessConfig):
    version: PinnedVersion = "1.18.33"
    context: int = 131_072
    """The model's context length for OpenCode, which summarizes longer conversations."""
    output: int = 16_384


class OpenCodeHarness(NpmHarness, vf.Harness[OpenCodeConfig]):
    PACKAGE = "opencode-ai"
    BINARY = "opencode"

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        if mcp_urls or self.config.disabled_tools:
            raise ValueError("the harness agl_opencode passes on neither MCP servers nor disabled tools")
        _, prompt = self.resolve_text_prompt(data)
        settings = {
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "enabled_providers": ["rollout"],
            "model": "rollout/policy",
            "small_model": "rollout/policy",
            "provider": {
                "rollout": {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": endpoint, "apiKey": secret},
                    "models": {"policy": {"limit": {"context": self.config.context, "output": self.config.output}}},
                }
            },
        }
        switched_off = ["AUTOUPDATE", "LSP_DOWNLOAD", "MODELS_FETCH", "DEFAULT_PLUGINS", "CLAUDE_CODE", "SHARE"]
        env = {
            **self.program_env,
            **{f"OPENCODE_DISABLE_{name}": "true" for name in switched_off},
            "OPENCODE_CONFIG_CONTENT": json.dumps(settings),
        }
        # a title saves the model call that makes one
        return await runtime.run_program([self.program, "run", "--pure", "--title", "task", "--", prompt or ""], env)
