"""Sentences about what will break: pure functions of the script's commands, slime's arguments and the nodes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from agl_slime.errors import ConfigError
from agl_slime.loop.task_files import read_rows, split_slice
from agl_slime.tools.rehearse.names import nearest
from agl_slime.tools.rehearse.parsing import Parsed
from agl_slime.tools.rehearse.script import DRIVERS, Played, RayNode, Training
from agl_slime.train.slime.args import PluginSettings, setting_names
from agl_slime.train.slime.flags import GENERATE_HOOK, without_effect
from agl_slime.train.slime.prompt_data import DEFAULT_INPUT_KEY

OURS = "agl_slime.slime_hooks.generate_rollout"
_LOOPBACK = re.compile(r"^(https?://)?(127\.|localhost|\[?::1)")
_DOTTED = re.compile(r"(?<![\w.-])\d+(?:\.\d+){3}(?![\w.-])")
_NAMES_AN_ADDRESS = re.compile(r"(?:ip|addrs?|address|host|url)$", re.IGNORECASE)
_NAMES_A_PLACE = re.compile(r"(?:load|save|checkpoint|path|dir|data|type|ip|addrs?|host|url)$")


@dataclass(frozen=True)
class Finding:
    """A finding: its level (``breaks``: the run stops or waits for ever; ``costs``: it runs, worse than it could;
    ``note``: a fact of the rehearsal), and one sentence with the fix."""

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

    def __init__(self, values: Mapping[str, Any], training: Training) -> None:
        sets = [SimpleNamespace(**dataset) for dataset in values.get("eval_datasets") or ()]
        self.values = {**values, "eval_datasets": sets}
        self.training = training

    def __getattr__(self, name: str) -> Any:
        return self.values.get(name)

    def path(self, script_path: str | Path | None) -> Path:
        """A path in the script's arguments, from the directory where the script starts training."""
        return self.training.path(script_path or "")

    @property
    def actor_gpus(self) -> int:
        return (self.actor_num_nodes or 1) * (self.actor_num_gpus_per_node or 8)

    @property
    def model_parallel(self) -> int:
        sizes = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size)
        return math.prod(size or 1 for size in sizes)

    @property
    def gpus_needed(self) -> int:
        """The number of GPUs, as slime's ``_get_placement_group_layout`` counts them."""
        rollout = self.rollout_num_gpus or 0
        if self.debug_train_only or self.rollout_external_engine_addrs:
            return self.actor_gpus
        if self.debug_rollout_only:
            return rollout
        return max(self.actor_gpus, rollout) if self.colocate else self.actor_gpus + rollout

    @property
    def asynchronous(self) -> bool:
        return Path(self.training.script).name == "train_async.py"


def check(played: Played, parsed: Parsed, training: Training, nodes: Nodes) -> list[Finding]:
    """All findings, the worst first."""
    findings = [*check_script(played, training, nodes), *_parser(parsed, training)]
    if parsed.args is not None:
        args = Arguments(parsed.args, training)
        for part in _CHECKS:
            try:
                findings += part(args, nodes)
            except (TypeError, ValueError, AttributeError) as error:  # --custom-config-path gives any value
                fix = "correct the types of the values in --custom-config-path"
                findings.append(_breaks(f"checks of {part.__name__.strip('_')} ended ({error})", fix))
        findings += [*_rewards(args, parsed.rewards)]
    order = ("breaks", "costs", "note")
    return sorted(dict.fromkeys(findings), key=lambda finding: order.index(finding.level))


def _breaks(problem: str, fix: str) -> Finding:
    return Finding("breaks", f"{problem}: {fix}")


def _costs(problem: str, fix: str) -> Finding:
    return Finding("costs", f"{problem}: {fix}")


def _flag(name: str) -> str:
    return name if name.startswith("agl_") else f"--{name.replace('_', '-')}"


def _hint(hint: str | None) -> str:
    return f"did you mean {hint}?" if hint else ""


def _count(nodes: int) -> str:
    return f"{nodes} node{'s' * (nodes > 1)}"


