"""The engine's thread without HTTP: its versions, checks and failures, which the conformance suite cannot observe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import ConfigError, EngineError
from tests.engine.engines import Requests, load_model, running_engine


@pytest.fixture
def requests(policy_dir: Path) -> Iterator[Requests]:
    with running_engine(policy_dir, max_running=4, prefill_tokens=64) as engine:
        yield Requests(engine)


def weights_of(directory: Path) -> dict[str, Any]:
    from agl_slime.engine.weights import read_weights

    return read_weights(directory)


def until_sampled(requests: Requests, count: int) -> None:
    """Until the engine has sampled ``count`` tokens in all; its thread answers each poll."""
    for _ in range(100_000):
        if requests.engine.tokens_sampled >= count:
            return
        requests.engine.abort("no such request").result(10)
    pytest.fail(f"no {count} tokens")


def test_update_without_pause_waits_for_running_and_holds_new_requests(requests: Requests, policy_dir: Path) -> None:
    requests.submit("old", max_new_tokens=150)
    until_sampled(requests, 1)
    update = requests.engine.update_weights(weights_of(policy_dir), version="2")
    requests.submit("new", max_new_tokens=3)
    assert [version for version, _ in requests.next().versions] == ["default"]
    update.result(10)
    assert [version for version, _ in requests.next().versions] == ["2"]


def test_weights_are_checked_before_any_is_changed(requests: Requests, policy_dir: Path) -> None:
    import torch

    good, name = weights_of(policy_dir), "model.norm.weight"
    doubled = {key: tensor * 2 for key, tensor in good.items() if key != name}
    for broken, message in (
        ({**doubled, name: good[name][:-1]}, "should be"),
        (doubled, "missing"),
        ({**doubled, name: good[name], "other.weight": good[name]}, "not in the model"),
        ({**doubled, name: good[name] * float("nan")}, "NaN"),
    ):
        with pytest.raises(ConfigError, match=message):
            requests.engine.update_weights(broken, version="9").result(10)
    assert requests.engine.weight_version == "default"
    requests.submit("a", temperature=1.0, top_k=1, max_new_tokens=1)
    with torch.no_grad():
        logits = load_model(policy_dir)(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert requests.next().log_probs == pytest.approx([float(logits.log_softmax(-1).max())], abs=1e-5)


def test_a_truncated_checkpoint_is_refused(policy_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((policy_dir / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be read"):
        weights_of(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be read|holds no"):  # by the file system's limits
        weights_of(Path("é" * 2500))


def test_the_context_bounds_a_request_and_a_bad_one_of_a_batch_queues_none(requests: Requests) -> None:
    from agl_slime.engine.requests import BadRequest

    requests.submit("a", [9] * 4090, max_new_tokens=None)
    ended = requests.next()
    assert len(ended.output_ids) == 6
    assert ended.finish == {"type": "length", "length": 6}
    with pytest.raises(BadRequest, match="longer than the model's context length"):
        requests.submit("b", [9] * 4096)
    with pytest.raises(BadRequest):
        requests.engine.submit(requests.make("c"), requests.make("d", [460]))
    assert requests.engine.idle


def test_a_failure_in_the_model_ends_every_request_and_every_call(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.excepthook", lambda _: None)  # which prints the traceback

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of luck")

    engine = requests.engine
    monkeypatch.setattr(engine._slots, "prefill", broken)
    engine.submit(requests.make("a"), requests.make("b"))
    assert {requests.next().rid, requests.next().rid} == {"a", "b"}
    engine._thread.join(10)
    assert not engine.alive
    with pytest.raises(EngineError, match="out of luck"):
        requests.submit("c")
    with pytest.raises(EngineError, match="out of luck"):
        engine.pause().result(10)


def test_logits_that_are_not_finite_end_their_requests_and_not_the_engine(requests: Requests, policy_dir: Path) -> None:
    """Weights that are finite, and whose products are not."""
    weights, name = weights_of(policy_dir), "model.norm.weight"
    requests.engine.update_weights({**weights, name: weights[name] * 1e38}).result(10)
    for sampling in ({"max_new_tokens": 9}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}):
        requests.submit("a", **sampling)
        finish = requests.next().finish
        assert finish is not None
        assert (finish["type"], finish.get("status_code")) == ("abort", 500), finish
        assert "not finite" in finish["message"]
    requests.engine.update_weights(weights).result(10)
    requests.submit("a", max_new_tokens=3)
    assert len(requests.next().output_ids) == 3
