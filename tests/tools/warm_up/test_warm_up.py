"""``agl-slime warm-up``: recorded conversations lower the held-out loss, and what cannot be read is refused by row."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason='a warm-up needs torch: pip install "agl-slime[local]"')

from agl_slime.cli.demo import LookupDemonstrations
from agl_slime.cli.main import main
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.train.local.model import load_model

SOURCE = LookupDemonstrations()


def call(key: str) -> dict[str, Any]:
    """The turn that calls the tool, in OpenAI's form."""
    function = {"name": "lookup", "arguments": json.dumps({"key": key})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def conversations(n: int) -> list[dict[str, Any]]:
    """Right conversations with their tasks."""
    rng, rows = random.Random(3), []
    for _ in range(n):
        task = SOURCE.make_task(rng)
        messages = [*SOURCE.prompt(task), call(task["key"]), {"role": "tool", "content": task["answer"]}]
        rows.append({"task": task, "messages": [*messages, {"role": "assistant", "content": task["answer"]}]})
    return rows


def warm_up(rows: list[Any], policy: Path, directory: Path, *flags: str) -> int:
    file = directory / "demonstrations.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    agent = ("--agent", "agl_slime.cli.demo.agent:LookupAgent")
    paths = ("--demonstrations", str(file), "--model", str(policy), "--output-dir", str(directory / "warm"))
    return main(["warm-up", *paths, *agent, *flags])


@pytest.mark.parametrize("flags", [("--lr", "2e-3"), ("--lora-rank", "8", "--lr", "5e-3")])
def test_the_answers_become_likelier(flags, policy_dir, tmp_path, capsys):
    if "--lora-rank" in flags:
        pytest.importorskip("peft", reason='adapters need peft: pip install "agl-slime[lora]"')
    assert warm_up(conversations(60), policy_dir, tmp_path, *flags, "--epochs", "2") == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'warm'}\n"
    assert "54 conversations with " in printed.err
    losses = printed.err.rpartition("held out: loss ")[2].split(",")[0].split(" -> ")
    assert float(losses[1]) < 0.5 * float(losses[0])
    load_model(tmp_path / "warm", device=pytest.importorskip("torch").device("cpu"))
    assert len(load_tokenizer(tmp_path / "warm")) == 460
    assert warm_up(conversations(2), policy_dir, tmp_path, *flags) == 2  # never over a finished one


TURN = {"role": "assistant", "content": "72"}


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ({"messages": [{"role": "user", "content": "?"}]}, (), "conversation 1: it needs `messages`, one of them the"),
        ({"task": {"key": "kz"}, "messages": [{"role": "user", "content": "?"}, TURN]}, (), "message 1 is not the"),
        ({"task": {"answer": "72"}, "messages": [TURN]}, (), "conversation 1: KeyError: 'key'"),
        ({"messages": [TURN]}, (), "conversation 1: the prompt has no messages"),
        ({"messages": [TURN]}, ("--epochs", "0"), "--epochs must be at least 1, got 0"),
        ({"messages": [TURN]}, ("--held-out", "1"), "--held-out must be at least 0 and below 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(row, flags, message, policy_dir, tmp_path, capsys):
    assert warm_up([row], policy_dir, tmp_path, *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "warm").exists()
