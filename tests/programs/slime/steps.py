"""Steps of slime's own Megatron actors on a tiny policy, without Ray: a process per rank.

    python -m tests.programs.slime.steps DIRECTORY

Each case becomes DIRECTORY/NAME, with slime's dumps and the weights after the step; DIRECTORY/converted is a checkpoint
by slime's tool. What slime logs of a case's last step is the result, by the case's name.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from runpy import run_path
from typing import Any

import numpy as np

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.slime import CREDIT_FLAGS
from agl_slime.support.net import free_port
from agl_slime.tools.rehearse.megatron.__main__ import prepare
from agl_slime.tools.rehearse.megatron.flags import as_flags, run_flags
from agl_slime.types import Sample
from tests.harness.slime_programs import report, require_slime
from tests.harness.trainer_policy import make_model, make_samples

TEACHER = "TEACHER"  # in flags: the directory of the teacher's checkpoint
KL = "--normalize-advantages --kl-coef 0.1 --kl-loss-type k2"
LOSSES: dict[str, str] = {
    "grpo": "",
    "grpo_of_the_engine": "--use-rollout-logprobs --eps-clip 0.05 --eps-clip-high 0.08",
    "truncated": "--use-tis --tis-clip 1.1 --use-kl-loss --kl-loss-coef 0.2 --kl-loss-type low_var_kl",
    "cispo": "--advantage-estimator cispo --use-rollout-logprobs --eps-clip 0.1 --eps-clip-high 0.1",
    "gspo": "--advantage-estimator gspo --use-rollout-logprobs --eps-clip 0.01",
    "per_token": "--calculate-per-token-loss --use-rollout-logprobs --disable-grpo-std-normalization",
    "rewards": "--disable-rewards-normalization --use-tis --tis-clip 1.05",
    "reinforce": f"--advantage-estimator reinforce_plus_plus --gamma 0.9 {KL}",
    "baseline": f"--advantage-estimator reinforce_plus_plus_baseline {KL}",
    "critic": "--advantage-estimator ppo --gamma 0.9 --lambd 0.8 --use-tis",
    "distilled": f"--use-opd --opd-type megatron --opd-teacher-load {TEACHER} --opd-kl-coef 0.3 --use-tis",
    "dynamic": "--use-dynamic-batch-size --max-tokens-per-gpu 64 --use-tis --tis-clip 1.1",
    "uneven": "--use-tis --tis-clip 1.1 --global-batch-size 11",
}
"""Flags; in ``uneven`` a Sample of the batch is missing."""
LAYOUTS: dict[str, str] = {
    "tp2": "--tensor-model-parallel-size 2",
    "sequence_parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "dp2": "--use-distributed-optimizer",
}
"""Layouts of ``grpo`` on two ranks."""
PLAIN = "--adam-eps 1000 --lr 10000 --weight-decay 0 --clip-grad 0 --use-rollout-logprobs"  # steps of 10 gradients
TURNS: dict[str, str] = {
    "turns": f"{PLAIN} {' '.join(CREDIT_FLAGS)}",
    "turns_cp2": f"{PLAIN} {' '.join(CREDIT_FLAGS)} --context-parallel-size 2",
    "turns_split": PLAIN,
}
"""Rewards of turns in one Sample, and in a Sample per reward."""
RESUMES = ("resumed", "tp2", "dp2")
GROUPS, SIZE = 3, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """``steps`` are trained, with checkpoints in ``saved``, and from one there if it has one."""

    name: str
    flags: str
    world: int = 1
    steps: tuple[int, ...] = (0,)
    saved: Path | None = None
    model: Path | None = None
    architecture: list[str] | None = None
    """Megatron's options of ``model``, which is pushed before the first step, too."""
    samples: list[Sample] | None = None


def main(directory: Path) -> None:
    begin()
    for seed, name in enumerate(("policy", "reference", "teacher")):
        make_model(seed=seed).save_pretrained(shutil.copytree(LOOKUP_POLICY, directory / name))
    cases = [Case(name=name, flags=flags) for name, flags in LOSSES.items()]
    cases += [Case(name=name, flags=flags, world=2) for name, flags in LAYOUTS.items()]
    cases += [Case(name=name, flags=flags, world=1 + name.endswith("cp2")) for name, flags in TURNS.items()]
    saved = directory / "saved"
    cases.append(Case(name="two_steps", flags="--dist-ckpt-optim-fully-reshardable", steps=(0, 1), saved=saved))
    for name in RESUMES:
        layout = {"flags": LAYOUTS.get(name, ""), "world": 1 + (name in LAYOUTS)}
        cases.append(Case(name=f"{name}_later", steps=(1,), saved=saved, **layout))
    logs = {case.name: run(directory, case) for case in cases}
    places = {"input-dir": saved / "iter_0000000", "origin-hf-dir": directory / "policy"}
    places["output-dir"] = directory / "converted" / "weights"
    sys.argv[1:] = as_flags(places)
    run_path(str(require_slime() / "tools" / "convert_torch_dist_to_hf.py"), run_name="__main__")
    report(logs)


def begin() -> None:
    """Prepare this process, whose children are the ranks."""
    prepare()
    import slime.ray.rollout
    import slime.ray.train_actor as base

    import_module("agl_slime.tools.rehearse.megatron.actor")  # before the forks
    base.get_local_gpu_id = lambda: 0
    slime.ray.rollout.ray.put = slime.ray.rollout.ray.get = lambda value, **_: value


