"""A launch script's model and layout at sizes of one machine: same architecture, same divisibilities, about 100,000
parameters, and a checkpoint of random weights that transformers reads, too."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = 8
"""The largest world."""
PARALLEL = {"tensor-model": "tp", "pipeline-model": "pp", "context": "cp", "expert-model": "ep", "expert-tensor": "etp"}
_LAYERS, _EXPERTS, _WIDTH = 4, 8, 16
NAMES = {"hidden_size": "hidden-size", "intermediate_size": "ffn-hidden-size", "num_hidden_layers": "num-layers"}
NAMES |= {"num_attention_heads": "num-attention-heads", "num_key_value_heads": "num-query-groups"}
NAMES |= {"head_dim": "kv-channels", "vocab_size": "vocab-size", "moe_intermediate_size": "moe-ffn-hidden-size"}
NAMES |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), "num-experts")
NAMES |= {"num_experts_per_tok": "moe-router-topk", "n_group": "moe-router-num-groups"}
NAMES |= {"topk_group": "moe-router-group-topk", "q_lora_rank": "q-lora-rank", "kv_lora_rank": "kv-lora-rank"}
NAMES |= {"qk_nope_head_dim": "qk-head-dim", "qk_rope_head_dim": "qk-pos-emb-head-dim", "v_head_dim": "v-head-dim"}
NAMES |= {"shared_expert_intermediate_size": "moe-shared-expert-intermediate-size"}
"""Megatron's options by transformers' names."""
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_UNREAD = ["layer_types", "mlp_layer_types", "eos_token_id", "quantization_config", "auto_map", "torch_dtype"]
_UNREAD += ["dtype", "architectures"]
_MARKS = [f"{mark}_token_id" for mark in ("image", "video", "vision_start", "vision_end")]
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}


def values_of(flags: Sequence[str]) -> dict[str, str]:
    """The values of a command line's options by their names, the last of each; "" for a switch."""
    values: dict[str, str] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            values[name] = value
        elif name:
            values[name] = f"{values[name]} {word}".lstrip()
    if "hidden-size" in values:  # Megatron's default
        width = int(values["hidden-size"]) // int(values["num-attention-heads"])
        values.setdefault("kv-channels", str(width))
    return values


@dataclass(frozen=True)
class Small:
    """Options of Megatron after the script's, a checkpoint's configuration, and the parallel sizes that have
    changed."""

    options: dict[str, object]
    config: dict[str, Any]
    changes: tuple[str, ...]
    ranks: int


def shrink(flags: Sequence[str], *, gpus: int, tokens: int, config: Mapping[str, Any] | None = None) -> Small:
    """The model and layout of a command line on ``gpus``, with a vocabulary of at least ``tokens``; ``config``: of the
    script's checkpoint, else as the options describe it."""
    values = values_of(flags)
    layout, changes = small_layout(values, gpus)
    sizes = small_sizes(values, layout, tokens=tokens)
    options: dict[str, object] = {**sizes}
    if "moe-layer-freq" in values:
        dense = min(dense_layers(values), 1)
        options["moe-layer-freq"] = f"[0]*{dense}+[1]*{sizes['num-layers'] - dense}"
    for long, short in PARALLEL.items():
        if f"{long}-parallel-size" in values:
            options[f"{long}-parallel-size"] = layout[short]
    config = small_config(config or described(values), values, sizes)
    return Small(options, config, tuple(changes), math.prod(layout[name] for name in ("dp", "tp", "pp", "cp")))