# -- the script ------------------------------------------------------------------------------------------------------


def check_script(played: Played, training: Training | None, nodes: Nodes) -> Iterator[Finding]:
    """Findings about the commands around the training command."""
    last = " / ".join(played.output.splitlines()[-2:]) or "no output"
    moment = "before it started training" if training is None else "after the training command"
    if played.code or played.reason:
        ended = f"ended with code {played.code}" if not played.reason else f"was stopped, as {played.reason},"
        kind = Finding("note", f"the script {ended} {moment}, on the rehearsal's read-only disk: {last}")
        yield kind if "Read-only file system" in last else _breaks(f"the script {ended} {moment}", last)
    elif training is None:
        yield _breaks(
            f"the script ended with code 0 {moment}", f"give a script that runs python3 train.py (its output: {last})"
        )
    for fault in dict.fromkeys(node.fault for node in played.ray_nodes if node.fault):
        yield Finding("breaks", fault)
    if not played.isolated:
        yield Finding("note", "--without-sandbox: the script wrote and deleted files of this machine")
    for name, value in played.assumed.items():
        yield _breaks(f"{name} is not set and the script needs it", f"export it (the rehearsal went on with {value})")
    if unset := [name for name in played.unset if name not in played.assumed]:
        yield _breaks(f"the script reads {', '.join(unset)}, which nothing sets", "export them before it runs")
    if training is None:
        return
    yield from _ray(played, nodes)
    for fault in training.faults:
        yield Finding("breaks", fault)
    for name, value in training.env.items() if training.submitted else ():
        if (match := re.search(r"\$\{?([A-Za-z_]\w*)", value)) is not None:
            problem = f"the job gets {name}={value} literally, as the shell did not put {match[1]} in"
            yield _breaks(problem, "take the single quotes from around the JSON")
    host = training.env.get("SLIME_HOST_IP", "")
    if nodes.count > 1 and _LOOPBACK.match(host):
        problem = f"SLIME_HOST_IP {host} is each node's loopback, on which slime's router and engines then listen"
        yield _breaks(problem, "leave it out, or set it to each node's address")
    yield from _named(played, training)


def _named(played: Played, training: Training) -> Iterator[Finding]:
    """Names, addresses and ports in the words of the training command and of Ray's."""
    script = Path(training.working_dir or "", training.script)
    if str(script) not in DRIVERS and not training.path(script).is_file():
        hint = nearest(script.name, DRIVERS)
        place = "on this machine" if script.is_absolute() else f"in {training.cwd}"
        yield _breaks(f"{script} does not exist {place}", _hint(hint) or "give slime's train.py")
    flags = {}
    for word, following in zip(training.flags, (*training.flags[1:], "-"), strict=False):
        flag, equals, value = word.partition("=")
        flags |= {flag: value if equals else following} if flag.startswith("--") else {}
    for flag in (flag for flag, value in flags.items() if not value and _NAMES_A_PLACE.search(flag)):
        yield _breaks(f"{flag} is given as an empty text", "set the variable in it, or take the flag out")
    values = {**training.env, **flags, "the job's address": training.address or ""}
    for number, node in enumerate(played.ray_nodes, 1):
        values[f"ray start {number}: address"] = f"{node.address} {node.joins} {node.host}"
    for name, value in values.items():
        for word in _DOTTED.findall(value) if _NAMES_AN_ADDRESS.search(name) else ():
            if any(int(part) > 255 for part in word.split(".")):
                yield _breaks(f"{name} has {word}, which is no IPv4 address", "correct it")
    head = next((node for node in played.ray_nodes if node.head), None)
    yield from _joined(played, training, head) if head is not None else ()
    ports = {"ray start --port": head.port, "ray start --dashboard-port": head.dashboard[1]} if head is not None else {}
    ports |= {flag: value for flag, value in flags.items() if flag.endswith("-port")}
    for name, port in ports.items():
        if not (port.isdecimal() and 0 < int(port) < 2**16):
            yield _breaks(f"{name} {port} is no port", "give a number from 1 to 65535")
        elif same := [earlier for earlier in ports if earlier < name and ports[earlier] == port]:
            yield _breaks(f"{name} and {same[0]} have both port {port}", "give one of them another")


