"""slime's training script with its Megatron actors, on this CPU.

    python -m agl_slime.tools.rehearse.megatron [train.py | train_async.py] [FLAGS OF SLIME]

Trains the lookup agent in a directory under runs/ by default; flags replace the defaults. Without
``--rollout-external-engine-addrs`` the embedded engine serves ``--hf-checkpoint``.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from agl_slime import metric_names as names
from agl_slime.support.terminal import exit_code_of, print_line
from agl_slime.tools.rehearse.megatron import flags as flags_of
from agl_slime.tools.rehearse.megatron.cuda import install
from agl_slime.tools.rehearse.megatron.sources import Sources

_SHOWN = (names.REWARD_MEAN, names.LOGPROB_DIFF_MAX)


def prepare() -> Sources:
    """Make slime and Megatron importable in this process and in Ray's workers, with a CPU for CUDA."""
    sources = Sources.find(os.environ)
    sources.put_on_path()
    install()
    from agl_slime.tools.rehearse.actor import register_cpu
    from agl_slime.tools.rehearse.megatron import arguments

    register_cpu()
    arguments.patch()
    return sources


def run(script: Path, flags: list[str], *, num_gpus: int, actor: str = "MegatronTrainRayActor") -> None:
    """Run a training script as a program, on a Ray of this process with logical GPUs and a class of ``actor.py``."""
    from agl_slime.tools.rehearse.actor import run_script
    from agl_slime.tools.rehearse.megatron import actor as actors

    sizes = {"num_gpus": num_gpus, "num_cpus": num_gpus + 3, "object_store_memory": 150_000_000}
    run_script(script, flags, getattr(actors, actor), address="local", include_dashboard=False, **sizes)


def main(words: list[str]) -> int:
    """The command; returns its exit code."""
    script = words.pop(0) if words and words[0].endswith(".py") else "train.py"
    return exit_code_of(lambda: train(script, words))


def train(script: str, words: list[str]) -> None:
    sources = prepare()
    from agl_slime.cli.demo import LOOKUP_POLICY
    from agl_slime.engine.process import EmbeddedEngine
    from agl_slime.report.read import RunReader
    from agl_slime.tools.slime_dumps.runs import SlimeRuns

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hf-checkpoint", type=Path, default=LOOKUP_POLICY)
    parser.add_argument("--dump-details", type=Path)
    for name in ("actor-num-nodes", "actor-num-gpus-per-node"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--rollout-external-engine-addrs", nargs="+")
    parsed, _ = parser.parse_known_args(words)
    run_dir = (parsed.dump_details or Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}-slime-cpu")).resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    (settings := run_dir / "agl.yaml").write_text("agl_agent: agl_slime.cli.demo.agent:LookupAgent\n")
    flags = [*flags_of.run_flags(parsed.hf_checkpoint.resolve(), settings, run_dir), *words]
    with ExitStack() as stack:
        if parsed.rollout_external_engine_addrs is None:
            engine = stack.enter_context(EmbeddedEngine(parsed.hf_checkpoint, deterministic=1))
            flags += ["--rollout-external-engine-addrs", engine.url.removeprefix("http://")]
        run(sources.slime / script, flags, num_gpus=parsed.actor_num_nodes * parsed.actor_num_gpus_per_node)
    page = RunReader(run_dir, SlimeRuns(parsed.hf_checkpoint)).update()
    columns = page["metrics"]["columns"] if page is not None else {}
    print_line("  step    reward   log-probs: engine - Megatron")
    for step, (reward, difference) in enumerate(zip(*(columns[name] for name in _SHOWN), strict=True)):
        print_line(f"{step:>6}{reward:>10.3f}   {difference:.1e}")
    print_line(f"Written to {run_dir}: agl-slime report {run_dir}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
