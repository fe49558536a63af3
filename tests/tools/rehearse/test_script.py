"""Launch scripts read by bash with stubs, and the checks of their arguments."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.tools.rehearse import box, script
from agl_slime.tools.rehearse.checks import OURS, Nodes, check, check_script
from agl_slime.tools.rehearse.parsing import Parsed, parse, unread_flags
from agl_slime.tools.rehearse.script import IMAGE_SLIME_DIR, Command, Played, Training
from tests.harness.waiting import becomes_true


def why_no_box() -> str:
    try:
        box.check_box()
    except ConfigError as error:
        return str(error)
    return ""


NO_BOX = why_no_box()
needs_box = pytest.mark.skipif(bool(NO_BOX), reason=NO_BOX)
play = partial(script.play, sandbox=not NO_BOX)  # these scripts are harmless

HEAD = """#!/bin/bash
pkill -9 python; pkill -9 ray; sleep 3
ray stop --force
set -ex
"""
SLIMES = (
    HEAD
    + """
GPUS=$(nvidia-smi -L | wc -l)
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/model.sh"
ROLLOUT_ARGS=(
   --rollout-batch-size 32
   # --rollout-batch-size 64
   --prompt-data "/data/a b.jsonl"
)
ray start --head --node-ip-address ${MASTER_ADDR:-127.0.0.1} --num-gpus ${GPUS}
for HOST in 10.0.0.2 10.0.0.3; do
  ssh root@"${HOST}" "pkill -9 python ; ray start --address=10.0.0.1:6379 --num-gpus 8 --node-ip-address ${HOST}" &
done
wait
RUNTIME="{\\"env_vars\\": {\\"PYTHONPATH\\": \\"/root/Megatron-LM\\"}}"
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${RUNTIME}" -- python3 train.py \\
  --actor-num-gpus-per-node ${GPUS} ${MODEL_ARGS[@]} "${ROLLOUT_ARGS[@]}" "$@"
