"""Faults that are planted in launch scripts and hooks: found by steps with Megatron itself, each by a sentence."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.tools.rehearse.checks import Arguments
from agl_slime.tools.rehearse.megatron.flags import as_flags
from agl_slime.tools.rehearse.megatron.small import described, values_of
from agl_slime.tools.rehearse.megatron.sources import Sources
from agl_slime.tools.rehearse.megatron.steps import play_steps
from agl_slime.tools.rehearse.script import Training
from tests.harness.megatron import require_megatron
from tests.harness.slime_programs import model_words

pytestmark = [pytest.mark.slime, pytest.mark.ray, pytest.mark.megatron, pytest.mark.slow]
HOOKS = """
def transposed(args):
    from slime.backends.megatron_utils import megatron_to_hf as names
    convert = names.convert_qwen2_to_hf
    def turned(args, name, param):
        turn = lambda key, value: value.T.contiguous() if key.endswith("o_proj.weight") else value
        return [(key, turn(key, value)) for key, value in convert(args, name, param)]
    names.convert_qwen2_to_hf = turned

def swapped(args):
    from slime.backends.megatron_utils.hf_to_megatron import qwen
    merge = qwen.merge_gate_up
    qwen.merge_gate_up = lambda gate, up: merge(up, gate)

def stale(args, model, store_prefix):
    import torch
    if store_prefix == "ref_":
        with torch.no_grad():
            for part in model:
                for parameter in part.parameters():
                    parameter.mul_(1.01)

def shifted(args, samples):
    from slime.ray.rollout import RolloutManager
    manager = object.__new__(RolloutManager.__ray_metadata__.modified_class)
    manager.args, manager.custom_convert_samples_to_train_data_func = args, None
    from agl_slime.slime_hooks import normalize_rewards
    manager.custom_reward_post_process_func = normalize_rewards
    data = manager._convert_samples_to_train_data(samples)
    data["loss_masks"] = [[*mask[1:], 0] if 0 in mask else [0, *mask[:-1]] for mask in data["loss_masks"]]
    return data

def frozen(args, rollout_id, step_id, model, optimizer, scheduler):
    for group in optimizer.param_groups:
        group["lr"] = group["max_lr"] = group["min_lr"] = 0.0
"""


@dataclass(frozen=True)
class Fault:
    """``removed`` and ``added`` options of a script; the finding has each of ``parts``, and ``also`` is another's."""

    model: str
    parts: tuple[str, ...]
    removed: str = ""
    added: str = ""
    level: str = "breaks"
    also: str = ""


