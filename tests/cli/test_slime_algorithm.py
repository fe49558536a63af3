"""``SlimeAlgorithm`` as Agent Lightning's users write it: their Trainer, their runners and store; the local trainer in
slime's place."""

from __future__ import annotations

import http.server
import json
import random
import threading
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from agentlightning.utils.otlp import LightningStoreOTLPExporter
from opentelemetry.sdk.trace import TracerProvider

pytest.importorskip("torch", reason='the local trainer needs torch: pip install "agl-slime[local]"')

import agl_slime.cli.algorithm
from agl_slime import BridgeStore, ConcurrentRunner, SlimeAlgorithm
from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.errors import ConfigError
from agl_slime.support.agl import LLM, LightningStoreServer, NamedResources, Rollout, otlp_export_misses_store

agl_trainer = pytest.importorskip("agentlightning.trainer")
execution = pytest.importorskip("agentlightning.execution.shared_memory")


class HintedAgent(LookupAgent):
    """Asks for a resource of its own beside the model."""

    seen: list[Any] = []

    async def rollout_async(self, task: dict[str, Any], resources: NamedResources, rollout: Rollout) -> None:
        self.seen.append((type(resources["main_llm"]).__name__, getattr(resources["judge"], "model", None)))
        await super().rollout_async(task, resources, rollout)


def make_tasks(n: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [LookupAgent().make_task(rng) for _ in range(n)]


def fit(algorithm: SlimeAlgorithm, agent: Any, *, val: bool = False) -> None:
    trainer = agl_trainer.Trainer(
        algorithm=algorithm,
        store=BridgeStore(),
        runner=ConcurrentRunner(),
        strategy=execution.SharedMemoryExecutionStrategy(main_thread="algorithm", n_runners=1, graceful_delay=1.0),
        initial_resources={"judge": LLM(endpoint="http://127.0.0.1:1", model="judge")},
    )
    trainer.fit(agent, make_tasks(256, 1), val_dataset=make_tasks(64, 2) if val else None)


@pytest.mark.slow
def test_the_reward_rises_under_agent_lightnings_own_trainer(policy_dir: Path, tmp_path: Path):
    algorithm = SlimeAlgorithm(
        model_path=policy_dir, trainer="local", num_iterations=8, eval_interval=8, output_dir=tmp_path / "run"
    )
    HintedAgent.seen.clear()
    fit(algorithm, HintedAgent(), val=True)
    assert algorithm.result is not None
    rewards = algorithm.result.reward_means
    assert len(rewards) == 8
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.2, rewards
    assert set(HintedAgent.seen) == {("LLM", "judge")}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "val/reward_mean" in lines[-1]


def test_settings_that_the_algorithm_does_not_have_are_named():
    settings: Any = {"learning_rate": 1}
    with pytest.raises(ConfigError, match="'learning_rate'"):
        SlimeAlgorithm(model_path="/model", **settings)
    unknown: Any = "verl"
    with pytest.raises(ConfigError, match="'verl'"):
        SlimeAlgorithm(model_path="/model", trainer=unknown)


@pytest.mark.parametrize(
    ("settings", "trainer"),
    [
        ({"runners": "process:4"}, "slime"),
        ({"max_turns": 3}, "slime"),
        ({"multi_turn_scheduler": "math_tip_trick"}, "local"),
        ({"external_plugins": (Path("plugin.py"),)}, "local"),
        ({"store_host": "10.0.0.1"}, "local"),
    ],
)
def test_settings_of_the_trainer_or_the_agent_are_refused(settings: dict[str, Any], trainer: Any):
    (name,) = settings
    with pytest.raises(ConfigError, match=name.replace("_", "[_-]")):
        SlimeAlgorithm(model_path="/model", trainer=trainer, **settings)


async def test_an_empty_data_set_is_refused(policy_dir: Path):
    algorithm = SlimeAlgorithm(model_path=policy_dir, trainer="local")
    algorithm.set_store(BridgeStore())
    with pytest.raises(ConfigError, match="train_dataset is empty"):
        await algorithm.run([])


class Other:
    """A Trainer with runners of Agent Lightning's own."""

    runner = None


async def test_agent_lightning_settings_that_lose_rollouts_are_refused_at_start(
    policy_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    algorithm, trainer, proxy = SlimeAlgorithm(model_path=policy_dir, trainer="local"), Other(), Other()
    algorithm.set_trainer(trainer)  # type: ignore[arg-type]
    algorithm.set_store(LightningStoreServer(BridgeStore(), host="127.0.0.1", port=9))
    monkeypatch.setattr(agl_slime.cli.algorithm, "otlp_export_misses_store", lambda: True)
    with pytest.raises(ConfigError, match=r"opentelemetry-exporter-otlp-proto-http<1\.45"):
        await algorithm.run(make_tasks(1, 1))
    algorithm.set_llm_proxy(proxy)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave llm_proxy out"):
        await algorithm.run(make_tasks(1, 1))


def test_where_spans_go_that_agent_lightning_exports(monkeypatch: pytest.MonkeyPatch):
    """To the address that it names, or as ``otlp_export_misses_store`` says."""
    asked: list[str] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        url = f"http://127.0.0.1:{collector.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{url}/default")
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        exporter = LightningStoreOTLPExporter()
        exporter.enable_store_otlp(f"{url}/store", "ro", "at")
        span = TracerProvider().get_tracer("t").start_span("s")
        span.end()
        exporter.export([span])  # type: ignore[list-item]
        collector.shutdown()
    assert asked == ["/default" if otlp_export_misses_store() else "/store"]


@pytest.mark.slow
def test_unmodified_agent_trains_under_agent_lightnings_runner(policy_dir: Path, tmp_path: Path):
    """The runner knows of no gateway: one stands beside the loop, and ``main_llm`` is a ``ProxyLLM``."""
    from openai import AsyncOpenAI

    agl = pytest.importorskip("agentlightning")
    demonstrations = LookupAgent.demonstrations

    @agl.rollout
    async def lookup(task: dict[str, Any], llm: Any) -> float:
        assert "/rollout/" in llm.endpoint
        async with AsyncOpenAI(base_url=llm.endpoint, api_key="any") as client:
            said = await client.chat.completions.create(model="m", messages=demonstrations.prompt(task))  # type: ignore[arg-type]
        return float(len(said.choices[0].message.content or "") % 2)

    algorithm = SlimeAlgorithm(
        model_path=policy_dir,
        trainer="local",
        num_iterations=1,
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        eval_interval=0,
        output_dir=tmp_path / "run",
    )
    trainer = agl_trainer.Trainer(
        algorithm=algorithm,
        store=BridgeStore(),
        tracer=agl.OtelTracer(),
        strategy=execution.SharedMemoryExecutionStrategy(main_thread="algorithm", n_runners=1, graceful_delay=1.0),
    )
    trainer.fit(lookup, make_tasks(16, 1))
    [line] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["gateway/answers"] == 8
    assert line["trace/retokenized"] == 0
    assert line["train/tokens_trained"] == line["rollout/tokens_under_mask"] > 0
