"""TRL's GRPOTrainer trains through the recorder: an agent with the ``openai`` client talks to ``agl-slime record``, TRL
gets the tokens that the engine sampled, and the engine gets TRL's weights after each step.

    pip install -c constraints.txt -e ".[local]" "trl>=1.16,<2" openai
    python examples/trl_recorder.py --steps 20 --output curve.jsonl

The tiny policy on the embedded CPU engine stands for a model on SGLang. Each step checks what TRL trains on: the ids
and masks of its batch are those of the recorded answers, and the trainer's probability of each sampled token, divided
by the engine's, is near 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import Dataset
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

from agl_slime.cli.demo import LOOKUP_POLICY, LookupDemonstrations
from agl_slime.engine import EmbeddedEngine
from agl_slime.engine.client.weights import DiskWeightSync

LOOKUP = LookupDemonstrations()
AT_ONCE = 32


async def agent(client: AsyncOpenAI, task: dict[str, Any]) -> float:
    """Calls the tool, answers with its result, and returns the reward. Nothing in it is for training."""
    messages: list[Any] = LOOKUP.prompt(task)
    answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
    if call := re.search(r'"key": "(\w*)"}}</tool_call>', answer.content or ""):
        result = {"role": "tool", "tool_call_id": "1", "content": LOOKUP.observation(task, call[1])}
        messages += [answer.model_dump(exclude_none=True), result]
        answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
    return float(LOOKUP.is_correct(task, answer.content or ""))


class Rollouts:
    """TRL's ``rollout_func`` over the recorder at ``url``. ``sampled`` counts the rows that the recorded answers of the
    last batch make, ``versions`` the weight versions of its answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.sampled: Counter[Any] = Counter()
        self.versions: Counter[str] = Counter()

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        rows = asyncio.run(self._play([json.loads(prompt) for prompt in prompts]))
        return {name: [row[name] for row in rows] for name in rows[0]}

    async def _play(self, tasks: list[Any]) -> list[dict[str, Any]]:
        self.sampled, self.versions, places = Counter(), Counter(), asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(timeout=60) as http, AsyncOpenAI(base_url=self.url, api_key="none") as client:

            async def one(task: Any) -> dict[str, Any]:
                async with places:
                    begun = (await http.post(self.url, json={"task": task})).json()
                    of_rollout = client.with_options(base_url=begun["endpoint"], api_key=begun["api_key"])
                    reward, address = await agent(of_rollout, task), f"{self.url}/{begun['rollout_id']}"
                    (await http.post(f"{address}/finish", json={"reward": reward})).raise_for_status()
                    found = (await http.get(address, params={"format": "trl"})).raise_for_status().json()
                    turns = (await http.get(address)).raise_for_status().json()["turns"]
                if len(found["prompt_ids"]) != 1:
                    raise SystemExit(f"{address} has forks, and GRPOTrainer takes a row per prompt")
                self._count(turns)
                return {name: values[0] for name, values in found.items()}

            return await asyncio.gather(*map(one, tasks))

    def _count(self, turns: list[dict[str, Any]]) -> None:
        ids, mask = list(turns[0]["prompt_token_ids"]), [0] * len(turns[0]["prompt_token_ids"])
        for turn in turns:
            prompt, sampled = turn["prompt_token_ids"], turn["token_ids"]
            assert prompt[: len(ids)] == ids
            mask += [0] * (len(prompt) - len(ids)) + [1] * len(sampled)
            ids = prompt + sampled
            self.versions.update(turn["weight_versions"])
        self.sampled[tuple(ids), tuple(mask)] += 1


