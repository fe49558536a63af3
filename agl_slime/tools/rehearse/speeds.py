"""Speeds of engines and training, from a model's sizes and a card's public figures (a roofline), or as given.

A decoding step reads the weights once, whatever the number of sequences, and each sequence's KV cache; training costs 6
operations per parameter and token, and each further forward pass 2. The shares of a card's peak that are reached in
practice are assumptions: give measured speeds where there are some.
"""

from __future__ import annotations

from dataclasses import dataclass

from agl_slime.tools.rehearse.checks import Arguments
from agl_slime.tools.rehearse.forecast import Shape, Speeds

# a GPU's dense BF16 operations and bytes of memory per second, by its data sheet
CARDS = {"a100": (312e12, 2.039e12), "h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12), "b200": (2250e12, 8.0e12)}
CARDS["mi300x"] = (1307e12, 5.3e12)
_READ, _DECODE, _PREFILL, _TRAIN = 0.6, 0.4, 0.4, 0.35  # shares of bandwidth and peak that are reached
_STEP_S = 0.004  # of a decoding step beside the card's work: scheduler, sampling, launches
_UPDATE_BYTES_PER_S, _UPDATE_S = 20e9, 3.0  # weights that each node moves per second; pause and flush
_OFFLOAD_BYTES_PER_S = 20e9  # between GPU and host, per GPU
_DISK_BYTES_PER_S, _CHANGED = 5e9, 0.05  # of weights on disks; the share of their bytes that a step changes
_ACCEPTED, _DRAFT_S = 0.7, 0.001  # of drafted tokens, each after the one before it; of a draft step


@dataclass(frozen=True)
class Size:
    """Parameters of a model, in total and per token, and bytes of KV cache per token."""

    parameters: float
    active: float
    kv_bytes: float

    @classmethod
    def from_args(cls, args: Arguments) -> Size | None:
        """The size by Megatron's model flags; ``None`` without them."""
        if not (args.num_layers and args.hidden_size and args.num_attention_heads):
            return None
        layers, hidden, heads = args.num_layers, args.hidden_size, args.num_attention_heads
        width = args.kv_channels or hidden // heads
        kv = args.num_query_groups or heads
        attention = layers * hidden * width * (2 * heads + 2 * kv)
        embedding = (args.padded_vocab_size or args.vocab_size or 0) * hidden
        embedding *= 2 if args.untie_embeddings_and_output_weights else 1
        ffn = args.ffn_hidden_size or 4 * hidden
        dense = layers * 3 * hidden * ffn
        total = active = attention + embedding + dense
        if args.num_experts:
            expert = layers * 3 * hidden * (args.moe_ffn_hidden_size or ffn)
            shared = layers * 3 * hidden * (args.moe_shared_expert_intermediate_size or 0)
            total = attention + embedding + expert * args.num_experts + shared
            active = attention + embedding + expert * (args.moe_router_topk or 8) + shared
        # latent attention keeps 576 numbers of a token in each layer
        return cls(total, active, 2 * layers * (576 if args.multi_latent_attention else 2 * kv * width))


def speeds_of(args: Arguments, size: Size, card: str, shape: Shape) -> Speeds:
    """The preset for this model on ``card``, a key of ``CARDS``."""
    (flops, bytes_per_s), gpus = CARDS[card], args.rollout_num_gpus_per_engine or 1
    read = bytes_per_s * _READ * gpus
    context = shape.prompt_tokens + shape.mean_tokens / 2
    passes = 6 + 2 * (1 + bool(args.use_kl_loss or args.kl_coef))  # the old log-probs, and the reference's
    recomputed = 2 if args.recompute_granularity == "full" else 0
    training = flops * _TRAIN * args.actor_gpus
    weights = 2 * size.parameters
    per_gpu = weights / max(args.model_parallel, 1)
    moved = weights / _UPDATE_BYTES_PER_S / max(args.actor_num_nodes or 1, 1)
    if args.update_weight_transport == "disk":  # trainers write changed weights, and engines read all of them
        moved = weights * (1 + (_CHANGED if args.update_weight_mode == "delta" else 1)) / _DISK_BYTES_PER_S
    drafts = (args.sglang_speculative_num_steps or 3) if args.sglang_speculative_algorithm else 0
    checked = (args.sglang_speculative_num_draft_tokens or drafts + 1) if drafts else 1
    tokens = sum(_ACCEPTED**n for n in range(drafts + 1))  # of a step that checks the drafts of small layers
    return Speeds(
        # a batch of many sequences reads nearly all experts
        token_s=(_STEP_S + weights / read + drafts * (_DRAFT_S + weights / read / (args.num_layers or 1))) / tokens,
        token_s_per_sequence=(size.kv_bytes * context / read + checked * 2 * size.active / (flops * _DECODE * gpus))
        / tokens,
        prefill_token_s=2 * size.active / (flops * _PREFILL * gpus),
        train_token_s=(passes + recomputed) * size.active / training,
        sync_s=_UPDATE_S + moved,
        offload_s=2 * 9 * per_gpu / _OFFLOAD_BYTES_PER_S,  # weights, gradients, optimizer: out and in
    )


def shape_of(args: Arguments, *, mean_tokens: float | None, prompt_tokens: int) -> Shape:
    """The batch, engines and driver of slime's arguments. Responses have a third of their limit on average unless
    ``mean_tokens`` is given."""
    limit = args.rollout_max_response_len or 1024
    agl_slime_rollouts = (args.rollout_function_path or "").startswith("agl_slime")
    engines = (args.rollout_num_gpus or args.actor_gpus) // (args.rollout_num_gpus_per_engine or 1)
    if args.rollout_external_engine_addrs:
        engines = len(args.rollout_external_engine_addrs)
    return Shape(
        groups=args.rollout_batch_size,
        size=args.n_samples_per_prompt or 1,
        engines=max(1, engines),
        slots=args.sglang_max_running_requests or args.sglang_server_concurrency or 512,
        prompt_tokens=prompt_tokens,
        mean_tokens=mean_tokens or limit / 3,
        max_tokens=limit,
        asynchronous=args.asynchronous,
        colocated=bool(args.colocate),
        max_staleness=args.agl_max_staleness if agl_slime_rollouts else None,
        oversampled=None if agl_slime_rollouts else args.over_sampling_batch_size,
        resumes=agl_slime_rollouts,
    )
