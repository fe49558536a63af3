"""The engine's thread without HTTP: what the conformance suite cannot see from outside."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason='the embedded engine needs torch: pip install "agl-slime[local]"')
transformers = pytest.importorskip("transformers")

from agl_slime.engine.engine import Engine  # noqa: E402
from agl_slime.engine.requests import BadRequest, Request, Sampling  # noqa: E402
from agl_slime.engine.weights import read_weights  # noqa: E402
from agl_slime.errors import ConfigError, EngineError  # noqa: E402

LONG = Sampling(max_new_tokens=4000, ignore_eos=True)


@pytest.fixture
def engine(policy_dir: Path) -> Iterator[Engine]:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(policy_dir, attn_implementation="sdpa")
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy_dir)
    engine = Engine(model, tokenizer, max_running=4, prefill_tokens=64)
    yield engine
    engine.close()


class Answers:
    """Ended requests in the order in which they ended."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Request] = queue.Queue()

    def request(self, rid: str, ids: list[int] | None = None, sampling: Sampling = LONG) -> Request:
        return Request(rid=rid, input_ids=ids or [5, 6, 7], sampling=sampling, on_finish=self._queue.put)

    def next(self) -> Request:
        return self._queue.get(timeout=30)


def until_sampled(engine: Engine, count: int) -> None:
    """Until that many tokens were sampled in all; every look is answered by the engine's thread."""
    for _ in range(100_000):
        if engine.tokens_sampled >= count:
            return
        engine.abort("nobody").result(10)
    pytest.fail(f"no {count} tokens")


def scaled(engine_model_dir: Path, factor: float) -> dict[str, Any]:
    return {name: tensor * factor for name, tensor in read_weights(engine_model_dir).items()}


def test_a_request_paused_in_place_names_the_version_of_each_part(engine: Engine, policy_dir: Path) -> None:
    answers = Answers()
    engine.submit(answers.request("a", sampling=Sampling(max_new_tokens=600, ignore_eos=True)))
    until_sampled(engine, 5)
    engine.pause("in_place").result(10)
    before = engine.tokens_sampled
    engine.update_weights(scaled(policy_dir, 1.01), version="2").result(10)
    assert engine.tokens_sampled == before
    engine.resume().result(10)
    ended = answers.next()
    assert ended.versions == [("default", 0), ("2", before)]
    assert len(ended.output_ids) == len(ended.log_probs) == 600


def test_update_without_pause_waits_for_running_and_holds_new_requests(engine: Engine, policy_dir: Path) -> None:
    answers = Answers()
    engine.submit(answers.request("old", sampling=Sampling(max_new_tokens=300, ignore_eos=True)))
    until_sampled(engine, 1)
    update = engine.update_weights(read_weights(policy_dir), version="2")
    engine.submit(answers.request("new", sampling=Sampling(max_new_tokens=3, ignore_eos=True)))
    assert [version for version, _ in answers.next().versions] == ["default"]
    update.result(10)
    assert [version for version, _ in answers.next().versions] == ["2"]


def test_weights_are_checked_before_any_is_changed(engine: Engine, policy_dir: Path) -> None:
    good = read_weights(policy_dir)
    name = "model.norm.weight"
    for broken, words in (
        ({**good, name: good[name][:-1]}, "should be"),
        ({key: tensor for key, tensor in good.items() if key != name}, "missing"),
        ({**good, "other.weight": good[name]}, "not in the model"),
        ({**good, name: good[name] * float("nan")}, "NaN"),
    ):
        with pytest.raises(ConfigError, match=words):
            engine.update_weights(
                {key: tensor * 2 if key != name else tensor for key, tensor in broken.items()}, version="9"
            ).result(10)
    assert engine.weight_version == "default"
    answers = Answers()
    engine.submit(answers.request("a", sampling=Sampling(temperature=1.0, top_k=1, max_new_tokens=1)))
    model = transformers.AutoModelForCausalLM.from_pretrained(policy_dir)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([[5, 6, 7]])).logits[0, -1], dim=-1)
    assert answers.next().log_probs == pytest.approx([float(expected.max())], abs=1e-5)


def test_a_truncated_checkpoint_is_refused(policy_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((policy_dir / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_weights(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be read|holds no"):  # by the file system's limits
        read_weights("é" * 2500)


def test_more_requests_than_rows_all_end_once(engine: Engine) -> None:
    answers = Answers()
    lengths = [1 + 7 * (number % 5) for number in range(40)]
    engine.submit(
        *(
            answers.request(str(number), [3 + number] * (1 + number), Sampling(max_new_tokens=length, ignore_eos=True))
            for number, length in enumerate(lengths)
        )
    )
    ended = [answers.next() for _ in lengths]
    assert {request.rid for request in ended} == {str(number) for number in range(40)}
    assert all(len(request.output_ids) == lengths[int(request.rid)] for request in ended)
    assert engine.idle
    assert engine.tokens_sampled == sum(lengths)


def test_the_context_bounds_a_request_without_length(engine: Engine) -> None:
    answers = Answers()
    engine.submit(answers.request("a", [9] * 4090, Sampling(max_new_tokens=None, ignore_eos=True)))
    ended = answers.next()
    assert len(ended.output_ids) == 6
    assert ended.finish == {"type": "length", "length": 6}
    with pytest.raises(BadRequest, match="longer than the model's context length"):
        engine.submit(answers.request("b", [9] * 4096))


def test_one_bad_request_of_a_batch_queues_none(engine: Engine) -> None:
    answers = Answers()
    with pytest.raises(BadRequest):
        engine.submit(answers.request("a"), answers.request("b", [460]))
    assert engine.idle


def test_a_failure_in_the_model_ends_every_request_and_every_call(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.excepthook", lambda _: None)  # the traceback goes to standard error in real life

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._slots, "prefill", broken)
    answers = Answers()
    engine.submit(answers.request("a"), answers.request("b"))
    assert {answers.next().rid, answers.next().rid} == {"a", "b"}
    engine._thread.join(10)
    assert not engine.alive
    with pytest.raises(EngineError, match="out of luck"):
        engine.submit(answers.request("c"))
    with pytest.raises(EngineError, match="out of luck"):
        engine.pause().result(10)


def test_logits_that_are_not_finite_end_their_requests_and_not_the_engine(engine: Engine, policy_dir: Path) -> None:
    """Weights that are finite, and whose products are not."""
    answers = Answers()
    weights = read_weights(policy_dir)
    engine.update_weights({**weights, "model.norm.weight": weights["model.norm.weight"] * 1e38}).result(10)
    for sampling in (Sampling(max_new_tokens=9), Sampling(temperature=0.0), Sampling(top_p=0.5), Sampling(top_k=3)):
        engine.submit(answers.request("a", sampling=sampling))
        finish = answers.next().finish
        assert finish is not None
        assert (finish["type"], finish.get("status_code")) == ("abort", 500), finish
        assert "not finite" in finish["message"]
    engine.update_weights(weights).result(10)
    engine.submit(answers.request("a", sampling=Sampling(max_new_tokens=3, ignore_eos=True)))
    assert len(answers.next().output_ids) == 3
