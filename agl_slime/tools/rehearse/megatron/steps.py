"""Steps of a launch script with slime's Megatron actors on this CPU, at small sizes, and what they find."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub.errors import StrictDataclassError

from agl_slime.errors import AglSlimeError
from agl_slime.tools.rehearse.checks import Arguments, Finding, resumes
from agl_slime.tools.rehearse.live import PROGRAM, WORKER_BYTES, live_env, live_flags, run_driver
from agl_slime.tools.rehearse.megatron.flags import as_flags
from agl_slime.tools.rehearse.megatron.small import Small, described, load_model, save_model, shrink, values_of
from agl_slime.tools.rehearse.megatron.sources import Sources
from agl_slime.tools.rehearse.script import Training

_STEPS, _TOKENS, _SECONDS = 2, 24, 900.0
_WITHIN = 1e-4  # nat, in float32: sums in another order differ by a tenth of it
# options of kernels, of GPUs' memory, of the engine and of filters that random answers would not pass
_LEFT_OUT = """colocate offload offload-train offload-rollout rollout-num-gpus rollout-num-gpus-per-engine load
    use-wandb use-tensorboard use-mlflow use-fault-tolerance over-sampling-batch-size dynamic-sampling-filter-path
    optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer moe-enable-deepep
    moe-deepep-num-sms fp8-format fp8-recipe fp8-param-gather bf16 prefill-num-servers rollout-external-engine-addrs
    eval-interval eval-prompt-data eval-config save-interval start-rollout-id keep-old-actor tokenizer-model"""
_SCHEDULER = "override-opt_param-scheduler"


@dataclass(frozen=True)
class Steps:
    """Steps that were made, the ranks that made them, and the sizes that were reduced; ``difference``: of log-probs,
    Megatron beside transformers; ``resumed``: another step was requested of the checkpoint after them."""

    steps: int
    ranks: int
    changes: tuple[str, ...]
    difference: float
    resumed: bool


def find_sources(python: str, slime_dir: Path) -> Sources:
    """slime and Megatron-LM in the environment of ``python``. Raises ``AglSlimeError`` where it has none."""
    place = os.environ.get("MEGATRON_DIR") or Path(os.path.abspath(python)).parents[1] / "megatron"
    return Sources.find({"SLIME_DIR": str(slime_dir), "MEGATRON_DIR": str(place)})


def play_steps(
    args: Arguments, training: Training, *, sources: Sources, python: str, tokenizer: Path, scratch: Path
) -> tuple[Steps | None, list[Finding]]:
    """Train with the script's flags, at small sizes; what that finds."""
    directory = scratch / "megatron"
    checkpoint = args.path(args.hf_checkpoint)
    file = checkpoint / "config.json"
    config = json.loads(file.read_text()) if args.hf_checkpoint and file.is_file() else None
    tokens = len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]) + 64  # with special ones
    try:
        small = shrink(training.flags, gpus=args.actor_gpus, tokens=tokens, config=config)
        save_model(small.config, directory / "model", tokenizer=tokenizer)
    except (KeyError, TypeError, ValueError, ArithmeticError, StrictDataclassError) as error:
        text = f"no step with Megatron itself was made: the flags describe no model of transformers ({error!r:.200})"
        return None, [Finding("note", text)]
    if (need := (small.ranks + 5) * WORKER_BYTES) > (free := psutil.virtual_memory().available):
        sizes = f"{need / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"
        return None, [Finding("note", f"no step with Megatron itself was made: {small.ranks} ranks need {sizes}")]
    flags = _flags([*_kept(training.flags)], args, small, directory, scratch)
    request = {"script": str(sources.slime / Path(training.script).name), "model": str(directory / "model")}
    places = {"SLIME_DIR": str(sources.slime), "MEGATRON_DIR": str(sources.megatron)}

    def drive(options: Mapping[str, object]) -> None:
        env = live_env(training, [], scratch, {**request, "flags": [*flags, *as_flags(options)], "ranks": small.ranks})
        log = scratch / "megatron.log"
        run_driver([python, str(PROGRAM)], env | places, args.path(""), log, timeout_s=_SECONDS)

    hints = _hints(training.flags, config)
    try:
        drive({})
    except AglSlimeError as error:
        ended = Finding("breaks", f"Megatron at {_sizes(small)}: {error}{hints}")
        return None, [*_of_push(directory, hints)[1], ended]
    difference, findings = _examine(directory, hints)
    if resumed := resumes(args):
        findings += _resume(drive, directory, switched=bool(args.colocate or args.offload_train))
    return Steps(_STEPS, small.ranks, small.changes, difference, resumed), findings