SAVES = "--save saved --load saved --save-interval 1"
LONGER = f"{SAVES} --override-opt_param-scheduler"
FAULTS = {
    "query_groups": Fault(
        "qwen3-4B",
        ("Shape mismatch", "num_key_value_heads is 8 in config.json and 4 by the flags"),
        added="--num-query-groups 4",
    ),
    "head_width": Fault(
        "qwen3-4B", ("Shape mismatch", "head_dim is 128 in config.json and 80"), removed="--kv-channels 128"
    ),
    "norms": Fault("qwen3-4B", ("model.layers.0.self_attn.k_norm.weight", "another model"), removed="--qk-layernorm"),
    "biases": Fault("qwen2.5-3B", ("model.layers.0.self_attn.k_proj.bias", "another model"), removed="--add-qkv-bias"),
    "rope_scaling": Fault(
        "llama3.1-8B-Instruct",
        ("log-probs differ", "rope_type is llama3 in config.json and default"),
        removed="--use-rope-scaling",
    ),
    "rope_share": Fault(
        "glm4-9B",
        ("log-probs differ", "partial_rotary_factor is 0.5"),
        removed="--rotary-percent 0.5",
        added="--rotary-percent 0.25",
    ),
    "interleaved": Fault("glm4-9B", ("log-probs differ",), removed="--rotary-interleaved"),
    "experts_per_token": Fault(
        "qwen3-30B-A3B",
        ("log-probs differ", "num_experts_per_tok is 8 in config.json and 4"),
        added="--moe-router-topk 4",
    ),
    "scores": Fault(
        "glm4.5-355B-A32B", ("at small sizes on 1 rank", "sigmoid"), added="--moe-router-score-function softmax"
    ),
    "vocabulary": Fault(
        "qwen3-4B", ("log-probs differ", "rows of padding"), added="--make-vocab-size-divisible-by 256"
    ),
    "transposed": Fault(
        "qwen3-4B",
        ("self_attn.o_proj.weight (shape (128, 64) for (64, 128))", "converter"),
        added="--custom-megatron-init-path faults.transposed",
    ),
    "swapped": Fault("qwen3-4B", ("mlp.gate_proj.weight differs",), added="--custom-megatron-init-path faults.swapped"),
    "reference": Fault(
        "qwen3-4B",
        ("the reference's log-probs differ",),
        added="--custom-megatron-before-log-prob-hook-path faults.stale",
    ),
    "mask": Fault(
        "qwen3-4B",
        ("each response's first token", "moved the mask"),
        added="--custom-convert-samples-to-train-data-path faults.shifted",
    ),
    "frozen": Fault(
        "qwen3-4B", ("have changed no weight",), added="--custom-megatron-before-train-step-hook-path faults.frozen"
    ),
    "schedule": Fault("qwen3-4B", ("another --num-rollout", "give --override-opt_param-scheduler"), "", SAVES, "costs"),
    "unsaved": Fault("qwen3-4B", ("a resume from the checkpoint of --save fails",), added=f"{LONGER} --no-save-optim"),
    "unread": Fault(
        "qwen3-4B",
        ("a resume begins with an optimizer of size 0 ",),
        added=f"{LONGER} --no-load-optim",
        level="costs",
        also="a resume's first push has --ref-load's weights",
    ),
    "begun": Fault("qwen3-4B", ("a resume after steps 0 to 1 trains [1",), added=f"{LONGER} --finetune"),
    "none": Fault("qwen3-4B", (), removed="--use-kl-loss", added=LONGER),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path):
    require_megatron()
    fault = FAULTS[name]
    whole = model_words(fault.model)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(described(values_of(whole))))
    (tmp_path / "faults.py").write_text(HOOKS)
    (settings := tmp_path / "agl.yaml").write_text("agl_agent: agl_slime.cli.demo.agent:LookupAgent\n")
    text = " ".join([*whole, *run_flags(checkpoint, settings)])
    assert fault.removed in text
    flags = [*text.replace(fault.removed, "").split(), *fault.added.split()]
    environ = {"PYTHONPATH": str(tmp_path)}
    training = Training("train.py", tuple(flags), environ, str(tmp_path), submitted=False)
    args: Any = Arguments({name.replace("-", "_"): value for name, value in values_of(flags).items()} | SIZES, training)
    sources, places = Sources.find(require_megatron()), {"tokenizer": LOOKUP_POLICY, "scratch": tmp_path}
    trained, found = play_steps(args, training, sources=sources, python=sys.executable, **places)
    if not fault.parts:
        assert (found, trained and trained.difference < 1e-5 and trained.resumed) == ([], True)
        return
    sentence = found[0].text
    assert found[0].level == fault.level
    assert all(part in sentence for part in fault.parts), sentence
    assert any(fault.also in finding.text for finding in found), found


SIZES = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 1, "rollout_batch_size": 4, "n_samples_per_prompt": 2}
SIZES |= {"global_batch_size": 8}


def run_flags(checkpoint: Path, settings: Path) -> list[str]:
    hook = "agl_slime.slime_hooks"
    flags: dict[str, object] = {"hf-checkpoint": checkpoint, "custom-config-path": settings, "rollout-temperature": 1}
    flags |= dict.fromkeys(("rollout-function-path", "eval-function-path"), f"{hook}.generate_rollout")
    flags |= {"data-source-path": "agl_slime.AGLDataSource", "advantage-estimator": "grpo", "micro-batch-size": 1}
    flags |= {"custom-reward-post-process-path": f"{hook}.normalize_rewards", "use-kl-loss": "", "kl-loss-coef": 0.01}
    flags |= {"kl-loss-type": "low_var_kl", "optimizer": "adam", "lr": 1e-4, "lr-decay-style": "constant"}
    return as_flags(flags | {"attention-dropout": 0, "hidden-dropout": 0})
