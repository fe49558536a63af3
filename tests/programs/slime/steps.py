"""slime's own manager, advantages, policy loss and dumps for steps of a tiny policy, in one process: a model of
transformers on a single rank takes Megatron's place.

    python -m tests.programs.slime.steps DIRECTORY

Each of ``CASES`` becomes DIRECTORY/NAME; slime's reported loss and its parts, and the norm of its gradient, are the
result, by the case's name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from agl_slime.types import Sample
from tests.harness.slime_programs import report
from tests.harness.trainer_policy import make_model, make_samples, save_policy
from tests.programs.slime.common import slime_args

KL = "--normalize-advantages --kl-coef 0.1 --kl-loss-type k2"
CASES: dict[str, str] = {
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
    "distilled": "--use-opd --opd-type sglang --opd-kl-coef 0.3 --use-tis",
    "uneven": "--use-tis --tis-clip 1.1",
}
"""Flags; in ``uneven`` a Sample of the batch is missing."""
GROUPS, SIZE = 3, 4


def main(directory: Path) -> None:
    torch.compiler.set_stance("force_eager")  # torch 2.13 would keep the first case's clip range in the compiled loss
    loss, data = one_rank_of_megatron(directory)
    policy = save_policy(directory / "policy")
    report({name: step(directory, policy, name, flags.split(), loss, data) for name, flags in CASES.items()})


def one_rank_of_megatron(directory: Path) -> tuple[Any, Any]:
    """slime's modules of losses and of the dump of train data, with ``megatron.core.mpu`` of a single rank. Their
    package, which would import the whole of Megatron, is an empty one."""
    core, mpu = ModuleType("megatron.core"), ModuleType("megatron.core.mpu")
    sizes = ("context_parallel", "tensor_model_parallel", "data_parallel")
    for name in sizes:
        setattr(mpu, f"get_{name}_world_size", lambda **_: 1)
        setattr(mpu, f"get_{name}_rank", lambda **_: 0)
        setattr(mpu, f"get_{name}_group", lambda **_: None)
    mpu.is_pipeline_last_stage = lambda **_: True  # type: ignore[attr-defined]
    mpu.get_data_parallel_src_rank = lambda **_: 0  # type: ignore[attr-defined]
    core.mpu = mpu  # type: ignore[attr-defined]
    sys.modules |= {"megatron.core": core, "megatron.core.mpu": mpu}
    import slime.backends

    package = ModuleType("slime.backends.megatron_utils")
    package.__path__ = [str(Path(next(iter(slime.backends.__path__))) / "megatron_utils")]
    sys.modules[package.__name__] = package
    store = (directory / "ranks").resolve().as_uri()
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    from slime.backends.megatron_utils import loss
    from slime.observability import train_data_utils

    return loss, train_data_utils


def step(directory: Path, policy: Path, name: str, flags: list[str], loss: Any, dump: Any) -> dict[str, float]:
    args = args_of(directory, policy, name, flags)
    samples = samples_of(uneven=name == "uneven")
    batch = batch_of(args, samples, directory / name)
    model, reference = make_model(), make_model(seed=1)
    logits = logits_of(model, batch["tokens"])
    batch["ref_log_probs"] = log_probs_of(loss, args, reference, batch)
    batch["log_probs"] = log_probs_of(loss, args, model, batch)
    batch["values"] = [values.sin() for values in batch["log_probs"]]  # of a critic
    batch["teacher_log_probs"] = log_probs_of(loss, args, make_model(seed=2), batch)
    loss.compute_advantages_and_returns(args, batch)
    total, figures = value_of(loss, args, batch, logits)
    total.backward()
    dump.save_debug_train_data(args, rollout_id=0, rollout_data=batch)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return {**figures, "grad_norm": float(torch.cat([gradient.flatten() for gradient in gradients]).norm())}


def args_of(directory: Path, policy: Path, name: str, flags: list[str]) -> Any:
    sizes = ["--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(SIZE), "--num-rollout", "1"]
    sizes += ["--global-batch-size", str(GROUPS * SIZE - (name == "uneven")), "--micro-batch-size", "1"]
    sizes += ["--rollout-num-gpus", "1", "--ref-load", str(policy), "--dump-details", str(directory / name)]
    args = slime_args([*sizes, *flags], model=policy, config={}, directory=directory)
    args.custom_reward_post_process_path = None  # slime's own
    return args


def samples_of(*, uneven: bool) -> list[Sample]:
    """Samples whose log-probs are not quite the policy's."""
    rng, samples = np.random.default_rng(0), make_samples(make_model(), groups=GROUPS, per_group=SIZE, seed=3)
    for sample in samples:
        sample.rollout_log_probs = [value + rng.normal(0, 0.1) for value in sample.rollout_log_probs or []]
        sample.reward = float(rng.integers(0, 5)) / 4
    return samples[:-1] if uneven else samples


def batch_of(args: Any, samples: list[Sample], directory: Path) -> dict[str, Any]:
    """The batch of the single rank, by slime's manager, which dumps the Samples first."""
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.ray import rollout

    save_debug_rollout_data(args.save_debug_rollout_data, samples, rollout_id=0, evaluation=False)
    rollout.ray.put = lambda value, **_: value
    cls: Any = rollout.RolloutManager.__ray_metadata__.modified_class
    manager = object.__new__(cls)
    sizes = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    vars(manager).update(args=args, train_parallel_config=sizes)
    manager.custom_reward_post_process_func = manager.custom_convert_samples_to_train_data_func = None
    batch = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))[0].inner
    batch["total_lengths"] = [batch["total_lengths"][position] for position in batch["partition"]]
    batch["loss_masks"] = [torch.as_tensor(mask, dtype=torch.int) for mask in batch["loss_masks"]]
    batch["rollout_mask_sums"] = torch.as_tensor(batch["rollout_mask_sums"])
    batch["rollout_log_probs"] = [torch.as_tensor(values, dtype=torch.float32) for values in batch["rollout_log_probs"]]
    batch["tokens"] = batch["unconcat_tokens"] = [torch.as_tensor(ids) for ids in batch["tokens"]]
    return batch


def logits_of(model: Any, tokens: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(input_ids=ids[None]).logits[0] for ids in tokens])[None].float()


@torch.no_grad()
def log_probs_of(loss: Any, args: Any, model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    lengths = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    return loss.get_log_probs_and_entropy(logits_of(model, batch["tokens"]), args=args, **lengths)[1]["log_probs"]


def value_of(
    loss: Any, args: Any, batch: dict[str, Any], logits: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """slime's loss of the step, and the figures that it reports, as its training step divides them."""
    of_step = batch["global_batch_sizes"][0]
    total, tokens, log = loss.loss_function(args, batch, 1, of_step, logits)
    count = float(tokens) if args.calculate_per_token_loss else of_step
    values = (float(value) / count for value in log["values"][1:])
    return total / (count if args.calculate_per_token_loss else 1), dict(zip(log["keys"], values, strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
