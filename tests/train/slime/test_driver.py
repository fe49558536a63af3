"""``--trainer slime`` over the two shapes of slime's driver, without Ray: the calls, and their order."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_slime.errors import UnknownVersionError
from agl_slime.train.slime.trainer import SlimeTrainer, parse_slime_args, require_slime
from agl_slime.train.slime.versions import RolloutSide, normalizes_by_group
from tests.harness import slime_programs
from tests.programs.slime.standins import driver
from tests.train.slime.fake_ray import FakeRay

# The calls of slime's own train.py of that version in two steps with a checkpoint after the second: run for 624b824;
# for main read, from the files that tests/programs/slime/standins/driver.py names.
_BEGIN = "init_tracking manager models update_weights"
_STEP, _SAVE = "generate train", "save_model save"
ORDER = {
    "624b824": f"place {_BEGIN} {_STEP} clear_memory update_weights {_STEP} {_SAVE} clear_memory update_weights"
    " dispose finish_tracking",
    "main": "init_tracking place attach manager models update_weights training_ready"
    f" {_STEP} training_completed clear_memory pause update_weights resume"
    f" {_STEP} training_completed {_SAVE} clear_memory pause update_weights close dispose finish_tracking",
}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def use(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in driver.modules_of(shape).items():
        monkeypatch.setitem(sys.modules, name, module)


def calls(args: Any) -> list[str]:
    return Path(args.calls).read_text().split()


def started(shape: str, monkeypatch: pytest.MonkeyPatch, file: Path, **changed: Any) -> SlimeTrainer:
    use(shape, monkeypatch)
    trainer = SlimeTrainer(args=driver.driver_args(file, **changed))
    trainer.start()
    return trainer


@pytest.mark.parametrize("shape", driver.SHAPES)
def test_the_calls_come_in_the_order_of_slimes_own_driver(shape, ray, monkeypatch, tmp_path):
    trainer = started(shape, monkeypatch, tmp_path / "calls")
    first = 8 if shape == "main" else 1
    assert trainer.updates == first  # the version that the engines have
    results = [trainer.train(0), trainer.update_weights(), trainer.train(1), trainer.update_weights()]
    assert results == [3, str(first + 1), 3, str(first + 2)]
    assert trainer.saved == 1
    trainer.stop()
    trainer.stop()
    assert calls(trainer.args) == ORDER[shape].split()
    assert [handle for handle in ray.alive if isinstance(handle._actor, (driver.Manager, driver.Serving))] == []
    assert ray.placed == []


@pytest.mark.parametrize("shape", driver.SHAPES)
def test_offloaded_engines_are_woken_around_the_update(shape, ray, monkeypatch, tmp_path):
    trainer = started(shape, monkeypatch, tmp_path / "calls", offload_rollout=True, num_rollout=3)
    trainer.train(0)
    trainer.update_weights()
    trainer.stop()
    made = calls(trainer.args)
    step = made[made.index("generate") :]
    assert step[:2] == ["generate", "offload"]
    pause, resume = (["pause"], ["resume"]) if shape == "main" else ([], [])
    update = ["onload_weights", *pause, "update_weights", *resume, "onload_kv"]
    assert [name for name in step if name in {*update}] == update
    assert made[made.index("models") + 1 :][:2] == ["onload_weights", "update_weights"]


@pytest.mark.parametrize("shape", driver.SHAPES)
def test_a_batch_that_is_a_reference_is_loaded_to_be_counted(shape, ray, monkeypatch, tmp_path):
    for transport, tokens in (("straw", 3), ("nixl", None)):
        trainer = started(shape, monkeypatch, tmp_path / transport, rollout_data_transport=transport)
        assert trainer.train(0) == tokens
        trainer.stop()


@pytest.mark.slime
def test_slimes_own_loop_makes_the_calls_that_ours_makes(ray: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    script = slime_programs.require_slime() / "train.py"
    if "train(args, pgs," in script.read_text():
        pytest.skip("this slime's train.py is read, not run: see docs/slime-versions.md")
    use("624b824", monkeypatch)
    logging = sys.modules["slime.observability.logging_utils"]
    monkeypatch.setitem(sys.modules, "slime.utils.logging_utils", logging)  # up to v0.3.1
    args = driver.driver_args(tmp_path / "calls")
    runpy.run_path(str(script))["train"](args)
    assert calls(args) == ORDER["624b824"].split()


def test_each_run_has_a_new_session_unless_it_is_named(ray: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    sessions = []
    for session in (None, None, "mine"):
        trainer = started("main", monkeypatch, tmp_path / "calls", rollout_session_id=session)
        sessions.append(trainer.args.rollout_session_id)
        assert trainer.router_url == "http://10.0.0.1:3000"
        trainer.stop()
    assert len({*sessions}) == 3
    assert sessions[2] == "mine"
    startup = SimpleNamespace(manager=None)
    manager = sys.modules["slime.ray.placement_group"]
    monkeypatch.setattr(manager, "create_rollout_manager", lambda args, restore_plan: startup)
    with pytest.raises(UnknownVersionError, match="returned a SimpleNamespace without manager or close"):
        SlimeTrainer(args=driver.driver_args(tmp_path / "calls")).start()


def test_the_restore_plan_of_newer_parsers_reaches_the_manager(ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")  # require_slime asks for it
    use("main", monkeypatch)
    args = parse_slime_args([])
    assert (args.plan, args.agl_restore_plan) == (True, "a plan")
    use("624b824", monkeypatch)
    assert parse_slime_args([]).agl_restore_plan is None


@pytest.mark.parametrize("shape", driver.SHAPES)
def test_a_driver_of_another_shape_is_one_sentence(shape: str, ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    use(shape, monkeypatch)
    require_slime()
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules["slime.observability.logging_utils"], "finish_tracking")
        places = "no finish_tracking: looked for it in .*observability.* and .*util"
        with pytest.raises(UnknownVersionError, match=places):
            require_slime()
    module = sys.modules["slime.ray.placement_group"]
    monkeypatch.setattr(module, "create_rollout_manager", lambda args, cluster: None)
    with pytest.raises(UnknownVersionError, match=r"create_rollout_manager of slime .* takes \(args, cluster\)"):
        require_slime()
    startups = [SimpleNamespace(manager=None), SimpleNamespace(close=None)]
    monkeypatch.setattr(module, "create_rollout_manager", lambda args, restore_plan: startups.pop())
    while startups:
        with pytest.raises(UnknownVersionError, match="returned a SimpleNamespace without manager or close"):
            RolloutSide(None).start()


def test_whether_slime_normalises_rewards_by_group_is_tried(monkeypatch: pytest.MonkeyPatch):
    use("main", monkeypatch)
    assert normalizes_by_group() is False  # no BatchBuilder
    builder = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "slime.data.batch_builder", SimpleNamespace(BatchBuilder=lambda args: builder))
    for rewards, by_group in (([-1.0, -1.0, 1.0, 1.0], True), ([-0.5, 0.5, -0.5, 0.5], False)):
        builder._post_process_rewards = lambda samples, rewards=rewards: ([0.0, 1.0, 2.0, 3.0], rewards)
        assert normalizes_by_group() is by_group
    del builder._post_process_rewards
    with pytest.raises(UnknownVersionError, match=r"BatchBuilder of slime .* cannot normalise a test batch"):
        normalizes_by_group()