def _joined(played: Played, training: Training, head: RayNode) -> Iterator[Finding]:
    """Whether the job and the other nodes come to the head."""
    if training.address:
        place = training.address.rpartition("//")[2].partition("/")[0].rpartition("@")[2]  # [::1]:8265, or a host
        host, port = re.sub(r":\d+$", "", place), re.findall(r":(\d+)$", place)
        if port not in ([], [head.dashboard[1]]):
            problem = f"the job is submitted to port {port[0]} and Ray's dashboard has {head.dashboard[1]}"
            yield _breaks(problem, "give that one")
        elif _LOOPBACK.match(head.dashboard[0]) and not _LOOPBACK.match(host):
            problem = f"the job is submitted to {host} and Ray's dashboard listens on {head.dashboard[0]}"
            yield _breaks(problem, "give ray start --dashboard-host 0.0.0.0, or submit to http://127.0.0.1")
    for node in played.ray_nodes:
        host, _, port = (node.joins or "auto").rpartition(":")
        if node.head or node.fault or not host:
            continue
        reached = head.address in (None, host, "0.0.0.0") or _LOOPBACK.match(head.address or "")
        if not reached or port != head.port:
            machine = node.host or node.address or "this machine"
            address = f"{host if reached else head.address}:{head.port}"
            problem = f"the node on {machine} joins {node.joins} and the head listens on {address}"
            yield _breaks(problem, f"give ray start --address={address}")


def _ray(played: Played, nodes: Nodes) -> Iterator[Finding]:
    started = played.ray_nodes
    if not started:
        yield Finding("note", f"the script starts no Ray: it expects one that runs, on {_count(nodes.count)}")
    for node in started:
        if node.gpus is not None and node.gpus != nodes.gpus:
            problem = f"ray start on {node.host or 'this machine'} announces {node.gpus} GPUs of {nodes.gpus}"
            yield _costs(problem, f"give --num-gpus {nodes.gpus}, or rehearse with --gpus-per-node {node.gpus}")
    if nodes.count == 1 or not started:
        return
    if len(started) < nodes.count:
        fix = f"run `ray start --address=HEAD:6379 --num-gpus {nodes.gpus}` on each before the job is submitted"
        yield _breaks(f"the script starts Ray on {len(started)} of {nodes.count} nodes, so the others never join", fix)
    address = next((node.address for node in started if node.head), None)
    if address is not None and _LOOPBACK.match(address):
        fix = "set MASTER_ADDR to the head's address in the nodes' network"
        yield _breaks(f"Ray's head listens on {address}, which other nodes cannot reach", fix)


def _missing(flag: str, path: str, training: Training, fix: str) -> Finding:
    if maker := training.maker(path):
        return Finding("note", f"{flag} {path} is not here, as `{maker}` of the script makes it")
    return _breaks(f"{flag} {path} does not exist on this machine", fix)


def _parser(parsed: Parsed, training: Training) -> Iterator[Finding]:
    for text in parsed.refused:
        yield _breaks("slime refuses the flags", " ".join(text.split()))
    for text in parsed.skipped:
        yield Finding("note", f"some of slime's checks did not run ({text}): give --python with slime's requirements")
    for name, path in parsed.missing.items():
        yield _missing(_flag(name), path, training, _hint(parsed.hints.get(name)) or "put it there on each node")
    for name, reason in parsed.unimportable.items():
        fix = _hint(parsed.hints.get(name)) or "install it on each node, or put its directory into the job's PYTHONPATH"
        yield _breaks(f"{_flag(name)} {(parsed.args or {}).get(name)} cannot be imported ({reason})", fix)
    for flag, hint in parsed.ignored.items():
        problem = f"{flag} is read by no parser and has no effect, without a message of slime's"
        yield _costs(problem, _hint(hint) or "take it out, or correct it")
    names = setting_names()
    for name in parsed.args or ():
        if name.startswith("agl_") and name not in names:
            hint = _hint(nearest(name, names, cutoff=0.6))
            yield _costs(f"{name} is no setting and has no effect", hint or "take it out, or correct it")