def _resume(drive: Callable[[Mapping[str, object]], None], directory: Path, *, switched: bool) -> Iterator[Finding]:
    """Findings of another step, by actors that start from the checkpoint of the steps in ``directory``. ``switched``:
    the script's own actors end their start with the policy's weights."""
    (again := directory / "again").mkdir()
    options: dict[str, object] = {"load": directory / "saved", "num-rollout": _STEPS + 1, "dump-details": again}
    options |= {"update-weight-disk-dir": again / "weights"}
    try:
        try:
            drive(options)
        except AglSlimeError as error:
            if "OptimizerParamScheduler" not in str(error):
                raise
            problem = "Megatron refuses a resume with another --num-rollout, as its schedule is another"
            yield Finding("costs", f"{problem}: give --{_SCHEDULER}")
            drive({**options, _SCHEDULER: ""})
    except AglSlimeError as error:
        yield Finding("breaks", f"a resume from the checkpoint of --save fails: {error}")
        return
    steps = sorted(int(path.stem) for path in (again / "train_data").glob("*.pt"))
    if steps != [_STEPS]:
        problem = f"a resume after steps 0 to {_STEPS - 1} trains {steps or 'no step'} and not step {_STEPS}"
        yield Finding("breaks", f"{problem}: take out --finetune and --ckpt-step")
        return
    for file in sorted(directory.glob("saved_*.json")):
        before, after = (json.loads(path.read_text()) for path in (file, again / file.name.replace("saved", "loaded")))
        if abs(after - before) > 1e-6 * before:
            problem = f"a resume begins with an optimizer of size {after:.3g} in place of the checkpoint's {before:.3g}"
            yield Finding("costs", f"{problem}: take out --no-save-optim and --no-load-optim")
            break
    pushes = (sorted((place / "weights").iterdir())[end] for place, end in ((directory, -1), (again, 0)))
    first, saved, loaded = (load_model(push)[0].state_dict() for push in (directory / "model", *pushes))
    if all(value.equal(loaded[name]) for name, value in saved.items()):
        return
    if any(not value.equal(loaded[name]) for name, value in first.items()):
        yield Finding("breaks", "a resume's first push has other weights than the checkpoint: correct the converter")
    elif not switched:
        problem = "a resume's first push has --ref-load's weights, which then sample its first batch"
        fix = """end the init of slime's MegatronTrainRayActor with self._switch_model("actor")"""
        yield Finding("costs", f"{problem}: {fix}")


def _kept(flags: Sequence[str]) -> Iterator[str]:
    """The words of the options that these steps have."""
    left_out, kept = {*_LEFT_OUT.split()}, True
    for word in flags:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            kept = name not in left_out and not name.startswith("sglang-")
        if kept:
            yield word


