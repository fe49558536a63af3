"""Names of the layout before this one go on working, with a warning that names the new place."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from agl_slime.support.moved import _OLD_MODULES

OLD = [
    ("agl_slime.config", "TrainConfig", "agl_slime.run.settings.TrainConfig"),
    ("agl_slime.buffer.errors", "BufferRequestError", "agl_slime.errors.BufferRequestError"),
    ("agl_slime.datasource", "AGLDataSource", "agl_slime.slime.source.AGLDataSource"),
    ("agl_slime.datasource", "DataSourceSettings", "agl_slime.datasource.source.DataSourceSettings"),
    ("agl_slime.groups.filters", "zero_variance", "agl_slime.groups.policy.zero_variance"),
    ("agl_slime.groups.ledger_disk", "PersistentLedger", "agl_slime.groups.ledger.Ledger"),
    ("agl_slime.groups.pipeline", "GroupPipeline", "agl_slime.buffer.pipeline.GroupPipeline"),
    ("agl_slime.groups.stages", "is_valid_group", "agl_slime.buffer.stages.is_valid_group"),
    ("agl_slime.loop", "LoopSettings", "agl_slime.loop.settings.LoopSettings"),
    ("agl_slime.loop", "OnlineRLLoop", "agl_slime.loop.online.OnlineRLLoop"),
    ("agl_slime.report.standard", "StandardReporters", "agl_slime.report.reporters.StandardReporters"),
    ("agl_slime.rollout.multi_turn", "MultiTurnRollout", "agl_slime.rollout.batched.multi_turn.MultiTurnRollout"),
    ("agl_slime.rollout.sampler", "SGLangSampler", "agl_slime.rollout.batched.sampler.SGLangSampler"),
    ("agl_slime.rollout.samples", "trajectory_to_samples", "agl_slime.rollout.batched.samples.trajectory_to_samples"),
    ("agl_slime.runner.plan", "RunnerPlan", "agl_slime.runner.base.RunnerPlan"),
    ("agl_slime.sglang.embedded", "EmbeddedEngine", "agl_slime.engine.process.EmbeddedEngine"),
    ("agl_slime.sglang.embedded", "make_policy", "agl_slime.demo.policy.make_policy"),
    ("agl_slime.sglang.embedded.demos", "LookupDemonstrations", "agl_slime.demo.formats.LookupDemonstrations"),
    ("agl_slime.sglang.payloads", "SamplingParams", "agl_slime.sglang.generation.SamplingParams"),
    ("agl_slime.store", "BridgeStore", "agl_slime.store.bridge.BridgeStore"),
    ("agl_slime.store", "Retention", "agl_slime.store.retention.Retention"),
    ("agl_slime.store_feed", "RemoteStore", "agl_slime.store.client.RemoteStore"),
    ("agl_slime.store_feed", "StoreService", "agl_slime.store.server.StoreService"),
    ("agl_slime.tokenizer", "load_tokenizer", "agl_slime.tokens.tokenizer.load_tokenizer"),
    ("agl_slime.trace.mask_generators", "QwenMask", "agl_slime.tokens.masks.QwenMask"),
    ("agl_slime.trace.masks", "MaskGenerator", "agl_slime.tokens.masks.MaskGenerator"),
    ("agl_slime.trainers.local", "LocalTrainer", "agl_slime.trainers.local.trainer.LocalTrainer"),
    ("agl_slime.training_run", "run_training", "agl_slime.run.local.run_training"),
]


@pytest.mark.parametrize(("module", "name", "new"), OLD, ids=[f"{module}.{name}" for module, name, _ in OLD])
def test_an_old_name_is_the_new_thing_and_says_so(module: str, name: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=new.replace(".", r"\.")):
        old = getattr(importlib.import_module(module), name)
    home, _, last = new.rpartition(".")
    assert old is getattr(importlib.import_module(home), last)


def test_every_place_that_old_modules_lead_to_is_there() -> None:
    for homes in _OLD_MODULES.values():
        for home in homes:
            importlib.import_module(home)


def test_a_name_that_never_was_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"agl_slime\.config.*nonsense"):
        _ = importlib.import_module("agl_slime.config").nonsense
    with pytest.raises(ModuleNotFoundError, match=r"agl_slime\.nonsense"):
        importlib.import_module("agl_slime.nonsense")


def test_the_warning_points_at_the_users_line() -> None:
    program = "from agl_slime.store import BridgeStore"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "<string>:1: FutureWarning" in done.stderr
    assert "agl_slime.store.bridge.BridgeStore" in done.stderr