"""
)


def write(directory: Path, text: str) -> Path:
    (directory / "model.sh").write_text("MODEL_ARGS=(--num-layers 28 --swiglu)\n")
    script = directory / "run.sh"
    script.write_text(text)
    return script


ONE = Nodes(1, 8)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def test_a_script_gives_its_training_command_and_harms_nothing(tmp_path: Path, scratch: Path):
    played = play(write(tmp_path, SLIMES), gpus=4, arguments=["--lr", "1e-6"], scratch=scratch)
    assert played.code == 0, played.output
    training = played.training
    assert training is not None
    assert training.submitted
    assert (training.script, training.env["PYTHONPATH"]) == ("train.py", "/root/Megatron-LM")
    flags = "--actor-num-gpus-per-node 4 --num-layers 28 --swiglu --rollout-batch-size 32 --prompt-data|/data/a b.jsonl"
    assert [*training.flags] == [*flags.split("|")[0].split(), flags.split("|")[1], "--lr", "1e-6"]
    assert [command.argv[:3] for command in played.commands][:2] == [("pkill", "-9", "python"), ("pkill", "-9", "ray")]
    nodes = sorted(played.ray_nodes, key=lambda node: node.host or "")
    assert [(node.host, node.head, node.address, node.gpus) for node in nodes] == [
        (None, True, "127.0.0.1", 4),
        ("10.0.0.2", False, "10.0.0.2", 8),
        ("10.0.0.3", False, "10.0.0.3", 8),
    ]


def test_stubs_stand_before_a_path_that_the_script_extends(tmp_path: Path, scratch: Path):
    real = tmp_path / "bin"
    real.mkdir()
    (real / "python3").write_text(f"#!/bin/sh\ntouch {scratch}/harm\n")
    (real / "python3").chmod(0o755)
    calls = "; ".join(f"{name} http://127.0.0.1:1" for name in ("curl", "wget", "docker", "git"))
    script = write(tmp_path, HEAD + f"export PATH={real}:$PATH\n{calls}\npython3 train.py\nrm -rf {scratch}/kept\n")
    (scratch / "kept").touch()
    played = play(script, gpus=8, scratch=scratch)
    assert played.training is not None
    assert not played.training.submitted
    assert (scratch / "kept").exists()
    assert not (scratch / "harm").exists()
    assert "; ".join(" ".join(one.argv) for one in played.commands if "http://127.0.0.1:1" in one.argv) == calls


def test_a_computation_in_python_is_done(tmp_path: Path, scratch: Path):
    script = write(tmp_path, HEAD + "N=$(python3 -c 'print(6*7)')\nexec python train_async.py --seed $N\n")
    training = play(script, gpus=8, scratch=scratch).training
    assert training is not None
    assert training.flags == ("--seed", "42")


def test_a_script_that_ends_early_says_its_last_words(tmp_path: Path, scratch: Path):
    script = write(tmp_path, HEAD + '[ -n "${DATA_ROOT:-}" ] || { echo "DATA_ROOT is not set"; exit 3; }\n')
    played = play(script, gpus=8, scratch=scratch)
    texts = [finding.text for finding in check_script(played, played.training, ONE)]
    assert texts == ["the script ended with code 3 before it started training: DATA_ROOT is not set"]
    with pytest.raises(ConfigError, match="there is no such launch script"):
        play(tmp_path / "none.sh", gpus=8, scratch=scratch)


def test_a_script_that_needs_a_master_address_goes_on_with_one(tmp_path: Path, scratch: Path):
    needs = '[ -n "${MASTER_ADDR:-}" ] || exit 1\npython3 train.py --lr 1\nls "${DATA_ROOT}" || true\n'
    played = play(write(tmp_path, HEAD + needs), gpus=8, scratch=scratch, environ={"PATH": "/usr/bin:/bin"})
    assert played.training is not None
    texts = [finding.text for finding in check_script(played, played.training, ONE)]
    assert texts[0].startswith("MASTER_ADDR is not set and the script needs it: export it")
    assert texts[1].startswith("the script reads DATA_ROOT, which nothing sets")


# -- the box -----------------------------------------------------------------------------------------------------------

# Each line on its own (``command`` passes by the stubs), with FILE of the host, its FOLDER, and a Unix socket in it.
HOSTILE = """
sed -i 's/kept/lost/' FILE
find FOLDER -type f -delete
echo lost > FILE
command /bin/rm -rf FOLDER
python3 -c 'import shutil; shutil.rmtree("FOLDER")'
python3 <<< 'open("FILE", "w").write("lost")'
command /bin/mount -o remount,rw,bind / && echo lost > FILE
command /bin/mount -o remount,rw,bind FOLDER && echo lost > FILE
/usr/bin/unshare -rm /bin/sh -c 'mount -o remount,rw,bind / && echo lost > FILE'
command /bin/ln -sf FILE "$(dirname "$BASH_ENV")/functions.sh"
command /bin/ln -sf FILE "$(dirname "$BASH_ENV")/log"
command /bin/cp FILE "$(dirname "$BASH_ENV")/stub.py"; command /bin/mv "$(dirname "$BASH_ENV")" /tmp/gone
cat /proc/sys/vm/swappiness > /tmp/v && cat /tmp/v > /proc/sys/vm/swappiness && pkill escaped
for pid in /proc/[0-9]*; do command /bin/kill -9 "${pid#/proc/}"; done
python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect("FOLDER/socket")'
python3 -c 'import socket; socket.create_connection(("127.0.0.1", PORT), 1)'
(exec /usr/bin/setsid /bin/sleep 4321.5 > /dev/null 2>&1 &)
echo '[1]' >> "$(dirname "$BASH_ENV")/log"; echo '{"argv": []}' >> "$(dirname "$BASH_ENV")/log"
:(){ :|:& }; :
"""


@needs_box
@pytest.mark.slow
def test_nothing_of_a_script_leaves_its_box(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "_PROCESSES", 64)
    (folder := tmp_path / "folder").mkdir()
    (kept := folder / "file").write_text("kept\n")
    with socket.socket(socket.AF_UNIX) as server, socket.create_server(("127.0.0.1", 0)) as other:
        os.chdir(folder)
        server.bind("socket")
        os.chdir(tmp_path)
        server.listen()
        server.setblocking(False)
        other.setblocking(False)
        for line in HOSTILE.strip().splitlines():
            attack = line.replace("FOLDER", str(folder)).replace("FILE", str(kept))
            attack = attack.replace("PORT", str(other.getsockname()[1]))
            began = time.monotonic()
            played = play(write(tmp_path, f"{attack}\npython3 train.py --lr 1\n"), gpus=8, scratch=scratch)
            assert time.monotonic() - began < 60, attack
            assert kept.read_text() == "kept\n", attack
            assert sorted(os.listdir(folder)) == ["file", "socket"], attack
            for listening in (server, other):
                with pytest.raises(BlockingIOError):
                    listening.accept()
            assert ("pkill", "escaped") not in [one.argv for one in played.commands]
            # an attack on the box's own processes ends the script, and no more
            assert played.training or "/bin/kill" in attack or "processes" in played.reason, (attack, played)
    assert becomes_true(lambda: not [one for one in psutil.process_iter(["cmdline"]) if "4321.5" in str(one.info)], 5)


def test_without_bubblewrap_nothing_runs_unless_asked(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch):
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **how: None if name == "bwrap" else found(name, **how))
    ran = write(tmp_path, f"echo > {tmp_path}/ran\npython3 train.py\n")
    with pytest.raises(ConfigError, match=r"install it .*, or give --without-sandbox"):
        script.play(ran, gpus=8, scratch=scratch)
    assert not (tmp_path / "ran").exists()
    played = script.play(ran, gpus=8, scratch=scratch, sandbox=False)
    assert (tmp_path / "ran").exists()
    assert [finding.text for finding in check_script(played, None, ONE)][-1].startswith("--without-sandbox: ")


@needs_box
def test_what_a_script_makes_is_there_for_it_alone(tmp_path: Path, scratch: Path) -> None:
    made = (
        f"mkdir -p logs\nexec > {tmp_path}/logs/run.log\nF=$(mktemp)\ncp model.sh $F\nsource $F\ncat > new.yaml <<< a\n"
    )
    monkey = write(
        tmp_path, f"set -e\ncd {tmp_path}\n{made}python3 train.py ${{MODEL_ARGS[@]}} --custom-config-path new.yaml\n"
    )
    training = play(monkey, gpus=8, scratch=scratch).training
    assert training is not None
    assert training.flags[:2] == ("--num-layers", "28")
    assert training.files == ("new.yaml",)
    assert sorted(os.listdir(tmp_path)) == ["model.sh", "run.sh", "scratch"]


@needs_box
@pytest.mark.skipif(os.path.exists(IMAGE_SLIME_DIR), reason=f"{IMAGE_SLIME_DIR} is there")
def test_a_script_finds_slime_where_its_image_has_it(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.sh").write_text("MODEL_ARGS=(--num-layers 7)\n")
    text = f"set -e\nsource {IMAGE_SLIME_DIR}/models/a.sh\ncd {IMAGE_SLIME_DIR}\npython3 train.py ${{MODEL_ARGS[@]}}\n"
    training = play(write(tmp_path, text), gpus=8, scratch=scratch, slime_dir=tmp_path).training
    assert training is not None
    assert training.flags == ("--num-layers", "7")
    assert training.path("models/a.sh").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why", "trained"),
    [
        ('until ray status | grep -q "16 GPU"; do sleep 5; done', "", True),
        ('[ "$(ray status | grep -c node_)" = 2 ] && ray status | grep -q "/16.0 GPU"', "", True),
        ("until ray job status raysubmit_rehearsal | grep -q SUCCEEDED; do sleep 9; done", "", True),
        ("end=$((SECONDS + 240)); while [ $SECONDS -lt $end ]; do sleep 60; done", "", True),
        ("while ! ray get-head-ip | grep -q x; do sleep 5; done", "it has repeated `ray get-head-ip` ", False),
        (
            "touch log; tail -F log; tail -fn 3 none; watch -n 1 nvidia-smi; [ $(printf 'a\\nb' | tail -n 1) = b ]",
            "",
            True,
        ),
        ("yes", "it printed 1 MiB", False),
        ("while :; do :; done", "it did not end within 3 s", False),
        ("printf '\\xff\\xfe\\n'; python3 -c 'print(6 * 7)'", "", True),
    ],
)
def test_waiting_and_output_end(
    text: str, why: str, trained: bool, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "_REPEATS", 10)
    monkeypatch.setattr(script, "_LIMIT_S", 3.0 if ":;" in text else 60.0)
    monkeypatch.setitem(box._LIMITS, "FSIZE", 2**20)
    played = play(write(tmp_path, f"{text}\npython3 train.py --lr $?\n"), gpus=8, nodes=2, scratch=scratch)
    assert played.reason.startswith(why), played
    assert (played.training is not None and played.training.flags[1] == "0") is trained
    if why:
        assert f"the script was stopped, as {why}" in next(check_script(played, None, ONE)).text


@pytest.mark.parametrize(
    ("reads", "unset"),
    [
        ('[ -z "$WANDB_KEY" ] || echo; [ -n "${HF_TOKEN}" ] || true; [[ -v OTHER ]] && echo $OTHER', ()),
        ('printf -v LIST "%s" a; echo "$LIST"; read -r FIRST SECOND <<< "a b"; ray status; echo $FIRST $SECOND', ()),
        ("cat <<'EOF'\n$NOPE\nEOF\necho 'awk $NOPE' \\$NOPE # $NOPE", ()),
        ('export PYTHONPATH="$NO_DIR:/root/slime"', ()),
        ("source <(echo FROM_FILE=1); ray status; echo $FROM_FILE", ()),
        ('cat <<EOF\n$NOPE\nEOF\necho "$ALSO"', ("NOPE", "ALSO")),
        ('[[ "$IP" == "$HEAD" ]] || [ "$RANK" = 0 -a x = x ]; case "$MODE" in a) ;; esac; case $M in b) ;; esac', ()),
        ('[ $RANK = 0 ]; [[ $A == a && b < c ]] && echo "[ $B ]"; [[ $C ]] || echo $C', ("RANK", "B", "C")),
    ],
)
def test_unset_variables_are_those_that_bash_reads_empty(
    reads: str, unset: tuple[str, ...], tmp_path: Path, scratch: Path
) -> None:
    played = play(write(tmp_path, f"{reads}\npython3 train.py --lr 1\n"), gpus=8, scratch=scratch)
    assert played.unset == unset, played.output


def test_a_comparison_of_an_unset_variable_that_decides_is_named(tmp_path: Path, scratch: Path) -> None:
    played = play(write(tmp_path, "case $NODE_RANK in 0) python3 train.py ;; esac\n"), gpus=8, scratch=scratch)
    texts = [finding.text for finding in check_script(played, None, ONE)]
    assert texts[1] == "the script reads NODE_RANK, which nothing sets: export them before it runs"
    with pytest.raises(ConfigError, match="lines that end in CR LF"):
        play(write(tmp_path, "set -e\r\npython3 train.py\r\n"), gpus=8, scratch=scratch)


def test_a_batch_script_is_played_as_on_its_nodes(tmp_path: Path, scratch: Path) -> None:
    text = """#!/bin/bash
