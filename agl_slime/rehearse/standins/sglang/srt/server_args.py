"""The fields of SGLang's server arguments that slime sets or reads for engines that run already."""

from __future__ import annotations

import argparse
import dataclasses


@dataclasses.dataclass
class ServerArgs:
    model_path: str = ""
    trust_remote_code: bool = False
    random_seed: int | None = None
    enable_memory_saver: bool = False
    host: str = "127.0.0.1"
    port: int = 30000
    nccl_port: int | None = None
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    gpu_id_step: int = 1
    base_gpu_id: int = 0
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    skip_server_warmup: bool = False
    enable_draft_weights_cpu_backup: bool = False
    enable_metrics: bool = False
    enable_dp_attention: bool = False
    speculative_algorithm: str | None = None
    api_key: str | None = None

    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        for long, short in (
            ("data", "dp"),
            ("pipeline", "pp"),
            ("expert", "ep"),
            ("tensor", "tp"),
            ("moe-data", "moe-dp"),
        ):
            parser.add_argument(f"--{long}-parallel-size", f"--{short}-size", type=int, default=1)
        parser.add_argument("--enable-dp-attention", action="store_true")
        parser.add_argument("--enable-metrics", action="store_true")
        parser.add_argument("--enable-deterministic-inference", action="store_true")
        parser.add_argument("--speculative-algorithm", type=str)
        parser.add_argument("--speculative-num-steps", type=int)
        parser.add_argument("--speculative-num-draft-tokens", type=int)
        parser.add_argument("--context-length", type=int)
        parser.add_argument("--mem-fraction-static", type=float)