# -- slime's arguments -----------------------------------------------------------------------------------------------


def _weights(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    """Findings about the weights that slime's actors load: ``--load`` if it has a checkpoint, else ``--ref-load``."""
    if args.debug_rollout_only or args.ref_load or "--pretrained-checkpoint" in args.training.flags:
        return
    fix = "give the checkpoint that slime's tools/convert_hf_to_torch_dist.py writes"
    if args.kl_coef or args.use_kl_loss:
        yield _breaks("the KL term needs the reference's weights and --ref-load has none", fix)
    elif not args.load:
        yield _breaks("neither --ref-load nor --load has weights to start from", fix)
    elif not args.path(args.load).is_dir():
        yield _missing("--load", args.load, args.training, "put it there on each node, or give --ref-load")


def _vocabulary(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    """Rows of padding, which are zeros: slime's log-probs include them, and the engine's do not."""
    size, divisor = args.vocab_size or 0, args.make_vocab_size_divisible_by or 128
    ranks = args.tensor_model_parallel_size or 1
    if rows := -size % (divisor * ranks):
        problem = f"Megatron pads the vocabulary of {size} by {rows} rows to a multiple of {divisor} x {ranks} ranks"
        fit = size // ranks & -(size // ranks) if size % ranks == 0 else 0  # the largest power of two
        fix = f"give --make-vocab-size-divisible-by {min(fit, 128)}" if fit else f"{ranks} ranks do not divide it"
        yield _costs(f"{problem}, and the trainer's log-probs are of these rows, too, unlike the engine's", fix)


def _rewards(args: Arguments, rewards: frozenset[str]) -> Iterator[Finding]:
    kind = (args.rm_type or "").strip()
    if not rewards or args.custom_rm_path or args.rollout_function_path == OURS:
        return
    if kind and (name := kind.removeprefix("boxed_")) not in rewards:
        fix = _hint(nearest(name, rewards)) or f"give one of {', '.join(sorted(rewards))}, or --custom-rm-path"
        yield _breaks(f"--rm-type {kind} is no reward of slime's", fix)
    if kind == "remote_rm" and not args.rm_url:
        yield _breaks("--rm-type remote_rm posts to no address", "give --rm-url")


def _placement(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    need, per_node, per_actor = args.gpus_needed, args.num_gpus_per_node or 8, args.actor_num_gpus_per_node or 0
    if need > nodes.total:
        sampling = "" if args.colocate else f", {args.rollout_num_gpus or 0} to sample"
        problem = f"slime needs {need} GPUs ({args.actor_gpus} for training{sampling}) and {_count(nodes.count)} with"
        fix = "take more nodes, or lower --actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus"
        yield _breaks(f"{problem} {nodes.gpus} GPUs have {nodes.total}, so that it waits for ever", fix)
    elif need < nodes.total:
        fix = "raise --rollout-num-gpus or --actor-num-nodes, or take fewer"
        yield _costs(f"slime uses {need} of {nodes.total} GPUs", fix)
    if per_actor > nodes.gpus:
        yield _breaks(f"--actor-num-gpus-per-node {per_actor} is more than a node has", f"give at most {nodes.gpus}")
    if per_node != nodes.gpus and need > 0:
        problem = f"slime numbers the GPUs of engines by --num-gpus-per-node {per_node} and nodes have {nodes.gpus}"
        yield (_breaks if need > min(per_node, nodes.gpus) else _costs)(problem, f"give {nodes.gpus}")
    if args.asynchronous and args.colocate:
        yield _breaks("train_async.py refuses --colocate", "use train.py, or give --rollout-num-gpus N instead")
    rollout, engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine or 1
    if args.rollout_external_engine_addrs or args.debug_train_only:
        return
    if rollout is None:
        yield _breaks("without --colocate slime has no GPUs to sample on", "give --rollout-num-gpus N")
        return
    if rollout % engine:
        problem = f"--rollout-num-gpus {rollout} is no multiple of --rollout-num-gpus-per-engine {engine}"
        yield _breaks(problem, "change one of them")
    if max(engine, per_node) % min(engine, per_node):
        problem = f"engines of --rollout-num-gpus-per-engine {engine} do not fill nodes of {per_node} GPUs"
        yield _breaks(problem, "give a divisor or a multiple")


def _parallel(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    world, tp, pp = args.actor_gpus, args.tensor_model_parallel_size or 1, args.pipeline_model_parallel_size or 1
    cp, ep = args.context_parallel_size or 1, args.expert_model_parallel_size or 1
    etp, refuses = args.expert_tensor_parallel_size or tp, "Megatron refuses; change one of them"
    if world % args.model_parallel:
        sizes = f"tensor {tp} x pipeline {pp} x context {cp} = {args.model_parallel}"
        yield _breaks(f"{world} training GPUs are no multiple of {sizes}", refuses)
    if tp > nodes.gpus:
        problem = f"--tensor-model-parallel-size {tp} spans nodes, so that each layer's all-reduce leaves NVLink"
        yield _costs(problem, f"give at most {nodes.gpus}")
    for name in ("num_attention_heads", "num_query_groups"):
        count = getattr(args, name)
        if count and count % tp and (name == "num_attention_heads" or tp % count):
            yield _breaks(f"{_flag(name)} {count} is no multiple of --tensor-model-parallel-size {tp}", refuses)
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    stages = pp - (first is not None) - (last is not None)
    layers = (args.num_layers or 0) - (first or 0) - (last or 0)
    if pp > 1 and stages > 0 and layers % stages:
        fix = "give --decoder-last-pipeline-num-layers"
        yield _breaks(f"{layers} layers do not divide into {stages} pipeline stages", fix)
    if not args.num_experts:
        return
    if args.num_experts % ep:
        yield _breaks(f"--num-experts {args.num_experts} is no multiple of --expert-model-parallel-size {ep}", refuses)
    if world % (ep * etp * pp):
        sizes = f"expert {ep} x expert tensor {etp} x pipeline {pp} = {ep * etp * pp}"
        yield _breaks(f"{world} training GPUs are no multiple of {sizes}", refuses)
    if tp > 1 and not args.sequence_parallel:
        yield _breaks("Megatron refuses experts with tensor parallelism alone", "give --sequence-parallel")


def _batches(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    groups, size, step = args.rollout_batch_size, args.n_samples_per_prompt or 1, args.global_batch_size
    if groups is None or args.debug_rollout_only:
        return
    rollouts = groups * size
    product = f"--rollout-batch-size {groups} x --n-samples-per-prompt {size} = {rollouts}"
    if step is None:
        yield _breaks("--global-batch-size is not given", f"give {rollouts} for one optimizer step per rollout")
        return
    if rollouts < step:
        yield _breaks(f"{product} is less than --global-batch-size {step}", f"slime asserts; give at most {rollouts}")
    elif rollouts % step:
        problem = f"{product} is no multiple of --global-batch-size {step}, so {rollouts % step} rollouts are dropped"
        yield _breaks(problem, "change one of them")
    if args.actor_gpus % args.model_parallel == 0:
        ranks = args.actor_gpus // args.model_parallel
        micro = 1 if args.use_dynamic_batch_size else args.micro_batch_size or 1
        if step % (ranks * micro):
            divisor = f"{ranks} data-parallel ranks" + (f" x --micro-batch-size {micro}" if micro > 1 else "")
            yield _breaks(f"--global-batch-size {step} is no multiple of {divisor}", "change one of them")
    if size == 1 and args.loss_type != "sft_loss" and args.advantage_estimator in ("grpo", "gspo", "cispo"):
        problem = f"--n-samples-per-prompt 1 gives every rollout of {args.advantage_estimator} the advantage 0"
        yield _breaks(problem, "give 2 or more")


def _lengths(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    response, per_gpu, cp = args.rollout_max_response_len or 0, args.max_tokens_per_gpu, args.context_parallel_size or 1
    if args.use_dynamic_batch_size and per_gpu and response > per_gpu * cp:
        limit = f"--max-tokens-per-gpu {per_gpu}" + (f" x --context-parallel-size {cp}" if cp > 1 else "")
        problem = f"a response of {response} tokens is longer than {limit}, which its training then exceeds"
        yield _costs(problem, f"raise the latter, or lower --rollout-max-response-len to at most {per_gpu * cp}")
    context = _context_of(args)
    for name in ("rollout_max_response_len", "eval_max_response_len", "rollout_max_context_len"):
        if context and (value := getattr(args, name)) and value > context[0]:
            yield _breaks(f"{_flag(name)} {value} is more than {context[1]} {context[0]}", "lower it")
    if (window := args.rollout_max_context_len) and response >= window:
        problem = f"--rollout-max-response-len {response} leaves no prompt in --rollout-max-context-len {window}"
        yield _costs(problem, "lower the former")


def _context_of(args: Arguments) -> tuple[int, str] | None:
    if args.sglang_context_length:
        return args.sglang_context_length, "--sglang-context-length"
    file = args.path(args.hf_checkpoint) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(errors="replace"))
    limit = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
    return (limit, "the model's max_position_embeddings") if limit else None


def _data(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    sets = [("--prompt-data", args.prompt_data)]
    sets += [(f"--eval-prompt-data {dataset.name}", dataset.path) for dataset in args.eval_datasets]
    for flag, path in sets:
        if not path:
            continue
        if not args.path(split_slice(path)[0]).is_file():
            yield _missing(flag, path, args.training, "put it where the rollout manager runs")
            continue
        try:
            rows = [row for _, row in read_rows(str(args.path(path)), flag=flag)]
        except ConfigError as error:
            yield Finding("breaks", str(error))
            continue
        yield from _keys(args, f"{flag} {path}", rows)
        if flag == "--prompt-data" and len(rows) < (groups := args.rollout_batch_size or 0):
            problem = f"{flag} has {len(rows)} rows, fewer than --rollout-batch-size {groups}"
            yield _costs(f"{problem}, so prompts repeat in a batch", "lower the latter")


def _keys(args: Arguments, source: str, rows: list[Any]) -> Iterator[Finding]:
    for name in ("input_key", "label_key"):
        key = getattr(args, name)
        if key == DEFAULT_INPUT_KEY and args.rollout_function_path == OURS:
            continue  # the agent's own build_prompt may read another one
        if key and (missing := sum(key not in row for row in rows)):
            problem = f"{_flag(name)} {key} is missing in {missing} of {len(rows)} rows of {source}"
            yield _breaks(problem, f"name one of the keys there ({', '.join(rows[0])})")


def _hooks(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    our_source = (args.data_source_path or "").startswith("agl_slime")
    if (our_source or args.custom_generate_function_path == GENERATE_HOOK) and args.agl_runners != "controller":
        try:
            PluginSettings.from_args(args, {})
        except ConfigError as error:
            yield Finding("breaks", str(error))
    if args.rollout_function_path != OURS:
        if our_source and "fully_async" not in args.rollout_function_path:
            problem = f"{args.rollout_function_path} aborts the requests of our agents after each batch"
            yield _costs(problem, f"give --rollout-function-path {OURS}")
        return
    if args.eval_function_path != OURS and args.eval_interval is not None:
        yield _breaks(f"--eval-function-path is {args.eval_function_path}", f"give {OURS}, as for rollouts")
    if not args.custom_reward_post_process_path:
        fix = "give --custom-reward-post-process-path agl_slime.slime_hooks.normalize_rewards"
        yield _costs("slime's release normalises rewards by position, wrong for rollouts of several Samples", fix)
    for flag in without_effect(args):
        yield _costs(f"{_flag(flag.name)} has no effect under our rollout function, as {flag.reason}", "take it out")
    limit, lag = args.agl_max_staleness, args.update_weights_interval or 1
    if limit is not None and args.asynchronous and limit < lag:
        problem = f"agl_max_staleness {limit} cannot be kept: train_async.py requests rollouts {lag} versions ahead"
        yield _breaks(problem, f"set {lag} or more")
    if limit and args.colocate:
        problem = f"agl_max_staleness {limit} has no effect with --colocate, as engines are off while training runs"
        yield _costs(problem, "use separate GPUs, or leave it out")
    if limit and not (args.use_tis or args.use_rollout_logprobs or args.custom_tis_function_path):
        yield _costs(f"agl_max_staleness {limit} trains on older weights' tokens uncorrected", "give --use-tis")


def _addresses(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    if nodes.count == 1:
        return
    for name in ("agl_store_url", "agl_llm_url", "agent_rollout_buffer_url", "sglang_router_ip"):
        if (value := getattr(args, name)) and _LOOPBACK.match(value):
            problem = f"is each node's loopback, and Ray may place the rollout manager on any of {nodes.count} nodes"
            yield _breaks(f"{_flag(name)} {value} {problem}", "give the address of its host")
    runners = args.agl_runners or ""
    store = args.agl_store_host or "127.0.0.1"
    if runners.startswith("ray:") and _LOOPBACK.match(store):
        fix = "set agl_store_host to an address of the manager's node, or to 0.0.0.0"
        yield _breaks(f"agl_runners {runners}: runners on other nodes cannot reach a store on {store}", fix)
    if runners == "controller" and args.agl_job_template and _LOOPBACK.match(args.agl_controller_host or "127.0.0.1"):
        problem = "agl_controller_host is a loopback address, which Kubernetes jobs cannot reach"
        yield _breaks(problem, "set an address, and AGL_KEY")


def _storage(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    if nodes.count > 1 and args.update_weight_transport == "disk" and args.update_weight_disk_dir:
        problem = f"--update-weight-disk-dir {args.update_weight_disk_dir} has to be one file system on all nodes"
        yield _costs(problem, "use a shared one")
    if args.save and not args.save_interval:
        problem = f"--save {args.save} has no effect without --save-interval, so no checkpoint is written"
        yield _costs(problem, "give --save-interval N")
    elif args.save and not resumes(args):
        problem = f"a run that is started again does not continue from --save {args.save}, and begins with step 0"
        yield _costs(problem, f"give --load {args.save}, too")
    if args.use_rollout_routing_replay and args.num_layers and args.rollout_batch_size:
        samples = args.rollout_batch_size * (args.n_samples_per_prompt or 1)
        tokens = samples * (args.rollout_max_response_len or 0)
        size = tokens * args.num_layers * (args.moe_router_topk or 8) * 4 / 2**30  # 32-bit numbers of experts
        memory = "in the rollout manager's memory, and as much in Ray's object store"
        fix = "keep that free, or lower --rollout-max-response-len"
        yield _costs(f"routed experts of a batch take up to {size:.1f} GiB {memory}", fix)


def resumes(args: Arguments) -> bool:
    """Whether a run that is started again continues from its checkpoint."""
    return bool(args.save_interval and args.load) and args.path(args.load) == args.path(args.save)


def _modules(args: Arguments, nodes: Nodes) -> Iterator[Finding]:
    """Objects that are importable here through the current directory alone."""
    training = args.training
    if nodes.count == 1 or training.working_dir:
        return
    path = training.env.get("PYTHONPATH", "").split(os.pathsep)
    names = {name: value for name, value in args.values.items() if name.endswith("_path") and isinstance(value, str)}
    names["agl_agent"] = args.agl_agent
    for name, value in names.items():
        module = re.split(r"[.:]", value or "")[0]
        if module[:1] not in ("", "/") and training.path(f"{module}.py").is_file() and training.cwd not in path:
            problem = f"{_flag(name)} {value} is importable only in {training.cwd}, where other workers do not start"
            fix = "put it on a shared disk and into the runtime environment's PYTHONPATH, or give working_dir"
            yield _breaks(problem, fix)


_CHECKS = _weights, _vocabulary, _placement, _parallel, _batches, _lengths, _data
_CHECKS += _hooks, _addresses, _storage, _modules