def small_layout(values: Mapping[str, str], gpus: int) -> tuple[dict[str, int], list[str]]:
    """Parallel sizes of at most ``RANKS`` ranks: data-parallel ranks go first, then each size to 2. And the changes."""
    before = {short: int(values.get(f"{long}-parallel-size", 1)) for long, short in PARALLEL.items()}
    before["dp"] = max(1, gpus // (before["tp"] * before["pp"] * before["cp"]))
    before["etp"] = int(values.get("expert-tensor-parallel-size", before["tp"]))
    sizes = {**before}

    def ranks() -> int:
        return sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["cp"]

    sizes["dp"] = max(1, min(sizes["dp"], RANKS * sizes["dp"] // ranks()))
    for name in ("tp", "pp", "cp"):
        if ranks() > RANKS:
            sizes[name] = min(sizes[name], 2)
    sizes["etp"] = min(sizes["etp"], sizes["tp"])
    room = ranks() // (sizes["pp"] * sizes["etp"])
    if "num-experts" in values and room % sizes["ep"]:
        sizes["ep"] = 2 if room % 2 == 0 else 1
    return sizes, [f"{name} {before[name]} to {size}" for name, size in sizes.items() if size != before[name]]


def small_sizes(values: Mapping[str, str], layout: Mapping[str, int], *, tokens: int) -> dict[str, int]:
    """Megatron's options of a small model with a vocabulary of at least ``tokens``."""
    number = {name: int(value) for name, value in values.items() if re.fullmatch(r"\d+", value)}
    tp, ep = number.get("tensor-model-parallel-size", 1), number.get("expert-model-parallel-size", 1)
    heads = number["num-attention-heads"]
    sizes = {"num-layers": _LAYERS, "ffn-hidden-size": 6 * _WIDTH}
    if groups := number.get("num-query-groups"):
        sizes["num-query-groups"] = small = _divided(groups, tp, layout["tp"], 2)
        sizes["num-attention-heads"] = small * (heads // groups) + heads % groups
    else:
        sizes["num-attention-heads"] = _divided(heads, tp, layout["tp"], 4)
    sizes["hidden-size"] = sizes["num-attention-heads"] * (_WIDTH if heads < 32 else _WIDTH // 2)
    sizes["kv-channels"] = _WIDTH
    if number.get("num-layers", 0) % number.get("pipeline-model-parallel-size", 1):
        sizes["num-layers"] += 1
    stages = [f"decoder-{end}-pipeline-num-layers" for end in ("first", "last")]
    sizes |= {name: 1 for name in (*stages, "num-layers-per-virtual-pipeline-stage") if name in number}
    if "num-experts" in number:
        groups = min(number.get("moe-router-num-groups", 1), _EXPERTS // 2)
        sizes |= {"num-experts": _EXPERTS if number["num-experts"] % ep == 0 else _EXPERTS - 1}
        topk = 2 * max(1, groups // 2)  # two of each group, as DeepSeek's router takes
        sizes |= {"moe-router-topk": min(number.get("moe-router-topk", 2), topk), "moe-ffn-hidden-size": 2 * _WIDTH}
        if number.get("ffn-hidden-size") == number.get("moe-ffn-hidden-size"):
            sizes["ffn-hidden-size"] = 2 * _WIDTH
        if "moe-router-num-groups" in number:
            sizes |= {"moe-router-num-groups": groups, "moe-router-group-topk": max(1, groups // 2)}
        if shared := number.get("moe-shared-expert-intermediate-size"):
            wide = number.get("moe-ffn-hidden-size", shared)
            sizes["moe-shared-expert-intermediate-size"] = 2 * _WIDTH * max(1, shared // wide)
    widths = {"q-lora-rank": 2, "kv-lora-rank": 2, "qk-head-dim": 1, "v-head-dim": 1, "qk-pos-emb-head-dim": 0.5}
    sizes |= {name: int(width * _WIDTH) for name, width in widths.items() if name in number}
    divisor = number.get("make-vocab-size-divisible-by", 128)
    padded, unit = number["vocab-size"] % (divisor * tp), divisor * layout["tp"]
    size = math.ceil(tokens / unit) * unit
    sizes["vocab-size"] = max(tokens + (tokens == size), size - unit // 2) if padded else size
    return sizes


def _divided(count: int, parts: int, small_parts: int, least: int) -> int:
    """A small count that ``small_parts`` divide, or not, as ``parts`` divide ``count``."""
    if count % parts == 0:
        return max(min(count, least), small_parts) if least % small_parts == 0 else small_parts
    return 1 if parts % count == 0 else least + 1


def dense_layers(values: Mapping[str, str]) -> int:
    """Dense layers before the layers of experts, in ``--moe-layer-freq``."""
    count = 0
    for part, times in re.findall(r"\[([\d, ]+)\](?:\*(\d+))?", values.get("moe-layer-freq", "")):
        layers = [int(layer) for layer in re.findall(r"\d+", part)]
        if any(layers):
            return count + next(place for place, layer in enumerate(layers) if layer)
        count += len(layers) * int(times or 1)
    return count


def family(values: Mapping[str, str]) -> str:
    """transformers' type of the model that Megatron's options describe."""
    experts, spec = "num-experts" in values, values.get("spec", "")
    for name in ("minimax_m2", "qwen3_next", "glm4"):
        if name in spec:
            return name
    if "qwen3_5" in spec:
        return "qwen3_5_moe" if experts else "qwen3_5"
    if "glm5" in spec or "mtp-num-layers" in values:
        return "glm_moe_dsa" if "glm5" in spec else "mimo"
    if "multi-latent-attention" in values:
        return "deepseek_v3" if "rotary-scaling-factor" in values else "glm4_moe_lite"
    if experts:
        return "glm4_moe" if "moe-router-enable-expert-bias" in values else "qwen3_moe"
    return "qwen3" if "qk-layernorm" in values else "qwen2" if "add-qkv-bias" in values else "llama"


def described(values: Mapping[str, str]) -> dict[str, Any]:
    """transformers' configuration of the model that Megatron's options describe, at their sizes."""
    kind = family(values)
    config: dict[str, Any] = {field: int(values[name]) for field, name in NAMES.items() if name in values}
    config |= {"model_type": kind, "rms_norm_eps": float(values.get("norm-epsilon", 1e-5))}
    config |= {"tie_word_embeddings": "untie-embeddings-and-output-weights" not in values}
    config |= {"attention_bias": "add-qkv-bias" in values, "use_qk_norm": "qk-layernorm" in values}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(values.get("rotary-base", 10000))}
    if "rotary-percent" in values:
        rope["partial_rotary_factor"] = float(values["rotary-percent"])
    factor = float(values.get("rotary-scaling-factor", 1))
    if "use-rope-scaling" in values:
        lengths = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        rope |= {"rope_type": "llama3", "factor": factor, **lengths}
    elif "multi-latent-attention" in values and factor > 1:
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 4096}
        rope |= {"mscale": 1.0, "mscale_all_dim": float(values.get("mscale-all-dim", 0))}
    config["rope_parameters"] = rope
    if "multi-latent-attention" in values:
        config |= {"num_key_value_heads": config["num_attention_heads"], "head_dim": config["qk_rope_head_dim"]}
        config |= {"q_lora_rank": config.get("q_lora_rank"), "attention_bias": False}
    if kind == "minimax_m2":
        config["intermediate_size"] = config["moe_intermediate_size"]
    if "num-experts" in values:
        config |= {"norm_topk_prob": True, "first_k_dense_replace": dense_layers(values), "n_shared_experts": 0}
        config |= {"routed_scaling_factor": float(values.get("moe-router-topk-scaling-factor", 1))}
        config |= {"n_group": config.get("n_group", 1), "topk_group": config.get("topk_group", 1)}
        if shared := config.get("shared_expert_intermediate_size"):
            config["n_shared_experts"] = shared // config["moe_intermediate_size"]
    if kind.startswith("qwen3_5"):
        rope["mrope_section"] = [11, 11, 10]
        text = {**config, "model_type": f"{kind}_text"}
        return {"model_type": kind, "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text}
    return config


def small_config(config: Mapping[str, Any], values: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, Any]:
    """A checkpoint's configuration at the small sizes. A size that differs from the option's keeps its ratio."""
    if "text_config" in config:
        text = small_config(config["text_config"], values, sizes)
        marks = {name: sizes["vocab-size"] - place for place, name in enumerate(_MARKS, 1)}  # tokens of no text
        vision = {**_VISION, "out_hidden_size": sizes["hidden-size"]}
        return {**config, **marks, "text_config": text, "vision_config": vision}
    small = {**config}
    for field, name in NAMES.items():
        if name in sizes and name in values and isinstance(config.get(field), int):
            ratio = config[field] / int(values[name])
            small[field] = round(sizes[name] * ratio) if ratio != 1 else sizes[name]
    if "multi-latent-attention" in values:
        small |= {"num_key_value_heads": small["num_attention_heads"], "head_dim": small["qk_rope_head_dim"]}
    if config["model_type"].startswith(("qwen3_next", "qwen3_5")):
        small |= _LINEAR
    if config["model_type"] == "kimi_k2":  # its code lies in the checkpoint
        small["model_type"] = "deepseek_v3"
    dense, ours = config.get("first_k_dense_replace") or 0, dense_layers(values)
    small["first_k_dense_replace"] = min(dense, 1) if dense == ours else 2 * (dense > ours)
    small["max_position_embeddings"] = min(config.get("max_position_embeddings") or 8192, 8192)
    small = {name: value for name, value in small.items() if name not in _UNREAD}
    return small | dict.fromkeys(("bos_token_id", "pad_token_id"))


def save_model(config: Mapping[str, Any], directory: Path, *, tokenizer: Path, seed: int = 0) -> Any:
    """A checkpoint with random weights, none of which is left at 0 or 1."""
    import torch
    import transformers

    named = {name: value for name, value in config.items() if name != "model_type"}
    auto = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.AutoConfig.for_model(config["model_type"], **named), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("A_log"):  # states that last many tokens; float32 loses digits of sums of faster decays
                tensor.copy_(noise * 0.1 - 4)
            elif name.endswith(("norm.weight", "bias")):
                tensor.add_(noise, alpha=0.1)
            elif tensor.dim() > 1:
                tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    shutil.copytree(tokenizer, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(directory, save_original_format=config["model_type"] != "qwen3_5_moe")
    return model


def load_model(directory: Path) -> tuple[Any, list[str]]:
    """A checkpoint as transformers reads it, and its weights that are missing or unknown, but for weights of images."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    auto: Any = transformers.AutoModelForImageTextToText
    if not hasattr(config, "vision_config"):
        auto = transformers.AutoModelForCausalLM
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, found = auto.from_pretrained(directory, dtype=torch.float32, **options)
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):  # transformers has 1e-6 there; Megatron and SGLang read the configuration
            module.variance_epsilon = config.rms_norm_eps
    wrong = sorted({*found["missing_keys"], *found["unexpected_keys"]})
    wrong += [f"{name} (shape {(*ours,)} for {(*theirs,)})" for name, ours, theirs in sorted(found["mismatched_keys"])]
    return model.eval(), [name for name in wrong if "visual" not in name]
