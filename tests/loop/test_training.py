"""The whole circle for real: embedded engine, agents, spans, samples, local trainer, weights back into the engine."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import shutil
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')

from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.cli.local import run_training
from agl_slime.cli.parts import RunParts
from agl_slime.cli.settings import TrainConfig, train_config
from agl_slime.cli.start import check_tools
from agl_slime.engine import EmbeddedEngine
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.metric_names import REQUIRED_KEYS
from agl_slime.report import read_metrics
from agl_slime.report.audit import audit
from agl_slime.tokens.loading import load_tokenizer
from tests.harness.engine import engine_in_thread
from tests.loop.token_counter import TokenCounter


def run(config: TrainConfig) -> str:
    """The run's output, without colours."""
    out = io.StringIO()
    asyncio.run(run_training(config, console=Console(file=out, width=120)))
    return out.getvalue()


def model_info(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/model_info", timeout=10) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def finished(
    policy_dir: Path, embedded_engine: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, dict[str, Any]]:
    """Six iterations of the two-turn agent: the run's directory, its output, and what the engine says afterwards."""
    directory = tmp_path_factory.mktemp("run") / "out"
    before = model_info(embedded_engine)["weight_version"]
    config = train_config(
        model_path=policy_dir,
        sglang_url=embedded_engine,
        num_iterations=6,
        eval_interval=3,
        eval_rollouts=8,
        output_dir=directory,
    )
    try:
        text = run(config)
        return directory, text, model_info(embedded_engine)
    finally:
        asyncio.run(DiskWeightSync(base_url=embedded_engine).push(str(policy_dir), before))


def test_every_metrics_line_has_the_required_keys(finished: tuple[Path, str, dict[str, Any]]) -> None:
    rows = read_metrics(finished[0] / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert {name for name in ("iteration", *REQUIRED_KEYS) if row[name] is None} == set()
        assert (row["rollout/count"], row["rollout/failed"], row["rollout/groups_ready"]) == (64, 0, 16)
        assert 0 <= row["rollout/reward_mean"] <= 1
        assert row["perf/tokens_per_s"] > 0


def test_trainer_engine_and_masks_agree_on_tokens_and_log_probs(finished: tuple[Path, str, dict[str, Any]]) -> None:
    for row in read_metrics(finished[0] / "metrics.jsonl"):
        assert row["train/logprob_diff_max"] <= 1e-4
        assert row["train/first_ratio_dev_max"] <= 1e-3
        # the engine's own count, the samples' masks and the trainer's count
        assert row["rollout/tokens_sampled"] == row["rollout/tokens_under_mask"] == row["train/tokens_trained"] > 0
        assert row["trace/retokenized"] == 0


def test_versions_go_up_and_the_engine_has_the_last_one(finished: tuple[Path, str, dict[str, Any]]) -> None:
    directory, _, info = finished
    assert [row["weights/version"] for row in read_metrics(directory / "metrics.jsonl")] == [
        "1",
        "2",
        "3",
        "4",
        "5",
        "6",
    ]
    assert info["weight_version"] == "6"
    assert Path(info["model_path"]) == directory / "weights" / "v000006"
    assert sorted(path.name for path in (directory / "weights").iterdir()) == ["v000005", "v000006"]


def test_validations_are_of_the_start_and_of_every_third_iteration(finished: tuple[Path, str, dict[str, Any]]) -> None:
    rows = read_metrics(finished[0] / "metrics.jsonl")
    assert [row["iteration"] for row in rows if row.get("val/reward_mean") is not None] == [3, 6]
    assert [row["iteration"] for row in rows if row.get("val/start_reward_mean") is not None] == [1]
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert summary["val_first"] == rows[0]["val/start_reward_mean"]
    assert summary["val_last"] == rows[5]["val/reward_mean"]


def test_the_run_leaves_its_reports_and_says_where(finished: tuple[Path, str, dict[str, Any]]) -> None:
    directory, text, _ = finished
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json", "config.json"):
        assert (directory / name).stat().st_size > 0
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json"):
        assert str(directory / name) in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("iter ")] == [
        f"{number}/6" for number in range(1, 7)
    ]
    assert "NOT EQUAL" not in text
    ledger = json.loads((directory / "summary.json").read_text())["ledger"]
    assert ledger == {"opened": 6 * 64 + 3 * 8, "open": 0, "ready": 0, "trained": 6 * 64, "validated": 3 * 8}


class Sorter(SGLangLitAgent):
    """Its prompt is ``prompt`` of the task, a string or chat messages; a lower first letter is better."""

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return -float(ord((response or "~")[0]))


