"""Making the tiny policy: determinism, reuse, what is on disk, and the reward that training starts from."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

torch = pytest.importorskip("torch", reason='the tiny policy needs torch: pip install "agl-slime[local]"')
transformers = pytest.importorskip("transformers")
load = pytest.importorskip("safetensors.torch").load

from agl_slime.cli.demo import LOOKUP_POLICY, LookupDemonstrations  # noqa: E402
from agl_slime.cli.demo.warmup import SPEC_FILE, PolicySettings, make_policy, spec_of  # noqa: E402
from agl_slime.errors import ConfigError, TrainerError  # noqa: E402

QUICK = PolicySettings(target=0.0, probe_every=1, imperfect_steps=1, batch_size=2, probe_size=2)
"""One step of each phase: for what does not depend on what was learned."""


def quick(steps: int = 1) -> PolicySettings:
    return dataclasses.replace(QUICK, imperfect_steps=steps)


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_the_same_seed_gives_the_same_policy_and_another_seed_another(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    first = make_policy(tmp_path / "a", seed=1, settings=QUICK)
    assert bool((torch.random.get_rng_state() == state).all())
    assert weights(make_policy(tmp_path / "b", seed=1, settings=QUICK)) == weights(first)
    assert weights(make_policy(tmp_path / "c", seed=2, settings=QUICK)) != weights(first)


def test_a_tiny_policy_in_the_directory_is_replaced(tmp_path: Path) -> None:
    directory = make_policy(tmp_path / "p", settings=QUICK)
    spec = (directory / SPEC_FILE).read_text()
    make_policy(directory, settings=QUICK, seed=1)
    assert (directory / SPEC_FILE).read_text() != spec
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_a_directory_with_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no tiny policy"):
        make_policy(tmp_path, settings=QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_warm_up_that_does_not_learn_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    settings = PolicySettings(max_steps=2, probe_every=1, batch_size=2, probe_size=4)
    with pytest.raises(TrainerError, match="the warm-up's probe is at"):
        make_policy(tmp_path / "p", settings=settings)
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_policy_is_of_todays_demonstrations_and_needs_no_torch() -> None:
    """Fails when the demonstrations or settings have changed: run agl-slime demo-policy."""
    program = "import sys; from agl_slime.cli.demo import LOOKUP_POLICY; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
    files = {path.name: path.read_bytes() for path in LOOKUP_POLICY.iterdir()}
    assert json.loads(files[SPEC_FILE])["spec"] == spec_of(0, LookupDemonstrations(), PolicySettings())
    assert sum(map(len, files.values())) < 600_000
    # transformers 4 reads another field than transformers 5
    config = json.loads(files["config.json"])
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1000.0


@pytest.mark.slow
def test_the_script_gives_the_shipped_policy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agl_slime.cli.main", "demo-policy", str(tmp_path / "p")]
    subprocess.run(command, timeout=300, check=True)
    made, shipped = (json.loads((directory / SPEC_FILE).read_text()) for directory in (tmp_path / "p", LOOKUP_POLICY))
    assert made["spec"] == shipped["spec"]
    assert made["warmup"]["clean_probe"] >= 0.9
    if made["made_with"] == shipped["made_with"]:  # sums round differently elsewhere
        files = [{path.name: path.read_bytes() for path in at.iterdir()} for at in (tmp_path / "p", LOOKUP_POLICY)]
        weights = [load(each.pop("model.safetensors")) for each in files]
        assert files[0] == files[1]
        assert weights[0].keys() == weights[1].keys()
        for name, tensor in weights[0].items():  # processors of one capability round differently, too: 4e-5 was seen
            torch.testing.assert_close(tensor, weights[1][name], atol=5e-4, rtol=0.0)


def test_it_is_an_ordinary_checkpoint(policy_dir: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(policy_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy_dir)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == 128_128
    assert model.config.vocab_size == len(tokenizer) == 460
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    report = json.loads((policy_dir / SPEC_FILE).read_text())["warmup"]
    assert report["clean_probe"] >= 0.9


async def test_training_starts_from_a_low_reward_that_is_not_zero(policy_dir: Path, embedded_engine: str) -> None:
    """200 rollouts of the lookup task at temperature 1: the tool called with the right key, and its answer given."""
    source, rng = LookupDemonstrations(), random.Random(11)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(policy_dir)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
    ) as session:

        async def say(messages: list[dict[str, Any]]) -> str:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            body = {"input_ids": ids, "sampling_params": {"temperature": 1.0, "max_new_tokens": 48}}
            async with session.post(f"{embedded_engine}/generate", json=body) as answer:
                return (await answer.json())["text"]

        async def rollout(task: dict[str, Any]) -> float:
            messages = source.prompt(task)
            call = await say(messages)
            if call != source.tool_call(task["key"]):
                return 0.0
            messages += [
                {"role": "assistant", "content": call},
                {"role": "tool", "content": source.observation(task, task["key"])},
            ]
            return float(source.is_correct(task, await say(messages)))

        rewards = await asyncio.gather(*(rollout(source.make_task(rng)) for _ in range(200)))
    assert 0.03 <= sum(rewards) / len(rewards) <= 0.30