def _flags(flags: Sequence[str], args: Arguments, small: Small, directory: Path, scratch: Path) -> list[str]:
    size = min(args.n_samples_per_prompt or 1, 4)
    steps = min(max((args.rollout_batch_size or 1) * size // (args.global_batch_size or 1), 1), 2)
    groups = 2 * small.ranks
    options: dict[str, object] = {**small.options, "actor-num-nodes": 1}
    options |= dict.fromkeys(("actor-num-gpus-per-node", "num-gpus-per-node"), small.ranks)
    options |= {"rollout-batch-size": groups, "n-samples-per-prompt": size, "global-batch-size": groups * size // steps}
    options |= {"num-rollout": _STEPS, "rollout-max-response-len": _TOKENS, "hf-checkpoint": directory / "model"}
    options |= {"ref-load": directory / "model", "save": directory / "saved", "save-interval": 10**6}
    options |= {"dump-details": directory, "update-weight-mode": "full", "update-weight-transport": "disk"}
    options |= {"update-weight-disk-dir": directory / "weights", "update-weight-disk-keep-files": ""}
    options |= {"attention-backend": "auto", "moe-token-dispatcher-type": "alltoall"}
    return live_flags([*flags], options, args, scratch)


def _sizes(small: Small) -> str:
    ranks = f"{small.ranks} rank{'s' * (small.ranks > 1)}"
    return f"small sizes on {ranks}" + (f" ({', '.join(small.changes)})" if small.changes else "")


def _hints(flags: Sequence[str], config: Mapping[str, Any] | None) -> str:
    """Fields of the checkpoint's configuration that the options describe otherwise."""
    if config is None:
        return ""
    text, ours = config.get("text_config") or config, described(values_of(flags))
    ours, theirs = (_flat(fields.get("text_config") or fields) for fields in (ours, text))
    apart = [
        f"{name} is {theirs[name]} in config.json and {value} by the flags"
        for name, value in ours.items()
        if name in theirs and theirs[name] is not None and theirs[name] != value and name != "model_type"
    ]
    return f" ({'; '.join(apart)})" if apart else ""


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {**config, **rope}


def _of_push(directory: Path, hints: str) -> tuple[Any, list[Finding]]:
    """The first push beside the checkpoint: its weights, and a finding if they differ."""
    before, _ = load_model(directory / "model")
    if not (push := directory / "weights" / "weight_v000001" / "config.json").is_file():
        return before, []
    pushed, wrong = load_model(push.parent)
    if wrong:
        problem = f"the engine refuses the pushed weights or misses some: {_list(wrong)}"
        fix = f"correct the options or the converter, which describe another model{hints}"
        return before, [Finding("breaks", f"{problem}; {fix}")]
    after = pushed.state_dict()
    apart = {name: value for name, value in before.state_dict().items() if not value.equal(after[name])}
    apart = {name: value for name, value in apart.items() if "visual" not in name}
    for name, value in apart.items():
        problem = f"the first push has {len(apart)} weights that are not the checkpoint's"
        how = f"({name} {_how(value, after[name])})"
        return before, [Finding("breaks", f"{problem} {how}: correct the converter to Megatron's names or back")]
    return before, []


def _examine(directory: Path, hints: str) -> tuple[float, list[Finding]]:
    """The largest difference of log-probs, and findings, the cause of others first."""
    import torch

    before, findings = _of_push(directory, hints)
    steps = [torch.load(path, weights_only=False) for path in sorted((directory / "train_data").glob("*.pt"))]
    first, last = steps[0]["samples"], steps[-1]["samples"]
    differences = [_apart(before, sample, "log_probs") for sample in first]
    if (difference := max(differences)) > _WITHIN:
        text = f"Megatron's log-probs differ by up to {difference:.1g} from transformers' of the same weights"
        findings.append(Finding("breaks", f"{text}: engine and trainer compute two policies{hints or _PADDED}"))
    stale = max(_apart(before, sample, "ref_log_probs") for sample in last)
    if stale > _WITHIN and not findings:
        problem = f"the reference's log-probs differ by up to {stale:.1g} from --ref-load's weights"
        findings.append(Finding("breaks", f"{problem}: a hook has changed or replaced its weights"))
    findings += _masks(first)
    pushes = (load_model(path)[0] for path in sorted((directory / "weights").iterdir())[:: len(steps)])
    first_push, latest = (model.state_dict() for model in pushes) if not findings else ({}, {})
    if first_push and all(value.equal(latest[name]) for name, value in first_push.items()):
        findings.append(Finding("breaks", f"{_STEPS} steps have changed no weight: see --freeze-*, --lr and hooks"))
    return difference, findings


_PADDED = " (without another cause: rows of padding in the vocabulary, see --make-vocab-size-divisible-by)"


def _masks(samples: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether the tokens under the mask are what the engine sampled, whose log-probs are not 0."""
    left_out, wrong, trained = list[tuple[int, int]](), 0, 0
    for sample in samples:
        if (theirs := sample.get("rollout_log_probs")) is None:
            return
        pairs = [*zip(map(bool, sample["loss_masks"]), (value != 0 for value in theirs), strict=True)]
        left_out += [(place, len(pairs)) for place, (mask, sampled) in enumerate(pairs) if sampled and not mask]
        wrong, trained = wrong + pairs.count((True, False)), trained + sum(mask for mask, _ in pairs)
    ends = {"first": [place == 0 for place, _ in left_out], "last": [place == size - 1 for place, size in left_out]}
    end = next((name for name, places in ends.items() if all(places) and len(places) == len(samples)), "")
    if wrong:
        problem = f"{wrong} of {trained} tokens under the loss mask were not sampled by the engine"
        yield Finding("breaks", f"{problem}: a hook has moved the mask")
    elif end:
        yield Finding("breaks", f"the loss mask leaves out each response's {end} token: a hook has moved the mask")
    elif left_out:
        text = f"the loss mask leaves out {len(left_out)} sampled tokens and has {trained}"
        yield Finding("costs", f"{text}: correct the hook, unless it is meant")


def _apart(model: Any, sample: Mapping[str, Any], name: str) -> float:
    import torch

    if name not in sample:
        return 0.0
    tokens, ours = torch.as_tensor(sample["tokens"]), torch.as_tensor(sample[name])
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0, :-1]
    theirs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0][len(tokens) - 1 - len(ours) :]
    return float((theirs - ours).abs().max())


def _how(value: Any, other: Any) -> str:
    if value.dim() == 2 and value.shape[0] == value.shape[1] and value.T.equal(other):
        return "is transposed"
    if value.flatten().sort().values.equal(other.flatten().sort().values):
        return "has its numbers in another order"
    return f"differs by up to {float((value - other).abs().max()):.2g}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")
