"""The simulation of a run, against cases that are computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.errors import AglSlimeError, ConfigError, MissingDependencyError
from agl_slime.tools.rehearse.checks import OURS, Arguments, Nodes
from agl_slime.tools.rehearse.command import RehearseConfig, lines_of, rehearse
from agl_slime.tools.rehearse.forecast import Shape, Speeds, compare, forecast
from agl_slime.tools.rehearse.live import play_live
from agl_slime.tools.rehearse.parsing import Parsed
from agl_slime.tools.rehearse.script import Command, Played, Training
from agl_slime.tools.rehearse.speeds import Size, speeds_of

SPEEDS = Speeds(token_s=0.01, train_s=4.0, sync_s=1.0)
EQUAL = Shape(groups=4, size=2, engines=2, mean_tokens=100, spread=0.0, prompt_tokens=0)


def test_a_synchronous_step_is_sampling_training_and_update():
    result = forecast(SPEEDS, EQUAL)
    assert result.step_s == pytest.approx(1.0 + 4.0 + 1.0)
    assert result.trainer_waits == pytest.approx(1 / 6)
    assert result.engines_wait == pytest.approx(5 / 6)
    assert (result.behind, result.lost_tokens) == (0.0, 0.0)


def test_train_async_takes_the_longer_side_and_the_update():
    assert forecast(SPEEDS, replace(EQUAL, asynchronous=True)).step_s == pytest.approx(4.0 + 1.0)
    slow = replace(SPEEDS, token_s=0.1)
    result = forecast(slow, replace(EQUAL, asynchronous=True))
    assert result.step_s == pytest.approx(10.0 + 1.0)
    assert result.trainer_waits == pytest.approx(6 / 11)
    assert result.behind == 1.0


def test_slots_queue_and_each_sequence_slows_the_others():
    assert forecast(SPEEDS, replace(EQUAL, engines=1, slots=4)).step_s == pytest.approx(2 * 1.0 + 5.0)
    crowded = replace(SPEEDS, token_s_per_sequence=0.01)
    assert forecast(crowded, replace(EQUAL, engines=1)).step_s == pytest.approx(100 * 0.09 + 5.0)


def test_prompts_and_agents_cost_their_time():
    result = forecast(replace(SPEEDS, prefill_token_s=0.001, agent_s=3.0), replace(EQUAL, prompt_tokens=50))
    assert result.step_s == pytest.approx(1.0 + 4 * 0.05 + 3.0 + 5.0)  # four prompts for each of two engines
    # shared GPUs are handed over
    assert forecast(replace(SPEEDS, offload_s=2.0), replace(EQUAL, colocated=True)).step_s == pytest.approx(8.0)


def test_staleness_hides_stragglers_and_is_bounded():
    uneven = replace(EQUAL, groups=8, size=4, spread=1.0, mean_tokens=400, max_tokens=4000)
    steps_s = []
    for limit in (0, 1, 2):
        result = forecast(SPEEDS, replace(uneven, max_staleness=limit, resumes=True), steps=40)
        steps_s.append(result.step_s)
        assert max(step.behind for step in result.steps) <= limit
        assert len(result.steps) == 40
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[0] > 1.2 * steps_s[1]


def test_a_batch_of_more_groups_than_it_takes_is_faster_and_loses_tokens():
    uneven = replace(EQUAL, groups=8, spread=1.0, mean_tokens=400, max_tokens=4000)
    plain, larger = forecast(SPEEDS, uneven), forecast(SPEEDS, replace(uneven, oversampled=16))
    assert larger.step_s < plain.step_s
    assert 0.1 < larger.lost_tokens < 0.7
    assert plain.lost_tokens == 0


def test_more_engines_do_not_help_shared_gpus():
    assert [name for name, _ in compare(SPEEDS, replace(EQUAL, colocated=True))] == ["as it is"]
    rows = dict(compare(SPEEDS, EQUAL))
    assert {"as it is", "agl_max_staleness 1", "agl_max_staleness 2", "4 engines"} <= {*rows}


def test_a_run_that_waits_for_ever_has_no_forecast():
    with pytest.raises(ConfigError, match=r"agl_max_staleness 0: .*set 1 or more"):
        forecast(SPEEDS, replace(EQUAL, asynchronous=True, max_staleness=0))


def test_drafts_and_deltas_are_in_the_preset():
    model = {"num_layers": 36, "hidden_size": 2560, "num_attention_heads": 32, "vocab_size": 151936}
    training = Training("train.py", (), {}, "/", submitted=True)

    def speeds(**flags: object) -> Speeds:
        args = Arguments({**model, "rollout_num_gpus": 8, "actor_num_nodes": 4, **flags}, training)
        size = Size.from_args(args)
        assert size is not None
        return speeds_of(args, size, "h100", EQUAL)

    plain, eagle = speeds(), speeds(sglang_speculative_algorithm="EAGLE", sglang_speculative_num_steps=3)
    assert plain.token_s / 2.6 < eagle.token_s < plain.token_s / 1.5  # 1 + 0.7 + 0.7^2 + 0.7^3 tokens of a longer step
    assert speeds(update_weight_transport="nccl") == plain
    disk = {"update_weight_transport": "disk"}
    whole, delta = speeds(**disk, update_weight_mode="full"), speeds(**disk, update_weight_mode="delta")
    assert plain.sync_s < delta.sync_s < whole.sync_s
    assert (whole.sync_s - 3) / (delta.sync_s - 3) == pytest.approx(2 / 1.05)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"agl_max_staleness": 0, "rollout_function_path": OURS}, "set 1 or more"),
        ({"rollout_num_gpus": 10**8}, "too many to simulate"),
        ({"rollout_batch_size": -1}, "-1 x 8 rollouts on 8 engines are none"),
        ({"rollout_batch_size": "many"}, "not supported between instances of 'str' and 'int'"),
        ({"rollout_max_response_len": -5}, "no forecast: "),
        ({"num_layers": None}, "the flags have no model sizes"),
    ],
)
def test_a_forecast_is_a_table_or_one_reason(
    changed: dict[str, object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes = {"num_layers": 36, "hidden_size": 2560, "num_attention_heads": 32, "rollout_num_gpus": 8}
    batch = {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "rollout_max_response_len": 64}
    command = Command(("python3", "train_async.py", "--lr", "1"), "/", {})
    monkeypatch.setattr("agl_slime.tools.rehearse.command.play", lambda *_, **__: Played((command,), 0, ""))
    monkeypatch.setattr(
        "agl_slime.tools.rehearse.command.parse", lambda *_, **__: Parsed(args={**sizes, **batch, **changed})
    )
    config = RehearseConfig(script=tmp_path / "run.sh")
    done = rehearse(config, (), slime_dir=tmp_path, tokenizer=tmp_path, scratch=tmp_path)
    notes = [one.text for one in done.findings if "no forecast" in one.text]
    assert bool(done.forecasts) is not bool(why)
    assert (why in notes[0]) if why else notes == []
    assert lines_of(done)


def test_a_python_without_slime_ends_a_rehearsal_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    (tmp_path / "slime" / "utils" / "arguments.py").write_text("import none_of_this\n")
    command = Command(("python3", "train.py"), str(tmp_path), {})
    monkeypatch.setattr("agl_slime.tools.rehearse.command.play", lambda *_, **__: Played((command,), 0, ""))
    config = RehearseConfig(script=tmp_path / "run.sh", without_sandbox=True)
    with pytest.raises(MissingDependencyError, match="No module named 'none_of_this'; give --python"):
        rehearse(config, (), slime_dir=tmp_path, tokenizer=tmp_path, scratch=tmp_path)


def test_a_driver_that_fails_is_told_by_its_exception(tmp_path: Path):
    (python := tmp_path / "python").write_text("#!/bin/sh\necho Exception: The node timed out.; echo; exit 1\n")
    python.chmod(0o755)
    training = Training("train.py", (), {}, str(tmp_path), False)
    args = Arguments({"actor_num_gpus_per_node": 1}, training)
    how = {"slime_dir": tmp_path, "python": str(python), "tokenizer": LOOKUP_POLICY, "scratch": tmp_path}
    with pytest.raises(AglSlimeError, match=r"code 1 in the live rehearsal: Exception: The node timed out\.$"):
        play_live(args, training, Nodes(1, 1), SPEEDS, EQUAL, steps=3, seconds=1.0, **how)
