"""The whole training loop for real: embedded engine, agents, spans, Samples, local trainer, weights back into the
engine."""

import asyncio
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.cli.start import check_tools
from agl_slime.cli.wiring import RunInputs
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.metric_names import REQUIRED_KEYS
from agl_slime.report import read_metrics
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tools.audit import audit
from tests.harness.engine_servers import engine_in_thread
from tests.harness.training import model_info, needs_torch, train, weights_restored

pytestmark = needs_torch

SMALL: dict[str, Any] = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 4, "eval_interval": 0}


def test_six_iterations_of_the_two_turn_agent(policy_dir: Path, embedded_engine: str, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    settings = {"model_path": policy_dir, "sglang_url": embedded_engine, "output_dir": directory}
    with weights_restored(embedded_engine, policy_dir):
        text = train(**settings, num_iterations=6, eval_interval=3, eval_rollouts=8)
        info = model_info(embedded_engine)
    rows = read_metrics(directory / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert {name for name in ("iteration", *REQUIRED_KEYS) if row[name] is None} == set()
        assert (row["rollout/count"], row["rollout/failed"], row["rollout/groups_ready"]) == (64, 0, 16)
        assert 0 <= row["rollout/reward_mean"] <= 1
        assert row["perf/tokens_per_s"] > 0
        assert 0 < row["perf/train_s"] + row["perf/sync_s"] < row["perf/iteration_s"]
        # trainer, engine and masks agree on tokens and log-probs
        assert row["train/logprob_diff_max"] <= 1e-4
        assert row["train/first_ratio_dev_max"] <= 1e-3
        assert row["rollout/tokens_sampled"] == row["rollout/tokens_under_mask"] == row["train/tokens_trained"] > 0
        assert row["trace/retokenized"] == 0

    assert [row["weights/version"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert (info["weight_version"], Path(info["model_path"])) == ("6", directory / "weights" / "v000006")
    assert sorted(path.name for path in (directory / "weights").iterdir()) == ["v000005", "v000006"]

    summary = json.loads((directory / "summary.json").read_text())
    assert [row["iteration"] for row in rows if row.get("val/reward_mean") is not None] == [3, 6]
    assert [row["iteration"] for row in rows if row.get("val/start_reward_mean") is not None] == [1]
    assert (summary["val_first"], summary["val_last"]) == (rows[0]["val/start_reward_mean"], rows[5]["val/reward_mean"])
    trained, validated = 6 * 64, 3 * 8
    counts = {"opened": trained + validated, "open": 0, "ready": 0, "trained": trained, "validated": validated}
    assert summary["ledger"] == counts

    assert (directory / "config.json").stat().st_size > 0
    for name in ("metrics.jsonl", "rollouts.jsonl", "summary.json"):
        assert (directory / name).stat().st_size > 0
        assert str(directory / name) in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("iter ")] == [
        f"{n}/6" for n in range(1, 7)
    ]
    assert "NOT EQUAL" not in text


class Sorter(SGLangLitAgent):
    """Its prompt is ``prompt`` of the task, a string or chat messages; a lower first letter is better."""

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return -float(ord((response or "~")[0]))


def test_a_model_without_chat_template_gets_texts_as_they_are(policy_dir: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(policy_dir, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    text = RunInputs(agent=Sorter(), tasks=[{"prompt": "Once upon a time"}])
    chat = RunInputs(agent=Sorter(), tasks=[{"messages": [{"role": "user", "content": "Hi"}]}])
    refusal = f"^--model-path {model}: Sorter gives chat messages, .* has no chat template"
    with engine_in_thread(model) as url:
        settings = {**SMALL, "model_path": model, "sglang_url": url, "num_iterations": 1}
        output = train(inputs=text, output_dir=tmp_path / "out", **settings)
        with pytest.raises(ConfigError, match=refusal):
            train(inputs=chat, output_dir=tmp_path / "chat", **settings)
    lines = (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()
    samples = [sample for line in lines for sample in json.loads(line)["samples"]]
    prompts = {"".join(sample["pieces"][: sample["prompt_length"]]) for sample in samples}
    assert prompts == {"Once upon a time"}
    assert "without a chat template prompts are sampled as they are" in output


def look(key: str) -> str:
    return key


class Caller(Sorter):
    def build_tools(self, task: dict[str, Any]) -> list[Any]:
        return [look]


def test_unknown_tool_call_format_is_refused_at_the_start(policy_dir: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(policy_dir, tmp_path / "model"))
    plain = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    (model / "chat_template.jinja").write_text(plain)
    caller, tasks = Caller(), [{"prompt": "Hi"}]
    inputs = RunInputs(agent=caller, tasks=tasks)
    with pytest.raises(ConfigError, match=r"^--model-path .*: Caller offers tools, and the chat template asks for"):
        train(inputs=inputs, model_path=model, output_dir=tmp_path / "out", eval_interval=0)
    tokenizer = load_tokenizer(str(model))

    def check(**fields: Any) -> str:
        return asyncio.run(check_tools(RunInputs(**{"tasks": tasks, **fields}), model, tokenizer, seed=0))

    assert check(agent=Sorter()) == ""
    caller.tool_parser = "hermes"
    assert check(agent=caller) == ""
    assert "a request with tools will be refused" in check(agent=None, tasks=[], environment=object())


def test_foreign_weights_are_refused_in_the_first_iteration(policy_dir: Path, embedded_engine: str, tmp_path: Path):
    class Intruder(Sorter):
        pushed: asyncio.Future[None] | None = None

        async def run(self, task: dict[str, Any], session: Any) -> None:
            if self.pushed is None:
                self.pushed = asyncio.ensure_future(
                    DiskWeightSync(base_url=embedded_engine).push(str(policy_dir), "evil")
                )
            await self.pushed
            await super().run(task, session)

    parts = RunInputs(agent=Intruder(), tasks=[{"prompt": "Say something."}])
    settings = {**SMALL, "model_path": policy_dir, "sglang_url": embedded_engine, "num_iterations": 1}
    with (
        weights_restored(embedded_engine, policy_dir),
        pytest.raises(AglSlimeError, match="version 'evil', which this run did not push"),
    ):
        train(inputs=parts, output_dir=tmp_path / "out", **settings)


def test_an_iteration_without_training_takes_no_weight_version(policy_dir: Path, embedded_engine: str, tmp_path: Path):
    """The staleness of a token counts the pushes since it was sampled."""

    class Flat(Sorter):
        scored = 0

        def compute_reward(self, task: dict[str, Any], response: str) -> float:
            self.scored += 1
            return float(task["number"] >= 8 and self.scored % 2)

    numbers = itertools.count()
    parts = RunInputs(agent=Flat(), tasks=lambda rng: {"prompt": "Say something.", "number": next(numbers)})
    settings = {**SMALL, "n_samples_per_prompt": 4, "max_staleness": 2, "drop_zero_variance": True, "num_iterations": 6}
    with weights_restored(embedded_engine, policy_dir):
        train(inputs=parts, model_path=policy_dir, sglang_url=embedded_engine, output_dir=tmp_path / "out", **settings)
    rows = read_metrics(tmp_path / "out" / "metrics.jsonl")
    trained = ["train/steps" in row for row in rows]
    assert (trained[0], trained[-1]) == (False, True)
    assert [row["weights/version"] for row in rows] == [str(sum(trained[: n + 1])) for n in range(6)]
    assert max(row.get("rollout/staleness_max") or 0 for row in rows) == 2
    assert audit(tmp_path / "out").findings == []


@pytest.mark.slow
def test_the_reward_rises_on_the_default_settings(tmp_path: Path) -> None:
    text = train(output_dir=tmp_path / "out", eval_interval=0)
    rewards = [row["rollout/reward_mean"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    assert len(rewards) == 40
    assert rewards[0] <= 0.35, text
    assert sum(rewards[-5:]) / 5 >= 0.85, text
