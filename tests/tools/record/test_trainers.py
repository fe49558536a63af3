"""The recorder under unchanged code of trainers: they get the ids that the engine sampled."""

import importlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.environments import ask as ask_environment
from tests.harness.gateway import CALL, TEMPLATE
from tests.harness.tokenizers import small_tokenizer
from tests.tools.record.test_record import ask_with_a_tool, prompts_of, recording


def played(url: str) -> None:
    """Two turns with a call of a tool between them, and a reward."""
    ask_with_a_tool(f"{url}/v1")
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
        url = gateway.rollouts_url.replace("/rollouts", "/v1")
        work = {"url": url, "model": str(tmp_path / "model"), "session": "trace-1"}
        answer = ask_environment("recorder", stdin={**work, "questions": ["2 + 2?", "Is it?", "Sure?"]})
        turns = read(f"{gateway.rollouts_url}/trace-1")["turns"]
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
        played(url := f"{gateway.rollouts_url}/one")
        answer = ask_environment("recorder", stdin={"trace": read(url, "verifiers")})
        assert answer["samples"] == rows_of(read(url, "slime"))
        assert (answer["reward"], answer["turns"], answer["ok"]) == (1.0, 2, True)


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
