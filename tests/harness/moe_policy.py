"""Tiny mixtures of experts with random weights, with the demo policy's tokenizer."""

from pathlib import Path

from agl_slime.cli.demo import LOOKUP_POLICY

LAYERS, TOP_K, EXPERTS = 3, 2, 8
FAMILIES = {"qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"}


def save_moe(directory: Path, *, family: str = "qwen3_moe", router_noise: float = 0.0) -> Path:
    """The same weights each time; ``router_noise`` is the deviation of noise on the routers' weights."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(LOOKUP_POLICY, local_files_only=True)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    sizes |= {"max_position_embeddings": 512, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    if family == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**sizes, initializer_range=0.3, pad_token_id=None)
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.add_(torch.randn_like(parameter), alpha=router_noise)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
