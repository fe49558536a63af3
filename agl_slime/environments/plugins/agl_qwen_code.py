from agl_slime.environments.harnesses.qwen_code import QwenCodeHarness

__all__ = ["QwenCodeHarness"]