class CheckedTrainer(GRPOTrainer):
    """``GRPOTrainer`` that compares each batch with the recorded answers before it trains on it."""

    checks: list[dict[str, Any]]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        prompt_mask, mask = inputs["prompt_mask"], inputs["completion_mask"] * inputs["tool_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        present = torch.cat([prompt_mask, inputs["completion_mask"]], dim=1).bool()
        trained = torch.cat([torch.zeros_like(prompt_mask), mask], dim=1)
        rows: Counter[Any] = Counter(
            (tuple(row[here].tolist()), tuple(one[here].tolist()))
            for row, one, here in zip(ids, trained, present, strict=True)
        )
        with torch.no_grad():
            width = inputs["completion_ids"].shape[1]
            ours, *_ = self._get_per_token_logps_and_entropies(model, ids, present.long(), width)
        ratios = (ours - inputs["sampling_per_token_logps"]).exp()[mask.bool()]
        assert isinstance(self.rollout_func, Rollouts)
        check = {
            "wrong_rows": (rows - self.rollout_func.sampled).total(),
            "rows": rows.total(),
            "tokens": int(mask.sum()),
            "ratio_min": float(ratios.min()),
            "ratio_max": float(ratios.max()),
            "weight_versions": dict(self.rollout_func.versions),
        }
        self.checks.append(check)
        return super()._compute_loss(model, inputs)


class PushWeights(TrainerCallback):
    """Sends the weights of each step to the engine, under the step's number."""

    def __init__(self, url: str, directory: Path) -> None:
        self.sync, self.directory = DiskWeightSync(base_url=url), directory

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        checkpoint = self.directory / str(state.global_step % 2)
        model.save_pretrained(checkpoint)
        asyncio.run(self.sync.push(str(checkpoint), str(state.global_step)))


@contextmanager
def recorder(engine: str, directory: Path) -> Iterator[str]:
    """The address of an ``agl-slime record`` in front of ``engine``."""
    command = [sys.executable, "-m", "agl_slime", "record", "--sglang-url", engine]
    command += ["--model-path", str(LOOKUP_POLICY), "--directory", str(directory), "--max-new-tokens", "48"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def train(*, steps: int, prompts: int, samples: int, lr: float, seed: int) -> list[dict[str, Any]]:
    """A line per step: ``reward``, ``seconds``, and the check of its batch."""
    rng = random.Random(seed)
    tasks = [json.dumps(LOOKUP.make_task(rng)) for _ in range(steps * prompts)]
    with tempfile.TemporaryDirectory() as directory, EmbeddedEngine(LOOKUP_POLICY, random_seed=seed) as engine:
        work = Path(directory)
        with recorder(engine.url, work / "recorded") as url:
            config = GRPOConfig(
                output_dir=str(work / "trl"),
                seed=seed,
                max_steps=steps,
                per_device_train_batch_size=prompts * samples,
                num_generations=samples,
                gradient_accumulation_steps=1,
                shuffle_dataset=False,
                learning_rate=lr,
                lr_scheduler_type="constant",
                adam_beta2=0.99,
                max_grad_norm=0.3,
                beta=0.0,
                temperature=1.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            trainer = CheckedTrainer(
                model=AutoModelForCausalLM.from_pretrained(LOOKUP_POLICY, dtype=torch.float32),
                processing_class=AutoTokenizer.from_pretrained(LOOKUP_POLICY, padding_side="left"),
                reward_funcs=lambda reward, **_: reward,  # the recorder's, from rows of format trl
                rollout_func=Rollouts(url),
                args=config,
                train_dataset=Dataset.from_list([{"prompt": task} for task in tasks]),
                callbacks=[PushWeights(engine.url, work)],
            )
            trainer.checks = []
            trainer.train()
    steps_of = [line for line in trainer.state.log_history if "reward" in line]
    return [
        {"step": step, "reward": line["reward"], "seconds": line["step_time"], **check}
        for step, (line, check) in enumerate(zip(steps_of, trainer.checks, strict=True), 1)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=20)
    add("--prompts", type=int, default=16, help="per step")
    add("--samples", type=int, default=8, help="per prompt")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("trl_curve.jsonl"), help="a line of JSON per step")
    options = vars(parser.parse_args())
    output = options.pop("output")
    lines = train(**options)
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        print(
            "step {step:2}  reward {reward:.3f}  {seconds:5.1f} s  wrong rows {wrong_rows} of {rows}".format(**line),
            end="",
        )
        print("  ratios {ratio_min:.6f} to {ratio_max:.6f}".format(**line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
