"""Sentences about what will break: pure functions of the script's commands, slime's arguments and the nodes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agl_slime.rehearse.parsing import Parsed
from agl_slime.rehearse.script import Played, Training

OURS = "agl_slime.slime_hooks.generate_rollout"
# slime's flags that its own rollout function reads and ours does not.
_UNUSED_BY_OURS = {
    "partial_rollout": "our agents resume over weight updates by themselves",
    "over_sampling_batch_size": "a dropped group is replaced when it is dropped",
    "custom_generate_function_path": "the agent generates",
    "rm_type": "the agent's reward counts",
    "custom_rm_path": "the agent's reward counts",
    "group_rm": "the agent's reward counts",
}
_LOOPBACK = re.compile(r"^(https?://)?(127\.|localhost|\[?::1)")
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """``breaks``: the run stops or waits for ever; ``costs``: it runs, worse than it could; ``note``: a fact of the
    rehearsal. ``text`` is one sentence with the fix."""

    level: Literal["breaks", "costs", "note"]
    text: str


@dataclass(frozen=True)
class Nodes:
    """The machines that the run would get."""

    count: int
    gpus: int

    @property
    def total(self) -> int:
        return self.count * self.gpus


class Arguments:
    """slime's arguments by attribute; an absent one is ``None``."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def actor_gpus(self) -> int:
        return (self.actor_num_nodes or 1) * (self.actor_num_gpus_per_node or 8)

    @property
    def model_parallel(self) -> int:
        sizes = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size)
        return math.prod(size or 1 for size in sizes)

    @property
    def gpus_needed(self) -> int:
        """As slime's ``_get_placement_group_layout`` counts them."""
        rollout = self.rollout_num_gpus or 0
        if self.debug_train_only or self.rollout_external_engine_addrs:
            return self.actor_gpus
        if self.debug_rollout_only:
            return rollout
        return max(self.actor_gpus, rollout) if self.colocate else self.actor_gpus + rollout

    @property
    def asynchronous(self) -> bool:
        return self.values.get("driver") == "train_async.py"


def check(played: Played, parsed: Parsed, training: Training, nodes: Nodes) -> list[Finding]:
    """All findings, the worst first."""
    found = [*check_script(played, training, nodes), *_parser(parsed)]
    if parsed.args is not None:
        args = Arguments({**parsed.args, "driver": Path(training.script).name})
        for part in (_placement, _parallel, _batches, _lengths, _data, _hooks, _addresses, _storage):
            found += part(args, nodes)
        found += _modules(args, training, nodes)
    order = ("breaks", "costs", "note")
    return sorted(dict.fromkeys(found), key=lambda one: order.index(one.level))


def _breaks(text: str) -> Finding:
    return Finding("breaks", text)


def _costs(text: str) -> Finding:
    return Finding("costs", text)


# -- the script ------------------------------------------------------------------------------------------------------


def check_script(played: Played, training: Training | None, nodes: Nodes) -> Iterator[Finding]:
    """Findings about the commands around the training command."""
    last = " / ".join(played.stderr.splitlines()[-2:])
    if training is None:
        yield _breaks(f"the script ended with code {played.code} before it started training: {last or 'no output'}")
        return
    if played.code:
        yield _breaks(f"the script ended with code {played.code} after the training command: {last}")
    for name, value in played.assumed.items():
        yield _breaks(f"{name} is not set and the script needs it: export it (the rehearsal went on with {value})")
    unset = [name for name in played.unset if name not in played.assumed]
    if unset:
        yield _breaks(f"the script reads {', '.join(unset)}, which nothing sets: export them before it runs")
    for name, value in training.env.items():
        if (match := re.search(r"\$\{?([A-Za-z_]\w*)", value)) is not None:
            fix = "take the single quotes from around the JSON"
            yield _breaks(f"the job gets {name}={value} literally, as the shell did not put {match[1]} in: {fix}")
    yield from _ray(played, nodes)
    if not played.isolated:
        why = "bubblewrap is not installed or may not make namespaces"
        yield Finding("note", f"{why}: commands that the script gives by absolute path were not intercepted")


