"""Stands in for SGLang's kernel package, whose CPU build needs AMX: the names that SGLang imports at module level. They
are called in speculative decoding only, which stays off."""

import torch

_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def _absent(name):
    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not available on this CPU")

    kernel.__name__ = name
    return kernel


globals().update({name: _absent(name) for name in _NAMES})
__all__ = list(_NAMES)


# Vision models of the Qwen family import a module that looks these operators up, and never call them.
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _library.define(f"{_name}(Tensor a, Tensor b) -> Tensor")
