"""Bytes and CPU of routed experts, from the engine's answers to slime's Sample, beside the same rollout without.

python -m benchmarks.routed_experts [--layers 48] [--top-k 8] [--turns 8] [--directory DIR]

"all rows": bytes if every call asked for the rows of its whole prompt, as slime's own generate does; "int32": memory of
a rollout if each turn kept them.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from agl_slime.engine.client.generation import PartRequest, SamplingParams, parse_generation
from agl_slime.tokens.converter import convert_trajectory
from agl_slime.tokens.replay import file_replay, remove_replay
from agl_slime.tokens.span_codec import TurnEncoder, decode_turns
from agl_slime.tokens.turn import Trajectory, Turn
from agl_slime.train.slime.replay import in_slimes_form


def rollout(tokens: int, turns: int, shape: tuple[int, int] | None, directory: Path | None = None) -> dict[str, float]:
    """One rollout of ``turns`` turns, half of whose tokens are sampled; seconds of CPU and bytes. ``directory``: where
    experts are written to, and not to spans."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, tokens, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=tokens, routed_experts=shape)
    each, start, spent = tokens // turns, 0, dict.fromkeys(("parse", "spans", "sample", "tensor"), 0.0)
    encoder, spans, wire, naive = TurnEncoder(), list[Any](), 0, 0
    for turn in range(turns):
        prompt, end = ids[: turn * each + each // 2], (turn + 1) * each
        said = ids[len(prompt) : end].tolist()
        meta: dict[str, Any] = {"finish_reason": {"type": "stop"}}
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in said]
        if shape is not None:
            rows = rng.integers(0, 128, (end - 1 - start, *shape), dtype=np.int32)
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
            wire += len(meta["routed_experts"])
            naive += 4 * (end - 1) * shape[0] * shape[1]
        request = PartRequest(tuple(prompt.tolist()), sampling, start)
        began = time.process_time()
        generation = parse_generation({"text": "", "meta_info": meta}, request=request)
        spent["parse"] += time.process_time() - began
        link: Any = {"base_turn": turn - 1, "kept_tokens": turn * each} if turn else {}
        began = time.process_time()
        if directory is not None:
            link["filed"] = file_replay(str(directory), "a", encoder.stream, generation.experts, None)
        made = Turn.from_generation(prompt, generation, **link)
        spans.append(SimpleNamespace(attributes=encoder.encode(made)))
        spent["spans"] += time.process_time() - began
        start = end - 1
    began = time.process_time()
    trajectory = Trajectory(rollout_id="a", attempt_id="1", task={}, turns=tuple(decode_turns(spans)), reward=1.0)
    (sample,) = convert_trajectory(trajectory, replay_files=directory).samples
    spent["sample"] = time.process_time() - began
    held = 0 if sample.rollout_routed_experts is None else sample.rollout_routed_experts.nbytes
    began = time.process_time()
    in_slimes_form([sample])
    spent["tensor"] = time.process_time() - began
    stored = sum(len(value) for span in spans for value in span.attributes.values() if isinstance(value, str))
    tensor = sample.rollout_routed_experts
    in_files = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) if directory else 0
    if directory is not None:
        remove_replay(directory, ["a"])
    sizes = {"wire": wire, "all rows": naive * 4 / 3, "spans": stored, "files": in_files, "Sample": held}
    sizes |= {"tensor": 0 if tensor is None else tensor.element_size() * tensor.numel(), "int32": naive}
    return {**{f"{name} ms": 1e3 * value for name, value in spent.items()}, **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 48), ("top-k", 8), ("turns", 8), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--directory", help="where files are made; by default that for temporary files")
    args = parser.parse_args()
    print(f"{args.layers} layers, {args.top_k} experts per token, {args.turns} turns; least of {args.repeat}")
    for tokens in (2_048, 32_768):
        for name in ("without", "in spans", "in files"):
            shape = None if name == "without" else (args.layers, args.top_k)
            with tempfile.TemporaryDirectory(dir=args.directory) as made:
                where = Path(made) if name == "in files" else None
                found = [rollout(tokens, args.turns, shape, where) for _ in range(args.repeat)]
            least = {key: min(one[key] for one in found) for key in found[0]}
            times = "  ".join(f"{key} {value:8.1f}" for key, value in least.items() if key.endswith("ms"))
            sizes = "  ".join(f"{key} {value / 1e6:8.2f}" for key, value in least.items() if not key.endswith("ms"))
            print(f"{tokens:6} tokens, {name:8} | {times} | MB: {sizes}")


if __name__ == "__main__":
    main()