#SBATCH --nodes=2
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$first" hostname --ip-address)
srun bash -c 'if [ $SLURM_PROCID = 0 ]; then ray start --head --node-ip-address "$0"
else ray start --address "$0:6379"; fi' "$address" &
wait
cd "$SLURM_SUBMIT_DIR"
srun --nodes=1 --ntasks=1 python3 train.py --actor-num-nodes $SLURM_JOB_NUM_NODES
"""
    played = play(write(tmp_path, text), gpus=8, nodes=2, scratch=scratch)
    assert [(node.head, node.address, node.joins) for node in played.ray_nodes] == [
        (True, "10.77.0.1", None),
        (False, None, "10.77.0.1:6379"),
    ]
    assert played.training is not None
    assert played.training.flags == ("--actor-num-nodes", "2")
    with pytest.raises(ConfigError, match="is no bash script"):
        play(write(tmp_path, "#!/usr/bin/env python3\nprint(1)\n"), gpus=8, scratch=scratch)


# -- checks ----------------------------------------------------------------------------------------------------------

SOUND: dict[str, Any] = {"ref_load": "/shared/torch_dist", "colocate": True, "use_dynamic_batch_size": True}
SOUND |= dict.fromkeys(("actor_num_gpus_per_node", "num_gpus_per_node", "rollout_num_gpus", "num_query_groups"), 8)
SOUND |= {"actor_num_nodes": 1, "rollout_num_gpus_per_engine": 2, "tensor_model_parallel_size": 2, "num_layers": 36}
SOUND |= {"num_attention_heads": 32, "rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 256}
SOUND |= {"max_tokens_per_gpu": 9216, "rollout_max_response_len": 8192, "advantage_estimator": "grpo"}
SOUND["rollout_function_path"] = "slime.rollout.sglang_rollout.generate_rollout"
HOOKED = {"rollout_function_path": OURS, "eval_function_path": OURS, "custom_reward_post_process_path": "x.y"}
OWNED = {**HOOKED, "data_source_path": "agl_slime.AGLDataSource"}
APART = {"colocate": False, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 4, "global_batch_size": 256}


def findings(nodes: Nodes = ONE, *, script: str = "train.py", cwd: str = "/nowhere", **changed: Any) -> list[str]:
    training = Training(script, (), {}, cwd, submitted=True)
    parsed = Parsed(args={**SOUND, **changed}, rewards=frozenset({"math", "deepscaler", "remote_rm"}))
    *texts, ray = (finding.text for finding in check(Played((), 0, "", isolated=True), parsed, training, nodes))
    assert "starts no Ray" in ray
    return texts


SAVED = {"save": "/tmp/x/", "save_interval": 20}


@pytest.mark.parametrize("flags", [{}, APART, HOOKED, {**SAVED, "load": "/tmp/x"}])
def test_sound_arguments_have_no_findings(flags: dict[str, Any]):
    assert findings(**flags) == []


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"actor_num_nodes": 4}, "slime needs 32 GPUs (32 for training) and 1 node with 8 GPUs have 8"),
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus": 4}, "slime uses 4 of 8 GPUs"),
        ({"tensor_model_parallel_size": 3}, "8 training GPUs are no multiple of tensor 3"),
        ({"tensor_model_parallel_size": 2, "num_query_groups": 3}, "--num-query-groups 3 is no multiple"),
        ({"pipeline_model_parallel_size": 8, "tensor_model_parallel_size": 1}, "36 layers do not divide into 8"),
        ({"num_experts": 6, "expert_model_parallel_size": 4, "tensor_model_parallel_size": 1}, "--num-experts 6"),
        ({"num_experts": 8}, "give --sequence-parallel"),
        ({"rollout_batch_size": 33}, "= 264 is no multiple of --global-batch-size 256, so 8 rollouts are dropped"),
        ({"global_batch_size": 512}, "= 256 is less than --global-batch-size 512"),
        ({"global_batch_size": 2}, "--global-batch-size 2 is no multiple of 4 data-parallel ranks"),
        ({"n_samples_per_prompt": 1, "global_batch_size": 32}, "the advantage 0: give 2 or more"),
        ({"rollout_max_response_len": 16384}, "a response of 16384 tokens is longer than --max-tokens-per-gpu 9216"),
        ({"sglang_context_length": 4096}, "--rollout-max-response-len 8192 is more than --sglang-context-length 4096"),
        ({**APART, "rollout_num_gpus": None}, "give --rollout-num-gpus N"),
        ({"rollout_num_gpus_per_engine": 3}, "--rollout-num-gpus 8 is no multiple"),
        ({"num_gpus_per_node": 4}, "slime numbers the GPUs of engines by --num-gpus-per-node 4"),
        ({"prompt_data": "/nowhere.jsonl@[0:9]"}, "--prompt-data /nowhere.jsonl@[0:9] does not exist"),
        ({"save": "/tmp/x"}, "has no effect without --save-interval"),
        ({**SAVED, "load": "/tmp/y"}, "begins with step 0: give --load /tmp/x/, too"),
        ({"use_rollout_routing_replay": True, "moe_router_topk": 8}, "take up to 2.2 GiB"),
        ({**HOOKED, "partial_rollout": True}, "--partial-rollout has no effect under our rollout function"),
        ({**HOOKED, "custom_reward_post_process_path": None}, "normalises rewards by position"),
        ({**HOOKED, "agl_max_staleness": 1}, "agl_max_staleness 1 has no effect with --colocate"),
        ({**HOOKED, **APART, "agl_max_staleness": 1}, "give --use-tis"),
        ({**HOOKED, **APART, "script": "train_async.py", "agl_max_staleness": 0}, "agl_max_staleness 0 cannot be kept"),
        ({"data_source_path": "agl_slime.AGLDataSource"}, "aborts the requests of our agents after each batch"),
        (
            {**OWNED, "eval_datasets": [{"name": "a", "path": "/b", "rm_type": "math"}]},
            "data set a: rm_type 'math' has",
        ),
        ({**OWNED, "agl_eval_rollouts": 4, "eval_interval": None}, "as slime evaluates nothing: set eval_interval"),
        ({"ref_load": None}, "neither --ref-load nor --load has weights to start from"),
        (
            {"ref_load": "", "load": "/nowhere/saved"},
            "--load /nowhere/saved does not exist on this machine: put it there on each node, or give --ref-load",
        ),
        ({"ref_load": None, "use_kl_loss": True}, "the KL term needs the reference's weights"),
        ({"rm_type": "mth"}, "--rm-type mth is no reward of slime's: did you mean math?"),
        ({"rm_type": "boxed_sum"}, "give one of deepscaler, math, remote_rm, or --custom-rm-path"),
        ({"rm_type": "remote_rm"}, "--rm-type remote_rm posts to no address: give --rm-url"),
        ({"rollout_batch_size": "many"}, "correct the types of the values in --custom-config-path"),
    ],
)
def test_each_fault_is_one_sentence_with_its_fix(changed: dict[str, Any], text: str):
    assert any(text in finding for finding in findings(**changed)), findings(**changed)


def test_files_are_looked_for_where_the_script_starts_training(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"question": "6 * 7?", "label": "42"}\n' * 40)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 4096}')
    keys = {"input_key": "prompt", "label_key": "label"}
    files: dict[str, Any] = {"prompt_data": "rows.jsonl@[0:32]", "hf_checkpoint": "model", **keys}
    [missing, length] = sorted(findings(cwd=str(tmp_path), **files))
    assert "--input-key prompt is missing in 32 of 32 rows" in missing
    assert "name one of the keys there (question, label)" in missing
    assert "the model's max_position_embeddings" in length
    assert "rows.jsonl@[0:32] does not exist" in findings(**files)[0]
    data = tmp_path / "rows.jsonl"
    assert findings(prompt_data=str(data), input_key="question") == []
    assert "has 9 rows, fewer than --rollout-batch-size 32" in findings(prompt_data=f"{data}@[0:9]")[0]


def test_faults_of_the_asynchronous_driver():
    assert "train_async.py refuses --colocate: use train.py" in findings(script="train_async.py")[0]
    behind = {**HOOKED, **APART, "use_tis": True, "update_weights_interval": 2}
    for limit in (0, 1):
        assert "set 2 or more" in findings(script="train_async.py", agl_max_staleness=limit, **behind)[0]
    assert findings(script="train_async.py", agl_max_staleness=2, **behind) == []


def test_faults_of_several_nodes():
    two = {**HOOKED, "actor_num_nodes": 2, "rollout_num_gpus": 16}
    texts = findings(Nodes(2, 8), agl_store_url="http://127.0.0.1:9", agl_runners="ray:4", **two)
    assert "agl_store_url http://127.0.0.1:9 is each node's loopback" in texts[0]
    assert "agl_runners ray:4: runners on other nodes cannot reach a store" in texts[1]
    assert findings(Nodes(2, 8), **two) == []


def test_names_that_do_not_resolve():
    parsed = Parsed(
        args={**SOUND, "agl_agent": "a:B", "agl_tasks": "t.jsonl", "agl_agnt": "a:B"},
        unimportable={"agl_agent": "AttributeError: none"},
        missing={"agl_tasks": "t.jsonl"},
        hints={"agl_agent": "a:C", "agl_tasks": ""},
    )
    training = Training("train.py", (), {}, "/nowhere", submitted=True)
    texts = [finding.text for finding in check(Played((), 0, "", isolated=True), parsed, training, ONE)]
    assert texts[:3] == [
        "agl_tasks t.jsonl does not exist on this machine: put it there on each node",
        "agl_agent a:B cannot be imported (AttributeError: none): did you mean a:C?",
        "agl_agnt is no setting and has no effect: did you mean agl_agent?",
    ]


def test_the_parsers_answer_is_read_and_a_python_without_slime_named(tmp_path: Path, scratch: Path):
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    (tmp_path / "slime" / "utils" / "arguments.py").write_text("import none_of_this\n")
    training = Training("train.py", ("--lr=1", "--seeed=4", "--seed", "1"), {}, str(tmp_path), submitted=True)
    parsing = partial(parse, training, slime_dir=tmp_path, scratch=scratch, sandbox=not NO_BOX)
    with pytest.raises(MissingDependencyError, match="No module named 'none_of_this'; give --python"):
        parsing(python=sys.executable)
    answer = {"args": None, "options": ["--lr", "--seed"], "real": ["megatron.training", "sglang.srt"], "refused": []}
    (python := tmp_path / "python").write_text(f"#!/bin/sh\necho '{json.dumps(answer)}' >> $3\n")
    python.chmod(0o755)
    assert parsing(python=str(python)).ignored == {"--seeed": "--seed"}


def test_the_script_around_the_training_command(tmp_path: Path, scratch: Path):
    played = play(write(tmp_path, SLIMES), gpus=8, scratch=scratch)
    texts = [finding.text for finding in check_script(played, played.training, Nodes(4, 8))]
    assert texts[0].startswith("the script starts Ray on 3 of 4 nodes, so the others never join")
    assert texts[1].startswith("Ray's head listens on 127.0.0.1, which other nodes cannot reach")
    bound = Training("train.py", (), {"SLIME_HOST_IP": "127.0.0.1"}, "/", submitted=True)
    assert "SLIME_HOST_IP 127.0.0.1 is each node's loopback" in [*check_script(played, bound, Nodes(4, 8))][2].text
    assert all("SLIME_HOST_IP" not in finding.text for finding in check_script(played, bound, ONE))
    quoted = Training("train.py", (), {"MASTER_ADDR": "${MASTER_ADDR}"}, "/", submitted=True)
    assert "take the single quotes" in next(check_script(played, quoted, ONE)).text


RAY = (
    "ray start --head --node-ip-address 10.0.0.1 --port 6380 --dashboard-port 8266",
    "ray start --address 10.0.0.1:6380",
)
JOB = "ray job submit --address http://127.0.0.1:8266 -- python3 train.py --lr 1"


@pytest.mark.parametrize(
    ("commands", "texts"),
    [
        ((*RAY, JOB), []),
        ((*RAY, JOB.replace("127.0.0.1", "[::1]")), []),
        ((*RAY, JOB.replace("127.0.0.1", "me:PASSWORD@127.0.0.1")), []),
        ((*RAY, JOB.replace("8266", "8265")), ["submitted to port 8265 and Ray's dashboard has 8266"]),
        (
            (*RAY, JOB.replace("127.0.0.1", "10.0.0.1")),
            ["submitted to 10.0.0.1 and Ray's dashboard listens on 127.0.0.1"],
        ),
        ((RAY[0], RAY[1].replace("0.1", "0.2"), JOB), ["joins 10.0.0.2:6380 and the head listens on 10.0.0.1:6380"]),
        ((RAY[0], RAY[1].replace("6380", "6379"), JOB), ["give ray start --address=10.0.0.1:6380"]),
        ((RAY[0], RAY[1].replace("0.1", "0.999"), JOB), ["10.0.0.999, which is no IPv4 address", "joins 10.0.0.999"]),
        (
            (*RAY, f"{JOB} --sglang-router-ip 10.0.0.256"),
            ["--sglang-router-ip has 10.0.0.256, which is no IPv4 address"],
        ),
        ((*RAY, f"{JOB} --sglang-router-port 8266"), ["ray start --dashboard-port and --sglang-router-port have both"]),
        ((*RAY, f"{JOB} --sglang-router-port=80800"), ["--sglang-router-port 80800 is no port"]),
        ((*RAY, f"{JOB} --ref-load= --wandb-group="), ["--ref-load is given as an empty text"]),
        ((*RAY, JOB.replace("train.py", "trian.py")), ["trian.py does not exist in /nowhere: did you mean train.py?"]),
        (("ssh -p 22 a@b ray start --address '10.0.0.1:6380", *RAY, JOB), ["close the quote"]),
        ((*RAY, 'ray job submit --runtime-env-json {"env_vars":[1]} -- python3 train.py'), ["env_vars of names with"]),
        ((*RAY, "ray job submit --runtime-env-json {' -- python3 train.py"), ["has no JSON ("]),
        ((*RAY, "ray job submit -- python3~train.py~--lr~'1"), ["close the quote"]),
    ],
)
def test_names_addresses_and_ports_of_a_script_agree(commands: tuple[str, ...], texts: list[str]) -> None:
    words = [tuple(one.replace("~", " ") for one in command.split(" ")) for command in commands]
    played = Played(tuple(Command(argv, "/nowhere", {}) for argv in words), 0, "", isolated=True)
    found = [one.text for one in check_script(played, played.training, Nodes(2, 8)) if one.level == "breaks"]
    found = [text for text in found if "of 2 nodes" not in text]
    assert len(found) == len(texts), found
    for text, finding in zip(texts, sorted(found, key=lambda one: "IPv4" not in one), strict=True):
        assert text in finding


@pytest.mark.parametrize(
    ("vocabulary", "ranks", "divisor", "texts"),
    [
        (460, 1, None, ["of 460 by 52 rows", "give --make-vocab-size-divisible-by 4"]),
        (151_936, 8, None, ["by 640 rows to a multiple of 128 x 8", "give --make-vocab-size-divisible-by 16"]),
        (461, 2, 1, ["by 1 rows", "2 ranks do not divide it"]),
        (460, 2, 2, []),
        (151_936, 1, None, []),
    ],
)
def test_rows_of_a_padded_vocabulary_are_named(vocabulary: int, ranks: int, divisor: int | None, texts: list[str]):
    training = Played((Command(("python3", "train.py", "--lr", "1"), "/", {}),), 0, "").training
    assert training is not None
    sizes = {"vocab_size": vocabulary, "tensor_model_parallel_size": ranks, "make_vocab_size_divisible_by": divisor}
    findings = check(Played((), 0, "", isolated=True), Parsed(args={**SOUND, **sizes}), training, ONE)
    padded = [finding.text for finding in findings if "pads the vocabulary" in finding.text]
    assert len(padded) == bool(texts)
    assert all(text in padded[0] for text in texts)


def test_a_file_that_the_script_makes_is_not_missing() -> None:
    make, train = ("python3", "-m", "make", "--output", "/d/x/rows.jsonl"), ("python3", "train.py", "--lr", "1")
    training = Played((Command(make, "/", {}), Command(train, "/", {})), 0, "").training
    assert training is not None
    parsed = Parsed(args={**SOUND, "prompt_data": "/d/x/rows.jsonl"}, missing={"ref_load": "/d/none"})
    findings = check(Played((), 0, "", isolated=True), parsed, training, ONE)
    texts = {one.text.partition(" is ")[0].partition(" does ")[0]: one.level for one in findings}
    assert texts["--prompt-data /d/x/rows.jsonl"] == "note"
    assert texts["--ref-load /d/none"] == "breaks"


def test_flags_of_slimes_scripts_and_of_ours_count_as_read(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.sh").write_text("train.py --swiglu")
    text = (Path(__file__).parents[3] / "examples" / "slime" / "run_agent.sh").read_text()
    ours = re.findall(r"(?<![\w-])--override[\w-]+", text)
    assert ours
    assert unread_flags(("--swiglu", *ours, "--swiglo=1"), set(), tmp_path, real=[]) == {"--swiglo": "--swiglu"}