async def test_a_model_without_chat_template_is_asked_texts_as_they_are(policy_dir: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(policy_dir, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    said = io.StringIO()
    parts = RunParts(agent=Sorter(), tasks=[{"prompt": "Once upon a time"}])
    chat = RunParts(agent=Sorter(), tasks=[{"messages": [{"role": "user", "content": "Hi"}]}])
    with engine_in_thread(model) as url:
        config = train_config(
            model_path=model,
            sglang_url=url,
            num_iterations=1,
            rollout_batch_size=2,
            n_samples_per_prompt=2,
            max_new_tokens=4,
            eval_interval=0,
            output_dir=tmp_path / "out",
        )
        await run_training(config, given=parts, console=Console(file=said))
        with pytest.raises(
            ConfigError, match=f"^--model-path {model}: Sorter gives chat messages, .* has no chat template"
        ):
            await run_training(replace(config, output_dir=tmp_path / "chat"), given=chat, console=Console(file=said))
    lines = (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()
    samples = [sample for line in lines for sample in json.loads(line)["samples"]]
    prompts = {"".join(sample["pieces"][: sample["prompt_length"]]) for sample in samples}
    assert prompts == {"Once upon a time"}
    assert "chat template" not in said.getvalue()


def look(key: str) -> str:
    return key


class Caller(Sorter):
    def build_tools(self, task: dict[str, Any]) -> list[Any]:
        return [look]


async def test_unknown_tool_call_format_is_refused_at_the_start(policy_dir: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(policy_dir, tmp_path / "model"))
    template = model / "chat_template.jinja"
    plain = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    template.write_text(plain)
    config = train_config(model_path=model, num_iterations=1, eval_interval=0, output_dir=tmp_path / "out")
    parts = RunParts(agent=Caller(), tasks=[{"prompt": "Hi"}])
    with pytest.raises(ConfigError, match=r"^--model-path .*: Caller offers tools, and the chat template asks for"):
        await run_training(config, given=parts, console=Console(file=io.StringIO()))
    tokenizer = load_tokenizer(str(model))
    assert await check_tools(RunParts(agent=Sorter(), tasks=parts.tasks), model, tokenizer, seed=0) == ""
    parts.agent.tool_parser = "hermes"
    assert await check_tools(parts, model, tokenizer, seed=0) == ""
    in_environment = RunParts(agent=None, tasks=[], environment=object())  # type: ignore[arg-type]
    assert "a request with tools will be refused" in await check_tools(in_environment, model, tokenizer, seed=0)


async def test_foreign_weights_are_refused_in_the_first_iteration(
    policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
    class Intruder(Sorter):
        pushed: asyncio.Future[None] | None = None

        async def run(self, task: dict[str, Any], session: Any) -> None:
            if self.pushed is None:
                self.pushed = asyncio.ensure_future(
                    DiskWeightSync(base_url=embedded_engine).push(str(policy_dir), "evil")
                )
            await self.pushed
            await super().run(task, session)

    before = model_info(embedded_engine)["weight_version"]
    config = train_config(
        model_path=policy_dir,
        sglang_url=embedded_engine,
        num_iterations=1,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        max_new_tokens=4,
        eval_interval=0,
        output_dir=tmp_path / "out",
    )
    parts = RunParts(agent=Intruder(), tasks=[{"prompt": "Say something."}])
    try:
        with pytest.raises(AglSlimeError, match="version 'evil', which this run did not push"):
            await run_training(config, given=parts, console=Console(file=io.StringIO()))
    finally:
        await DiskWeightSync(base_url=embedded_engine).push(str(policy_dir), before)


async def test_an_iteration_without_training_takes_no_weight_version(
    policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
    """Tokens that were sampled before it are as old as the number of pushes since."""

    class Flat(Sorter):
        scored = 0

        def compute_reward(self, task: dict[str, Any], response: str) -> float:
            self.scored += 1
            return float(task["number"] >= 8 and self.scored % 2)

    numbers = itertools.count()
    config = train_config(
        model_path=policy_dir,
        sglang_url=embedded_engine,
        num_iterations=6,
        rollout_batch_size=2,
        n_samples_per_prompt=4,
        max_staleness=2,
        drop_zero_variance=True,
        max_new_tokens=4,
        eval_interval=0,
        output_dir=tmp_path / "out",
    )
    parts = RunParts(agent=Flat(), tasks=lambda rng: {"prompt": "Say something.", "number": next(numbers)})
    before = model_info(embedded_engine)["weight_version"]
    try:
        await run_training(config, given=parts, console=Console(file=io.StringIO()))
    finally:
        await DiskWeightSync(base_url=embedded_engine).push(str(policy_dir), before)
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    trained = ["train/steps" in row for row in rows]
    assert not trained[0]
    assert trained[-1]
    assert [row["weights/version"] for row in rows] == [str(sum(trained[: n + 1])) for n in range(6)]
    assert max(row.get("rollout/staleness_max") or 0 for row in rows) == 2
    assert audit(tmp_path / "out").findings == []


@pytest.mark.slow
async def test_a_second_engine_answers_the_validations_of_an_overlapped_run(
    policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
    trained, validated = TokenCounter(), TokenCounter()
    with EmbeddedEngine(policy_dir) as second:
        async with trained.before(embedded_engine) as url, validated.before(second.url) as beside:
            before = model_info(embedded_engine)["weight_version"]
            config = train_config(
                model_path=policy_dir,
                sglang_url=url,
                eval_sglang_url=beside,
                num_iterations=4,
                eval_interval=2,
                eval_rollouts=8,
                max_staleness=1,
                output_dir=tmp_path / "out",
            )
            try:
                await run_training(config, console=Console(file=io.StringIO()))
                last = model_info(second.url)
            finally:
                await DiskWeightSync(base_url=embedded_engine).push(str(policy_dir), before)
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert last["weight_version"] == "4"
    assert {row["val/lag"] for row in rows if row.get("val/lag") is not None} == {0}
    assert [row["iteration"] for row in rows if row.get("val/reward_mean") is not None][-1] == 4
    assert trained.tokens == sum(row["train/tokens_trained"] for row in rows)
    assert validated.tokens > 0


@pytest.mark.slow
def test_the_reward_rises_on_the_default_settings(tmp_path: Path) -> None:
    text = run(train_config(output_dir=tmp_path / "out", eval_interval=0))
    rewards = [row["rollout/reward_mean"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    assert len(rewards) == 40
    assert rewards[0] <= 0.35, text
    assert sum(rewards[-5:]) / 5 >= 0.85, text