def run(directory: Path, case: Case) -> dict[str, float]:
    """slime's log of the last step."""
    work, port = directory / case.name, free_port()
    work.mkdir()
    ranks = [fork(directory, case, rank, port) for rank in range(case.world)]
    ends = [os.waitpid(pid, 0)[1] for pid in ranks]
    if any(ends):
        raise SystemExit("\n".join(path.read_text()[-6000:] for path in work.glob("rank_*.txt")))
    return json.loads((work / "log.json").read_text())


def fork(directory: Path, case: Case, rank: int, port: int) -> int:
    if pid := os.fork():
        return pid
    try:
        train(directory, case, rank, port)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def train(directory: Path, case: Case, rank: int, port: int) -> None:
    import torch
    from slime.backends.megatron_utils import model
    from slime.observability.rollout_data_utils import save_debug_rollout_data

    from agl_slime.tools.rehearse.megatron.actor import MegatronTrainRayActor

    work, logs = directory / case.name, list[dict[str, Any]]()
    output = os.open(work / f"rank_{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    model.logging_utils.log = lambda args, metrics, step_key: logs.append(metrics)
    args, samples = args_of(directory, case), case.samples or samples_of(uneven=case.name == "uneven")
    if case.name in TURNS:
        samples = with_turn_rewards(samples, split=case.name == "turns_split")
    os.environ["ENABLE_ROUTING_REPLAY"] = f"{args.use_routing_replay:d}"  # as slime's group of actors does
    actor = MegatronTrainRayActor(case.world, rank, "127.0.0.1", port)
    kl = args.kl_coef != 0 or args.use_kl_loss
    first = actor.init(args, "actor", with_ref=kl, with_opd_teacher=args.use_opd)
    assert case.steps[0] in (0, first)
    if case.model is not None:
        actor.weight_updater.update_weights()
    for step in case.steps:
        if rank == 0:
            save_debug_rollout_data(args.save_debug_rollout_data, samples, rollout_id=step, evaluation=False)
        values = [torch.arange(float(sample.response_length)).sin() for sample in samples]  # of a critic
        actor.train(step, batches(args, samples, actor.train_parallel_config), external_data={"values": values})
        if case.saved is not None and step == 0:
            actor.save_model(0)
    actor.weight_updater.update_weights()
    if of_steps := [metrics for metrics in logs if "train/step" in metrics]:
        (work / "log.json").write_text(json.dumps({name: float(value) for name, value in of_steps[-1].items()}))


def args_of(directory: Path, case: Case) -> Any:
    from slime.utils.arguments import parse_args

    work = directory / case.name
    settings = work / "agl.yaml"
    settings.write_text("agl_agent: agl_slime.cli.demo.agent:LookupAgent\n")
    sizes = {"num-rollout": 2, "rollout-batch-size": GROUPS, "n-samples-per-prompt": SIZE}
    sizes |= {"global-batch-size": GROUPS * SIZE, "actor-num-gpus-per-node": case.world, "rollout-num-gpus": 1}
    policy = case.model or directory / "policy"
    reference = directory / "reference" if "kl" in case.flags else policy
    sizes |= {"num-gpus-per-node": case.world, "ref-load": reference}
    sizes |= {"load": policy, "save-interval": 1, "save": work}
    if case.saved is not None:
        sizes |= dict.fromkeys(("load", "save"), case.saved)
    flags = run_flags(policy, settings, work, architecture=case.architecture)
    flags += [*as_flags(sizes), "--debug-train-only"]
    sys.argv = ["train.py", *flags, *case.flags.replace(TEACHER, str(directory / "teacher")).split()]
    args = parse_args()
    if case.name not in TURNS:
        args.custom_reward_post_process_path = None  # slime's own
    return args


def samples_of(*, uneven: bool) -> list[Sample]:
    """Samples whose log-probs are not quite the policy's."""
    rng, samples = np.random.default_rng(0), make_samples(make_model(), groups=GROUPS, per_group=SIZE, seed=3)
    for sample in samples:
        sample.rollout_log_probs = [value + rng.normal(0, 0.1) for value in sample.rollout_log_probs or []]
        sample.reward = float(rng.integers(0, 5)) / 4
    return samples[:-1] if uneven else samples


def with_turn_rewards(samples: list[Sample], *, split: bool) -> list[Sample]:
    """Of each Sample the second third has a turn's reward and the last a role's; with ``split`` as Samples."""
    rng, parts = np.random.default_rng(1), list[Sample]()
    for sample in samples:
        length, mask = sample.response_length, sample.loss_mask or []
        edges = [0, length // 3 or 1, 2 * length // 3 or 1, length]
        names = ["", "turn:1", "role:critic"]
        rewards = [sample.reward, *(float(value) for value in rng.integers(0, 4, 2))]
        spans = [
            span for span in zip(names, rewards, edges[:-1], edges[1:], strict=True) if any(mask[slice(*span[2:])])
        ]
        if not split:
            sample.metadata = {"reward_spans": [list(span) for span in spans if span[0]]}
        for name, reward, start, end in spans if split else ():
            own = [bit * (start <= place < end) for place, bit in enumerate(mask)]
            changes = {"loss_mask": own, "reward": reward, "index": len(parts), "metadata": {"reward_of": name}}
            parts.append(replace(sample, **changes))
    return parts if split else samples


def batches(args: Any, samples: list[Sample], parallel: dict[str, int]) -> list[Any]:
    """The data-parallel ranks' batches, by slime's manager."""
    from slime.ray import rollout

    cls: Any = rollout.RolloutManager.__ray_metadata__.modified_class
    manager = object.__new__(cls)
    vars(manager).update(args=args, train_parallel_config=parallel)
    hook, manager.custom_convert_samples_to_train_data_func = args.custom_reward_post_process_path, None
    manager.custom_reward_post_process_func = hook and resolve_name(hook)
    return manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
