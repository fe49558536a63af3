"""``SlimeAlgorithm`` as Agent Lightning's users write it: their Trainer, their runners and store; the local trainer in
slime's place."""

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import agl_slime.cli.algorithm
from agl_slime import BridgeStore, ConcurrentRunner, SlimeAlgorithm
from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.errors import ConfigError
from agl_slime.support.agl import LLM, LightningStoreServer, NamedResources, Rollout, otlp_export_misses_store
from tests.harness.servers import Handler, served_by
from tests.harness.training import needs_torch

pytestmark = needs_torch


class HintedAgent(LookupAgent):
    """Uses a resource beside the model."""

    resources: list[Any] = []

    async def rollout_async(self, task: dict[str, Any], resources: NamedResources, rollout: Rollout) -> None:
        self.resources.append((type(resources["main_llm"]).__name__, getattr(resources["judge"], "model", None)))
        await super().rollout_async(task, resources, rollout)


def make_tasks(n: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [LookupAgent().make_task(rng) for _ in range(n)]


def fit(algorithm: SlimeAlgorithm, agent: Any, n: int, **options: Any) -> list[dict[str, Any]]:
    """Train under Agent Lightning's own Trainer; the lines of the run's metrics."""
    from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy
    from agentlightning.trainer import Trainer

    strategy = SharedMemoryExecutionStrategy(main_thread="algorithm", n_runners=1, graceful_delay=1.0)
    trainer = Trainer(algorithm=algorithm, store=BridgeStore(), strategy=strategy, **options)
    trainer.fit(agent, make_tasks(n, 1), val_dataset=make_tasks(64, 2))
    assert algorithm.config.output_dir is not None
    lines = (algorithm.config.output_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_the_reward_rises_under_agent_lightnings_own_trainer(policy_dir: Path, tmp_path: Path) -> None:
    algorithm = SlimeAlgorithm(
        model_path=policy_dir, trainer="local", num_iterations=8, eval_interval=8, output_dir=tmp_path / "run"
    )
    judge = {"judge": LLM(endpoint="http://127.0.0.1:1", model="judge")}
    lines = fit(algorithm, HintedAgent(), 256, runner=ConcurrentRunner(), initial_resources=judge)
    assert algorithm.result is not None
    rewards = algorithm.result.reward_means
    assert len(rewards) == 8
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.2, rewards
    assert set(HintedAgent.resources) == {("LLM", "judge")}
    assert "val/reward_mean" in lines[-1]


@pytest.mark.parametrize(
    ("settings", "trainer"),
    [
        ({"learning_rate": 1}, "slime"),  # it has no such setting
        ({"runners": "process:4"}, "slime"),
        ({"multi_turn_scheduler": "math_tip_trick"}, "local"),
        ({"external_plugins": (Path("plugin.py"),)}, "local"),
        ({"store_host": "10.0.0.1"}, "local"),
        ({}, "verl"),
    ],
)
def test_settings_of_the_trainer_or_the_agent_are_refused(settings: dict[str, Any], trainer: Any) -> None:
    name = next(iter(settings), trainer)
    with pytest.raises(ConfigError, match=name.replace("_", "[_-]")):
        SlimeAlgorithm(model_path="/model", trainer=trainer, **settings)


class ForeignTrainer:
    """A Trainer, or its proxy, without our runner."""

    runner = None


async def test_agent_lightning_settings_that_lose_rollouts_are_refused_at_start(policy_dir, monkeypatch):
    algorithm = SlimeAlgorithm(model_path=policy_dir, trainer="local")
    algorithm.set_store(LightningStoreServer(BridgeStore(), host="127.0.0.1", port=9))
    with pytest.raises(ConfigError, match="train_dataset is empty"):
        await algorithm.run([])
    trainer, proxy = ForeignTrainer(), ForeignTrainer()
    algorithm.set_trainer(trainer)  # type: ignore[arg-type]
    monkeypatch.setattr(agl_slime.cli.algorithm, "otlp_export_misses_store", lambda: True)
    with pytest.raises(ConfigError, match=r"opentelemetry-exporter-otlp-proto-http<1\.45"):
        await algorithm.run(make_tasks(1, 1))
    algorithm.set_llm_proxy(proxy)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="leave llm_proxy out"):
        await algorithm.run(make_tasks(1, 1))


def test_spans_go_to_the_store_or_the_address_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which, depends on the exporter's version: ``otlp_export_misses_store``."""
    from agentlightning.utils.otlp import LightningStoreOTLPExporter
    from opentelemetry.sdk.trace import TracerProvider

    paths: list[str] = []

    class Collector(Handler):
        def do_POST(self) -> None:
            paths.append(self.path)
            self.answer()

    with served_by(Collector) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{url}/default")
        exporter = LightningStoreOTLPExporter()
        exporter.enable_store_otlp(f"{url}/store", "ro", "at")
        span = TracerProvider().get_tracer("t").start_span("s")
        span.end()
        exporter.export([span])  # type: ignore[list-item]
    assert paths == ["/default" if otlp_export_misses_store() else "/store"]


@pytest.mark.slow
def test_unmodified_agent_trains_under_agent_lightnings_runner(policy_dir: Path, tmp_path: Path) -> None:
    """The runner has no gateway: the loop serves one, and ``main_llm`` is a ``ProxyLLM``."""
    from openai import AsyncOpenAI

    agl = pytest.importorskip("agentlightning")
    demonstrations = LookupAgent.demonstrations

    @agl.rollout
    async def lookup(task: dict[str, Any], llm: Any) -> float:
        assert "/rollout/" in llm.endpoint
        async with AsyncOpenAI(base_url=llm.endpoint, api_key="any") as client:
            answer = await client.chat.completions.create(model="m", messages=demonstrations.prompt(task))  # type: ignore[arg-type]
        return float(len(answer.choices[0].message.content or "") % 2)

    sizes: dict[str, Any] = {
        "num_iterations": 1,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "eval_interval": 0,
    }
    algorithm = SlimeAlgorithm(model_path=policy_dir, trainer="local", output_dir=tmp_path / "run", **sizes)
    [line] = fit(algorithm, lookup, 16, tracer=agl.OtelTracer())
    assert line["gateway/answers"] == 8
    assert line["trace/retokenized"] == 0
    assert line["train/tokens_trained"] == line["rollout/tokens_under_mask"] > 0
