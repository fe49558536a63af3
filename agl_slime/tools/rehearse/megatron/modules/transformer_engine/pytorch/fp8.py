from contextlib import nullcontext as fp8_autocast

__all__ = ["FP8GlobalStateManager", "fp8_autocast"]


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False
