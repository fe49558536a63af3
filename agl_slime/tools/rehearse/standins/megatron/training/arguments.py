"""Options of Megatron that slime's argument code reads, with Megatron's names; nothing that only Megatron itself would
use."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

_STRINGS = "load save tokenizer-model tokenizer-type ckpt-format wandb-project wandb-exp-name wandb-save-dir"
_INTEGERS = """num-layers hidden-size ffn-hidden-size num-attention-heads seq-length max-position-embeddings vocab-size
    padded-vocab-size global-batch-size save-interval eval-interval ckpt-step train-iters
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers mtp-num-layers
    virtual-pipeline-model-parallel-size expert-tensor-parallel-size num-query-groups kv-channels num-experts
    moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size"""
_COUNTS = """micro-batch-size tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
    expert-model-parallel-size"""
_SWITCHES = """fp16 bf16 finetune no-load-optim no-load-rng no-save-optim sequence-parallel qk-layernorm
    multi-latent-attention untie-embeddings-and-output-weights group-query-attention swiglu"""

OPTIONS: set[str] = set()
"""The last parser's options, these and slime's own: it ignores all others without a word."""


def parse_args(
    extra_args_provider: Callable[[Any], Any] | None = None, ignore_unknown_args: bool = False
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in _STRINGS.split():
        parser.add_argument(f"--{name}", type=str)
    for name in _INTEGERS.split():
        parser.add_argument(f"--{name}", type=int)
    for name in _COUNTS.split():
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in _SWITCHES.split():
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--moe-layer-freq")
    parser.add_argument("--norm-epsilon", type=float, default=1e-5)
    parser.add_argument("--rotary-base", type=float, default=10000.0)
    parser.add_argument("--distributed-backend", default="nccl")
    parser.add_argument("--distributed-timeout-minutes", type=int, default=10)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    OPTIONS.clear()
    OPTIONS.update(parser._option_string_actions)
    return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()


def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> argparse.Namespace:
    return args
