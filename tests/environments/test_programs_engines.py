r"""Real command-line agents in the sandbox, without a network, on an engine that really samples: the embedded one and a
real SGLang. And one of them trained, iteration after iteration.

    AGL_ENV_PYTHON=… AGL_ENV_INSTALLS=DIR AGL_SLIME_SGLANG_PYTHON=… \
        pytest -s -m "environments or sglang" tests/environments/test_programs_engines.py

A tiny policy says what writes the file, or that it is done: a rollout ends when it has said the latter, and is judged
by what it did before.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agl_slime.agent.access import EngineAccess
from agl_slime.cli.local import run_training
from agl_slime.cli.main import main
from agl_slime.cli.settings import train_config
from agl_slime.engine.client.client import SGLangClient
from agl_slime.gateway.server import Gateway
from agl_slime.report import read_metrics
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import decode_turns
from tests.environments.test_programs import PROGRAMS, call
from tests.harness.engine_servers import real_sglang
from tests.harness.environments import ROOT, ask, env_python
from tests.harness.gateway import trained_once, writer

pytest.importorskip("torch", reason='the policy needs torch: pip install "agl-slime[local]"')
pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed: bwrap is not on the PATH"),
    pytest.mark.skipif("AGL_ENV_INSTALLS" not in os.environ, reason="AGL_ENV_INSTALLS names no directory of programs"),
]
RUNTIME = ("--env.agent.runtime.type", "bubblewrap", "--env.agent.runtime.memory", "4")


@cache
def tokenizer() -> Any:
    from tests.environments.acting_policy import make_tokenizer

    return make_tokenizer([text for says, _ in PROGRAMS.values() for text in says])


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By harness; all have one tokenizer and one shape, so that an engine takes each as new weights."""
    from tests.environments.acting_policy import make_acting_policy

    made = {}
    for harness, ((first, then), _) in PROGRAMS.items():
        directory = tmp_path_factory.mktemp("policies") / harness
        # as likely to end as to go on: Qwen Code ends with an error of its own when a call is repeated five times
        made[harness] = make_acting_policy(directory, tokenizer(), {first: 1, then: 1}, target=0.5)
    return made


ENGINES = [
    pytest.param("embedded", marks=pytest.mark.environments),
    pytest.param("sglang", marks=pytest.mark.sglang),
]


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, policies: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    from agl_slime.engine import EmbeddedEngine

    policy = next(iter(policies.values()))
    if request.param == "embedded":
        with EmbeddedEngine(policy) as served:
            yield served.url
    else:
        with real_sglang(policy, tmp_path_factory.mktemp("sglang") / "server.log") as server:
            yield server.url


async def _update(url: str, policy: Path) -> None:
    async with SGLangClient(base_url=url) as client:
        await client.flush_cache()  # a program's prompt may begin as the one before
        await client.update_weights_from_disk(str(policy), policy.name)


@pytest.mark.parametrize("harness", PROGRAMS)
def test_a_program_on_an_engine_ends_is_scored_and_is_trained_exactly(
    harness: str, engine: str, policies: dict[str, Path]
) -> None:
    from tests.environments.acting_policy import log_probs

    began, policy, spans = time.monotonic(), policies[harness], []
    asyncio.run(_update(engine, policy))
    sampling = {"temperature": 1.0, "max_new_tokens": 64}
    llm = LLM(endpoint=engine, model=str(policy), sampling_parameters=sampling)
    with Gateway(None, access=EngineAccess(tokenizer=tokenizer())) as gateway:
        attempt, served = gateway.open("ro-1", "at-1", {"main_llm": llm}, writer(spans))
        assert attempt is not None
        address = served["main_llm"].endpoint
        request = {"harness": harness, "installs": os.environ["AGL_ENV_INSTALLS"], "address": address, "seconds": 400}
        found = ask("programs", stdin=request)
        run_blocking(gateway.close(attempt))
    turns = decode_turns(spans)
    segments = merge_turns(turns)

    assert found["ok"], found["errors"]
    texts = [turn.text for turn in turns]
    assert found["rewards"] == {"written": float(PROGRAMS[harness][0][0] in texts)}, texts
    assert found["turns"] == len(turns)
    trained_once(turns, segments)
    assert all(turn.token_source == "engine" for turn in turns)
    differences = [
        abs(one - other)
        for turn in turns
        for one, other in zip(
            turn.log_probs, log_probs(policy, turn.prompt_ids.tolist(), turn.response_ids.tolist()), strict=True
        )
    ]
    told = {
        "turns": len(turns),
        "longest prompt": max(len(turn.prompt_ids) for turn in turns),
        "sampled": sum(len(turn.response_ids) for turn in turns),
        "trained": sum(int(segment.loss_mask.sum()) for segment in segments),
        "samples": len(segments),
        "log-prob difference": f"{max(differences):.1e}",
        "reward": found["rewards"]["written"],
        "said": [text[:60] for text in texts],
        "s": round(time.monotonic() - began),
    }
    print(f"\n{harness}: {json.dumps(told)}")
    assert max(differences) < 1e-4
    assert told["sampled"] == told["trained"]


@pytest.mark.environments
def test_a_program_is_trained_for_ten_iterations_without_a_failed_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.environments.acting_policy import make_acting_policy

    shutil.copy(ROOT / "tests" / "programs" / "environments" / "filed.py", tmp_path / "tiny_filed.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    write, submit = PROGRAMS["mini_swe_agent"][0]
    wrong = call("bash", command="echo Oslo > capital")
    policy = make_acting_policy(tmp_path / "policy", tokenizer(), {write: 1, wrong: 1, submit: 1}, target=0.25)
    run, toml = tmp_path / "run", tmp_path / "env.toml"
    # of who installs; verifiers takes a list from a file only
    forwarded = 'forward_env = ["SSL_CERT_FILE", "UV_INDEX_URL"]'
    toml.write_text(f'[env.agent.harness]\nid = "mini_swe_agent"\n{forwarded}\n')
    config = train_config(
        env="tiny_filed",
        env_config=toml,
        env_python=Path(env_python()),
        env_arguments=(
            *RUNTIME,
            *("--env.agent.runtime.installs", os.environ["AGL_ENV_INSTALLS"]),
        ),
        model_path=policy,
        num_iterations=10,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        max_new_tokens=64,
        eval_interval=0,
        output_dir=run,
    )
    out, began = io.StringIO(), time.monotonic()
    asyncio.run(run_training(config, console=Console(file=out, width=160)))

    rows = read_metrics(run / "metrics.jsonl")
    told = {name: sum(row[name] for row in rows) for name in ("rollout/failed", "trace/retokenized")}
    told |= {"rewards": [row["rollout/reward_mean"] for row in rows], "s": round(time.monotonic() - began)}
    told |= {"sampled": sum(row["rollout/tokens_sampled"] for row in rows)}
    told |= {"trained": sum(row["train/tokens_trained"] for row in rows)}
    told |= {"log-prob difference": max(row["train/logprob_diff_max"] for row in rows)}
    print(f"\nmini_swe_agent: {json.dumps(told)}")
    assert len(rows) == 10
    assert (told["rollout/failed"], told["trace/retokenized"]) == (0, 0)
    assert told["sampled"] == told["trained"]
    assert told["log-prob difference"] < 1e-4
    assert "trained: equal" in out.getvalue()
    assert main(["audit", str(run)]) == 0