def _ray(played: Played, nodes: Nodes) -> Iterator[Finding]:
    started = played.ray_nodes
    heads = [node for node in started if node.head]
    if not started:
        yield Finding("note", f"the script starts no Ray: it expects one of {nodes.count} nodes to be running")
        return
    for node in started:
        where = f"on {node.host}" if node.host else "here"
        if node.gpus is not None and node.gpus != nodes.gpus:
            fix = f"give --num-gpus {nodes.gpus}, or rehearse with --gpus-per-node {node.gpus}"
            yield _costs(f"ray start {where} announces {node.gpus} GPUs of a node with {nodes.gpus}: {fix}")
    if nodes.count > 1:
        if len(started) < nodes.count:
            missing = nodes.count - len(started)
            fix = f"run `ray start --address=HEAD:6379 --num-gpus {nodes.gpus}` on each before the job is submitted"
            yield _breaks(f"the script starts Ray on {len(started)} of {nodes.count} nodes, {missing} never join: {fix}")
        if heads and heads[0].address is not None and _LOOPBACK.match(heads[0].address):
            fix = "set MASTER_ADDR to the head's address in the nodes' network"
            yield _breaks(f"Ray's head listens on {heads[0].address}, which other nodes cannot reach: {fix}")


def _parser(parsed: Parsed) -> Iterator[Finding]:
    for text in parsed.refused:
        yield _breaks(f"slime refuses the flags: {' '.join(text.split())}")
    for name, path in dict(parsed.missing).items():
        yield _breaks(f"--{_flag(name)} {path} does not exist on this machine: put it there on each node")
    for name, why in dict(parsed.unimportable).items():
        fix = "install it on each node, or put its directory into the job's PYTHONPATH"
        yield _breaks(f"--{_flag(name)} cannot be imported ({why}): {fix}")
    for flag, near in dict(parsed.ignored).items():
        fix = f"did you mean {near}?" if near else "take it out, or correct it"
        yield _costs(f"{flag} is read by no parser and has no effect, without a message of slime's: {fix}")


def _flag(name: str) -> str:
    return name.replace("_", "-")


# -- slime's arguments -----------------------------------------------------------------------------------------------


