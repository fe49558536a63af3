"""The fields of SGLang's server arguments that slime sets or reads for engines that run already."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

_DEFAULTS: dict[str, Any] = {
    "model_path": "",
    "host": "127.0.0.1",
    "port": 30000,
    "node_rank": 0,
    "base_gpu_id": 0,
    **dict.fromkeys(["nnodes", "gpu_id_step", "tp_size", "dp_size", "pp_size", "ep_size"], 1),
    **dict.fromkeys(["random_seed", "nccl_port", "dist_init_addr", "speculative_algorithm", "api_key"]),
    **dict.fromkeys(["trust_remote_code", "enable_memory_saver", "skip_server_warmup", "enable_metrics"], False),
    **dict.fromkeys(["enable_draft_weights_cpu_backup", "enable_dp_attention"], False),
}


class ServerArgs(dataclasses.make_dataclass("Fields", [(name, Any, value) for name, value in _DEFAULTS.items()])):
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        sizes = {"data": "dp", "pipeline": "pp", "expert": "ep", "tensor": "tp", "moe-data": "moe-dp"}
        for long, short in sizes.items():
            parser.add_argument(f"--{long}-parallel-size", f"--{short}-size", type=int, default=1)
        for name in ("enable-dp-attention", "enable-metrics", "enable-deterministic-inference"):
            parser.add_argument(f"--{name}", action="store_true")
        for name in ("speculative-num-steps", "speculative-num-draft-tokens", "context-length"):
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--speculative-algorithm", type=str)
        parser.add_argument("--mem-fraction-static", type=float)
