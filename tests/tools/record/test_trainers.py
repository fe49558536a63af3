"""The recorder under unchanged code of trainers: they get the ids that the engine sampled."""

from __future__ import annotations

import importlib
import json
import os
import queue
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.harness.environments import ask as ask_environment
from tests.harness.gateway import CALL, HELLO, TEMPLATE, WEATHER
from tests.harness.servers import free_port
from tests.harness.tokenizers import small_tokenizer
from tests.tools.record.test_record import ask, ask_with_a_tool, prompts_of, recording


def played(url: str, *, forked: bool = False) -> None:
    """Two turns with a call of a tool between them, with ``forked`` a turn of another conversation, and a reward."""
    ask_with_a_tool(f"{url}/v1")
    if forked:
        ask(f"{url}/v1", [{"role": "user", "content": "And elsewhere?"}])
    assert httpx.post(f"{url}/finish", json={"reward": {"right": 1.0, "short": 0.5}}).status_code == 200


def read(url: str, form: str = "json") -> Any:
    answer = httpx.get(url, params={"format": form})
    assert answer.status_code == 200, answer.text
    return answer.json()


def rows_of(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples with masks and log-probs from the first token on."""
    prompts = [len(sample["tokens"]) - sample["response_length"] for sample in samples]
    return [
        {
            "token_ids": sample["tokens"],
            "mask": [False] * prompt + [bool(used) for used in sample["loss_mask"]],
            "logprobs": [0.0] * prompt + sample["rollout_log_probs"],
        }
        for prompt, sample in zip(prompts, samples, strict=True)
    ]


@pytest.mark.environments
def test_verifiers_training_client_gets_the_engines_ids(tmp_path: Path) -> None:
    small_tokenizer(TEMPLATE).save_pretrained(tmp_path / "model")
    with recording(tmp_path / "recorded", "It is 4.", "Yes.", "Again.") as (gateway, engine):
        work = {"url": f"{gateway.url}/v1", "model": str(tmp_path / "model"), "session": "trace-1"}
        answer = ask_environment("recorder", stdin={**work, "questions": ["2 + 2?", "Is it?", "Sure?"]})
        turns = read(f"{gateway.url}/rollouts/trace-1")["turns"]
        assert [turn["prompt_token_ids"] for turn in turns] == prompts_of(engine)
        assert (answer["turns"], len(turns)) == (3, 3)
        trained = [
            (token, value)
            for sample in answer["samples"]
            for token, used, value in zip(sample["token_ids"], sample["mask"], sample["logprobs"], strict=True)
            if used
        ]
        assert [token for token, _ in trained] == [token for turn in turns for token in turn["token_ids"]]
        assert [value for _, value in trained] == pytest.approx([used for turn in turns for used in turn["log_probs"]])


@pytest.mark.environments
def test_verifiers_reads_a_recorded_trace_as_the_samples(tmp_path: Path) -> None:
    with recording(tmp_path, CALL, "It is warm.") as (gateway, _):
        played(url := f"{gateway.url}/rollouts/one")
        answer = ask_environment("recorder", stdin={"trace": read(url, "verifiers")})
        assert answer["samples"] == rows_of(read(url, "slime"))
        assert (answer["reward"], answer["turns"], answer["ok"]) == (1.0, 2, True)


@pytest.mark.environments
def test_prime_rls_batch_is_the_samples(tmp_path: Path) -> None:
    if not (source := os.environ.get("AGL_PRIME_RL_DIR")):
        pytest.skip("AGL_PRIME_RL_DIR names no checkout of prime-rl, which is on no package index")
    with recording(tmp_path, CALL, "It is warm.", "Another.") as (gateway, _):
        played(url := f"{gateway.url}/rollouts/one", forked=True)
        answer = ask_environment("recorder", stdin={"trace": read(url, "verifiers"), "source": source})
        samples = rows_of(read(url, "slime"))
    if "missing" in answer:
        pytest.skip(f"prime-rl cannot be imported by the Python of AGL_ENV_PYTHON: {answer['missing']} is missing")
    assert (len(samples), answer["samples"]) == (2, samples)
    assert sorted(answer["lengths"]) == sorted(len(sample["token_ids"]) for sample in samples)
    for name in ("token_ids", "mask", "logprobs"):
        assert answer["packed"][name] == [used for sample in samples for used in sample[name]]


@pytest.mark.clients
def test_openenv_and_trl_read_the_turns(tmp_path: Path) -> None:
    training = pytest.importorskip("openenv.core.harness.training", reason="OpenEnv: pip install 'openenv>=0.10'")
    harness = pytest.importorskip("trl.experimental.async_grpo.openenv_harness", reason="TRL: pip install 'trl>=1.16'")
    worker = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")
    with recording(tmp_path, CALL, "It is warm.") as (gateway, _):
        played(url := f"{gateway.url}/rollouts/one")
        trace = training.TrainingTrace.model_validate(read(url, "openenv"))
        rows, _ = worker._chain_to_sequences(harness._turns_from_training_trace(trace), "one", 0)
        samples = rows_of(read(url, "slime"))
    answer = [(row.input_ids, [bool(used) for used in row.completion_mask], row.old_log_probs) for row in rows]
    assert answer == [(sample["token_ids"], sample["mask"], sample["logprobs"]) for sample in samples]


@pytest.mark.clients
def test_openenvs_capture_gets_the_engines_ids(tmp_path: Path) -> None:
    capture = pytest.importorskip("openenv.core.harness.capture", reason="OpenEnv: pip install 'openenv>=0.10'")
    from openenv.core.harness.capture.export import export_session

    openai = pytest.importorskip("openai", reason="the client of OpenAI: pip install openai")
    with recording(tmp_path, CALL, "It is warm.") as (gateway, engine):
        server = capture.CaptureServer(llm_url=f"{gateway.url}/rollouts/one/v1", model="scripted", port=free_port())
        server.start()
        try:
            session = server.registry.create("agent-1")
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="agent-1", max_retries=0)
            messages: list[Any] = [*HELLO]
            message = client.chat.completions.create(model="m", messages=messages, tools=[WEATHER]).choices[0].message
            call = message.model_dump(exclude_none=True)
            messages += [call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "30 degrees"}]
            client.chat.completions.create(model="m", messages=messages, tools=[WEATHER])
            document = export_session(session, include_messages=True, capture_level="tokens")
            trace = capture.to_training_trace(session.graph, document)
        finally:
            server.stop()
        turns = read(f"{gateway.url}/rollouts/one")["turns"]
        assert [turn.prompt_token_ids for turn in trace.turns] == prompts_of(engine)
        assert [turn.completion_token_ids for turn in trace.turns] == [turn["token_ids"] for turn in turns]
        for captured, turn in zip(trace.turns, turns, strict=True):
            assert captured.per_token_logps == pytest.approx(turn["log_probs"])


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.clients
def test_trls_rollout_worker_gets_the_engines_ids(tmp_path: Path) -> None:
    worker = pytest.importorskip(
        "trl.experimental.async_grpo.async_rollout_worker", reason="TRL: pip install trl>=1.16"
    )
    from accelerate.state import PartialState
    from datasets import Dataset
    from trl.chat_template_utils import qwen3_chat_template

    PartialState()
    tokenizer = small_tokenizer(qwen3_chat_template)
    samples: queue.Queue[Any] = queue.Queue()
    with recording(tmp_path, *(f"It is {number}." for number in range(40))) as (gateway, engine):
        loop = worker._AsyncRolloutLoop(
            model_name="m",
            dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n} + 1?"}]} for n in range(3)]),
            reward_funcs=[lengths],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            rollout_buffer=samples,
            model_version_value=SimpleNamespace(value=0),
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=threading.Event(),
            exception_info_queue=queue.Queue(),
            metrics_queue=queue.Queue(),
            num_generations=2,
            max_inflight_tasks=2,
            max_tokens=64,
            vllm_server_url=f"{gateway.url}/rollouts/worker",
        )
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        answer = [samples.get(timeout=60) for _ in range(6)]
        loop._loop.call_soon_threadsafe(loop._stop_event.set)
        thread.join(60)
        assert not thread.is_alive()
        turns = read(f"{gateway.url}/rollouts/worker")["turns"]
        assert [turn["prompt_token_ids"] for turn in turns] == prompts_of(engine)
    recorded = [(turn["prompt_token_ids"], turn["token_ids"], turn["log_probs"]) for turn in turns]
    for sample in answer:
        mask, ids, values = (
            list(map(float, row)) for row in (sample.completion_mask, sample.input_ids, sample.old_log_probs)
        )
        start = mask.index(1)
        assert all(mask[start:])
        row = (ids[:start], ids[start:], values[start:])
        assert row in [(prompt, ids, pytest.approx(values)) for prompt, ids, values in recorded]


@pytest.mark.slow
def test_grpo_trainer_learns_from_the_engines_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason='the embedded engine: pip install "agl-slime[local]"')
    pytest.importorskip("trl", reason="TRL: pip install 'trl>=1.16'")
    pytest.importorskip("openai", reason="the client of OpenAI: pip install openai")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    example = importlib.import_module("trl_recorder")
    lines = example.train(steps=3, prompts=4, samples=4, lr=1e-3, seed=0)
    assert [(line["rows"], line["wrong_rows"]) for line in lines] == [(16, 0)] * 3
    # each step's tokens come from the previous step's weights, as the trainer's do
    assert [[*line["weight_versions"]] for line in lines] == [["default"], ["1"], ["2"]]
    for line in lines:
        assert (line["ratio_min"], line["ratio_max"]) == pytest.approx((1, 1), abs=1e-4)


def nemo_gym(work: dict[str, Any]) -> Any:
    """The answer of NeMo Gym's servers in their Python."""
    if not (python := os.environ.get("AGL_NEMO_GYM_PYTHON")):
        pytest.skip("AGL_NEMO_GYM_PYTHON names no Python that has nemo-gym")
    program = Path(__file__).parents[2] / "programs" / "clients" / "nemo_gym_servers.py"
    run = subprocess.run(
        [python, str(program)], input=json.dumps(work), capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.clients
def test_nemo_gyms_agent_server_gets_the_engines_ids(tmp_path: Path) -> None:
    with recording(tmp_path, CALL, "It is warm.") as (gateway, engine):
        tool = {"type": "function", **WEATHER["function"], "strict": False}
        work = {"url": f"{gateway.url}/rollouts/one/v1", "model": "m", "question": "Warm?", "tool": tool}
        result = nemo_gym({**work, "ports": [free_port() for _ in range(3)]})
        turns = read(f"{gateway.url}/rollouts/one")["turns"]
        assert [turn["prompt_token_ids"] for turn in turns] == prompts_of(engine)
        assert len(read(f"{gateway.url}/rollouts/one", "slime")) == 1
    sampled = [item for item in result["response"]["output"] if item.get("generation_token_ids")]
    assert [item["prompt_token_ids"] for item in sampled] == [turn["prompt_token_ids"] for turn in turns]
    ids = [[int(token) for token in item["generation_token_ids"]] for item in sampled]
    assert ids == [turn["token_ids"] for turn in turns]
    for item, turn in zip(sampled, turns, strict=True):
        assert item["generation_log_probs"] == pytest.approx(turn["log_probs"])


@pytest.mark.clients
def test_nemo_gym_reads_a_recorded_capture(tmp_path: Path) -> None:
    with recording(tmp_path, CALL, "It is warm.") as (gateway, _):
        played(url := f"{gateway.url}/rollouts/one")
        capture, turns = read(url, "nemo_gym"), read(url)["turns"]
    answer = nemo_gym({"capture": capture})
    sampled = [item for item in answer["output"] if item.get("generation_token_ids")]
    assert [item["prompt_token_ids"] for item in sampled] == [turn["prompt_token_ids"] for turn in turns]
    assert [item["generation_token_ids"] for item in sampled] == [turn["token_ids"] for turn in turns]
    assert [item["generation_log_probs"] for item in sampled] == [turn["log_probs"] for turn in turns]
    if answer["digests"] is not None:  # not in 0.4
        assert answer["digests"] == capture["entry_digests"]
        assert (answer["trajectory"]["mask_sample"], answer["trajectory"]["metrics"]["delivered_fraction"]) == (
            False,
            1.0,
        )


@pytest.mark.controller
def test_agent_lightning_1_trainer_takes_the_engines_ids(tmp_path: Path) -> None:
    if not (python := os.environ.get("AGL_CONTROLLER_PYTHON")):
        pytest.skip("AGL_CONTROLLER_PYTHON names no Python that has agentlightning 1.x")
    program = Path(__file__).parents[2] / "programs" / "clients" / "agl1_trainer.py"
    with recording(tmp_path, CALL, "It is warm.") as (gateway, _):
        played(url := f"{gateway.url}/rollouts/one")
        run = subprocess.run([python, str(program), url], capture_output=True, text=True, timeout=120, check=False)
        turns = read(url)["turns"]
    assert run.returncode == 0, run.stderr[-3000:]
    answer = json.loads(run.stdout)
    if "missing" in answer:
        pytest.skip(f"the trainer of Agent Lightning 1.0 cannot be imported: {answer['missing']}")
    assert answer["reward"] == 1.0
    names = ("prompt_token_ids", "token_ids", "log_probs")
    taken = [
        (used["prompt"]["token_ids"], *(used["response"][name] for name in names[1:])) for used in answer["triplets"]
    ]
    assert taken == [tuple(turn[name] for name in names) for turn in turns]