def _placement(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    need, per_node = args.gpus_needed, args.num_gpus_per_node or 8
    if need > nodes.total:
        have = f"{nodes.count} nodes with {nodes.gpus} GPUs have {nodes.total}"
        parts = f"{args.actor_gpus} for training" + ("" if args.colocate else f", {args.rollout_num_gpus or 0} to sample")
        fix = "take more nodes, or lower --actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus"
        yield _breaks(f"slime needs {need} GPUs ({parts}) and {have}: it would wait for ever; {fix}")
    elif need < nodes.total:
        yield _costs(f"slime uses {need} of {nodes.total} GPUs: raise --rollout-num-gpus or --actor-num-nodes, or take fewer")
    if (args.actor_num_gpus_per_node or 0) > nodes.gpus:
        yield _breaks(f"--actor-num-gpus-per-node {args.actor_num_gpus_per_node} is more than a node's {nodes.gpus} GPUs")
    if per_node != nodes.gpus and need > 0:
        fix = f"give --num-gpus-per-node {nodes.gpus}"
        text = f"--num-gpus-per-node is {per_node} and nodes have {nodes.gpus} GPUs, so engines get wrong GPU numbers: {fix}"
        yield _breaks(text) if need > min(per_node, nodes.gpus) or per_node > nodes.gpus else _costs(text)
    if args.asynchronous and args.colocate:
        yield _breaks("train_async.py refuses --colocate: use train.py, or give --rollout-num-gpus N instead")
    if args.rollout_external_engine_addrs or args.debug_train_only:
        return
    rollout, engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine or 1
    if rollout is None:
        yield _breaks("--rollout-num-gpus is not given, and without --colocate slime has no GPUs to sample on: give it")
        return
    if rollout % engine:
        yield _breaks(f"--rollout-num-gpus {rollout} is no multiple of --rollout-num-gpus-per-engine {engine}")
    if engine > per_node and engine % per_node:
        yield _breaks(f"--rollout-num-gpus-per-engine {engine} is no multiple of a node's {per_node} GPUs")
    elif engine < per_node and per_node % engine:
        yield _breaks(f"--rollout-num-gpus-per-engine {engine} does not divide a node's {per_node} GPUs")


def _parallel(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    world, tp, pp = args.actor_gpus, args.tensor_model_parallel_size or 1, args.pipeline_model_parallel_size or 1
    cp = args.context_parallel_size or 1
    if world % args.model_parallel:
        sizes = f"tensor {tp} x pipeline {pp} x context {cp} = {args.model_parallel}"
        yield _breaks(f"{world} training GPUs are no multiple of {sizes}: Megatron refuses; change the sizes or the GPUs")
    if tp > nodes.gpus:
        yield _costs(f"--tensor-model-parallel-size {tp} spans nodes of {nodes.gpus} GPUs: its all-reduces leave NVLink")
    for name, count in (("num_attention_heads", args.num_attention_heads), ("num_query_groups", args.num_query_groups)):
        if count and count % tp and not (name == "num_query_groups" and tp % count == 0):
            yield _breaks(f"--{_flag(name)} {count} is no multiple of --tensor-model-parallel-size {tp}: Megatron refuses")
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    stages = pp - (first is not None) - (last is not None)
    layers = (args.num_layers or 0) - (first or 0) - (last or 0)
    if pp > 1 and layers and stages > 0 and layers % stages:
        fix = "give --decoder-last-pipeline-num-layers"
        yield _breaks(f"{layers} layers do not divide into {stages} pipeline stages: {fix}")
    ep, etp = args.expert_model_parallel_size or 1, args.expert_tensor_parallel_size or tp
    if args.num_experts and args.num_experts % ep:
        yield _breaks(f"--num-experts {args.num_experts} is no multiple of --expert-model-parallel-size {ep}")
    if args.num_experts and world % (ep * etp * pp):
        sizes = f"expert {ep} x expert tensor {etp} x pipeline {pp} = {ep * etp * pp}"
        yield _breaks(f"{world} training GPUs are no multiple of {sizes}: Megatron refuses")
    if args.num_experts and tp > 1 and not args.sequence_parallel:
        yield _breaks("experts with --tensor-model-parallel-size above 1 need --sequence-parallel: Megatron refuses")


def _batches(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    groups, size, step = args.rollout_batch_size, args.n_samples_per_prompt or 1, args.global_batch_size
    if groups is None or args.debug_rollout_only:
        return
    rollouts, product = groups * size, f"--rollout-batch-size {groups} x --n-samples-per-prompt {size} = {groups * size}"
    if step is None:
        yield _breaks(f"--global-batch-size is not given: give {rollouts} for one optimizer step per rollout")
        return
    if rollouts < step:
        yield _breaks(f"{product} is less than --global-batch-size {step}: slime asserts; give at most {rollouts}")
    elif rollouts % step:
        yield _breaks(f"{product} is no multiple of --global-batch-size {step}: {rollouts % step} rollouts are dropped")
    if args.actor_gpus % args.model_parallel == 0:
        dp = args.actor_gpus // args.model_parallel
        micro = 1 if args.use_dynamic_batch_size else args.micro_batch_size or 1
        if step % (dp * micro):
            each = f"{dp} data-parallel ranks" + (f" x --micro-batch-size {micro}" if micro > 1 else "")
            yield _breaks(f"--global-batch-size {step} is no multiple of {each}: change one of them")
    if size == 1 and args.advantage_estimator in ("grpo", "gspo", "cispo"):
        yield _breaks(f"--n-samples-per-prompt 1 gives every rollout of {args.advantage_estimator} the advantage 0: give 2 or more")


def _lengths(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    response, per_gpu = args.rollout_max_response_len or 0, args.max_tokens_per_gpu
    cp = args.context_parallel_size or 1
    if args.use_dynamic_batch_size and per_gpu and response > per_gpu * cp:
        fix = f"raise one of them, or lower --rollout-max-response-len to at most {per_gpu * cp}"
        limit = f"--max-tokens-per-gpu {per_gpu}" + (f" x --context-parallel-size {cp}" if cp > 1 else "")
        yield _costs(f"a response of {response} tokens is longer than {limit} and trains beyond that memory limit: {fix}")
    context = _context_of(args)
    for name in ("rollout_max_response_len", "eval_max_response_len", "rollout_max_context_len"):
        if context and (value := getattr(args, name)) and value > context[0]:
            yield _breaks(f"--{_flag(name)} {value} is more than {context[1]} {context[0]}: lower it")
    window = args.rollout_max_context_len
    if window and response >= window:
        yield _costs(f"--rollout-max-response-len {response} leaves no prompt in --rollout-max-context-len {window}")


def _context_of(args: Arguments) -> tuple[int, str] | None:
    if args.sglang_context_length:
        return args.sglang_context_length, "--sglang-context-length"
    file = Path(args.hf_checkpoint or "", "config.json")
    if not file.is_file():
        return None
    config = json.loads(file.read_text())
    most = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
    return (most, "max_position_embeddings of the model,") if most else None


def _data(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    sets = [("--prompt-data", args.prompt_data)]
    sets += [(f"--eval-prompt-data {one['name']}", one["path"]) for one in args.eval_datasets or ()]
    for flag, given in sets:
        if not given:
            continue
        path = Path(re.sub(r"@\[[^\]]*\]$", "", given))
        if not path.is_file():
            yield _breaks(f"{flag} {given} does not exist on this machine: put it where the rollout manager runs")
        elif path.suffix == ".jsonl":
            yield from _keys(args, flag, path)
        elif path.suffix != ".parquet":
            yield _breaks(f"{flag} {given}: slime reads .jsonl and .parquet only; convert it")


def _keys(args: Arguments, flag: str, path: Path) -> Iterator[Finding]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        rows = [json.loads(line) for line in lines]
    except ValueError as error:
        yield _breaks(f"{flag} {path} has a line that is no JSON ({error}): slime leaves it out; correct it")
        return
    for name in ("input_key", "label_key", "tool_key"):
        key = getattr(args, name)
        # with our hooks a task may have any keys
        if key and (lacking := sum(key not in row for row in rows)) and args.rollout_function_path != OURS:
            has = ", ".join(rows[0]) if rows else "none"
            yield _breaks(f"--{_flag(name)} {key} is missing in {lacking} of {len(rows)} lines of {flag} {path} (keys: {has})")
    if flag == "--prompt-data" and len(rows) < (args.rollout_batch_size or 0):
        yield _costs(f"{flag} has {len(rows)} lines, fewer than --rollout-batch-size {args.rollout_batch_size}: prompts repeat within a batch")


def _hooks(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    if args.rollout_function_path != OURS:
        if (args.data_source_path or "").startswith("agl_slime"):
            fix = f"give --rollout-function-path {OURS}"
            yield _costs(f"{args.rollout_function_path or 'the default rollout function'} aborts all requests after a batch: {fix}")
        return
    if args.eval_function_path != OURS and args.eval_interval is not None:
        yield _breaks(f"--eval-function-path is {args.eval_function_path}: give {OURS}, as for rollouts")
    if not args.custom_reward_post_process_path:
        fix = "give --custom-reward-post-process-path agl_slime.slime_hooks.normalize_rewards"
        yield _costs(f"slime's release normalises rewards by position, wrong for rollouts of several Samples: {fix}")
    for name, why in _UNUSED_BY_OURS.items():
        value = getattr(args, name)
        if value and not (name == "over_sampling_batch_size" and value == args.rollout_batch_size):
            yield _costs(f"--{_flag(name)} has no effect under {OURS}: {why}; take it out")
    limit, lag = args.agl_max_staleness, args.update_weights_interval or 1
    if limit is not None and args.asynchronous and limit < lag:
        yield _breaks(f"agl_max_staleness {limit} cannot be kept by train_async.py, which asks {lag} ahead: set {lag} or more")
    if limit and args.colocate:
        yield _costs(f"agl_max_staleness {limit} has no effect with --colocate: engines are off while training runs; use separate GPUs")
    if limit and not (args.use_tis or args.use_rollout_logprobs or args.custom_tis_function_path):
        yield _costs(f"agl_max_staleness {limit} trains on tokens of older weights without a correction: give --use-tis")


def _addresses(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    if nodes.count == 1:
        return
    for name in ("agl_store_url", "agl_llm_url", "agent_rollout_buffer_url", "sglang_router_ip"):
        value = getattr(args, name)
        if value and _LOOPBACK.match(value):
            fix = "give the address of its host"
            shown = name if name.startswith("agl") else f"--{_flag(name)}"
            yield _breaks(f"{shown} {value} is each node's own loopback, and Ray may place the rollout manager on any of {nodes.count} nodes: {fix}")
    runners = args.agl_runners or ""
    if runners.startswith("ray:") and not getattr(args, "agl_store_host"):  # noqa: B009
        why = "runners on other nodes cannot reach a store on 127.0.0.1"
        yield _breaks(f"agl_runners {runners} on {nodes.count} nodes: {why}; set agl_store_host to the manager's address, or serve the store and set agl_store_url")
    if runners == "controller" and _LOOPBACK.match(args.agl_controller_host or "127.0.0.1") and args.agl_job_template:
        yield _breaks("agl_controller_host is 127.0.0.1, which Kubernetes jobs cannot reach: set an address, and AGL_KEY")


def _storage(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    if nodes.count > 1 and args.update_weight_transport == "disk" and args.update_weight_disk_dir:
        yield _costs(f"--update-weight-disk-dir {args.update_weight_disk_dir} must be the same file system on all {nodes.count} nodes: use a shared one")
    if args.save and not args.save_interval:
        yield _costs(f"--save {args.save} has no effect without --save-interval: no checkpoint is written")
    if args.use_rollout_routing_replay and args.num_layers and args.rollout_batch_size:
        top_k, length = args.moe_router_topk or 8, args.rollout_max_response_len or 0
        samples = args.rollout_batch_size * (args.n_samples_per_prompt or 1)
        size = samples * length * args.num_layers * top_k * 4 / _GIB  # 32-bit expert numbers
        yield _costs(f"routed experts of a batch take up to {size:.1f} GiB in the rollout manager's memory, and again in Ray's object store: keep that free, or lower --rollout-max-response-len")


def _modules(args: Arguments, training: Training, nodes: Nodes) -> Iterator[Finding]:
    """Objects that are importable here through the current directory alone."""
    if nodes.count == 1 or training.working_dir:
        return
    path = training.env.get("PYTHONPATH", "")
    names = {name: value for name, value in args.values.items() if name.endswith("_path") and isinstance(value, str)}
    names["agl_agent"] = args.agl_agent
    for name, value in names.items():
        module = re.split(r"[.:]", value or "")[0]
        local: Callable[[str], bool] = lambda one: Path(training.cwd, f"{one}.py").is_file()  # noqa: E731
        if module and local(module) and training.cwd not in path.split(":"):
            fix = "put that directory, on a shared disk, into env_vars.PYTHONPATH of the runtime environment, or give working_dir"
            yield _breaks(f"{name} {value} is importable only from {training.cwd}, where workers on other nodes do not start: {fix}")


def paths_of(findings: list[Finding], level: str) -> list[str]:
    """The texts of one level."""
    return [one.text for one in findings if one.level == level]
