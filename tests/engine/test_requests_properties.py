"""Any request to the embedded engine gets a typed answer, and the next ordinary one is answered."""

import json
import os
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agl_slime.engine.requests import UNSUPPORTED, Sampling
from tests.harness.engine_servers import engine_in_thread

SAMPLING = sorted({*Sampling.model_fields, *UNSUPPORTED, "sampling_seed", "custom_params", "max_tokens"})
PROMPTS: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True},
    "/pause_generation": {},
    "/continue_generation": {},
    "/abort_request": {},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
}
_LOGPROBS = ["return_logprob", "logprob_start_len", "top_logprobs_num"]
FIELDS = {
    "/generate": ["text", "input_ids", "sampling_params", "rid", "stream", *_LOGPROBS],
    "/pause_generation": ["mode"],
    "/continue_generation": ["mode"],
    "/abort_request": ["rid", "abort_all"],
    "/update_weights_from_disk": ["model_path", "weight_version", "abort_all_requests"],
}


def nested(depth: int, inner: Any = 1, *, by: Any = list) -> Any:
    for _ in range(depth):
        inner = [inner] if by is list else {"a": inner}
    return inner


NUMBERS: list[Any] = [0, -1, 1, 2, 5000, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400]
NUMBERS += [0.5, 1.0, -0.0, 1e308, -1e308, 5e-324, 1e-7, float("nan"), float("inf")]
TEXTS: list[Any] = ["", "a", "\0", "x\udfff", "a" * 5000, "\U0001f600" * 2000, "/", "..", "<|im_end|>", "default"]
VALUES = st.one_of(
    st.sampled_from([None, True, False, [], {}, *NUMBERS, *TEXTS]),
    st.sampled_from([[*TEXTS], [[]], [None], [True], [-1], [2**63], [[5], ["a"]], [[5], 6], ["a"] * 5000]),
    st.sampled_from([nested(300), nested(300, by=dict), nested(900), nested(990, by=dict), [{"type": "text"}]]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    """A path, and an ordinary body of which one to three fields hold anything."""
    path = draw(st.sampled_from(sorted(PROMPTS)))
    body = json.loads(json.dumps(PROMPTS[path]))
    for name in draw(st.lists(st.sampled_from(FIELDS[path]), min_size=1, max_size=2)):
        if name == "text":
            body.pop("input_ids", None)
        body[name] = draw(VALUES)
    if path == "/generate" and isinstance(body["sampling_params"], dict):
        inside = draw(st.dictionaries(st.sampled_from(SAMPLING), VALUES, max_size=2))
        # a new object: the drawn one is shared by all examples
        body["sampling_params"] = {**body["sampling_params"], **inside}
    return path, body


@pytest.fixture(scope="module")
def url(policy_dir: Path) -> Iterator[str]:
    with engine_in_thread(policy_dir, context_length=64, max_running=4) as url:
        yield url


def ask(url: str, path: str, body: Any = None, *, method: str = "POST") -> tuple[int, bytes]:
    place = urlsplit(url)
    connection = HTTPConnection(str(place.hostname), place.port, timeout=30)
    try:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, raw if method == "POST" else None)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def check(url: str, status: int, answer: bytes) -> None:
    assert status in (200, 400, 404, 405, 413), answer
    if status != 200:
        body = json.loads(answer)
        assert body.get("message") or body["error"]["message"]
    assert ask(url, "/continue_generation", {})[0] == 200
    ordinary = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    status, answer = ask(url, "/generate", {**ordinary, "return_logprob": True})
    assert status == 200, answer
    assert len(json.loads(answer)["meta_info"]["output_token_logprobs"]) == 3


@given(requests())
@example(("/generate", {"input_ids": [5], "sampling_params": {"top_k": 2**63}}))
@example(("/generate", {"input_ids": [5], "sampling_params": {"n": 10**9}}))
@example(("/generate", {"text": "a " * 10**6}))
@example(("/generate", {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 10**9}))
@example(("/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "\ud800"}))
def test_no_request_ends_the_engine(url: str, request_: tuple[str, Any]) -> None:
    path, body = request_
    check(url, *ask(url, path, body))


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode(errors="surrogatepass")))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"text": "\\ud800"}')
def test_a_body_that_is_no_json_is_refused(url: str, raw: bytes) -> None:
    for path in PROMPTS:
        if path not in ("/pause_generation", "/continue_generation", "/abort_request"):  # may be empty
            check(url, *ask(url, path, raw))


TIMEOUTS = [f"/flush_cache?timeout={quote(value)}" for value in ("nan", "inf", "-1", "x", "\0", "9" * 5000)]


@pytest.mark.parametrize("path", [*TIMEOUTS, "/", "/v1/../generate", "/%00", "/%ff", "/generate/x" * 100, "//"])
def test_malformed_timeouts_and_unknown_paths_are_answered(url: str, path: str) -> None:
    for method in ("GET", "POST"):
        check(url, *ask(url, path, {}, method=method))


def test_checkpoint_of_pipes_devices_or_other_tensors_is_refused(url: str, tmp_path: Path) -> None:
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    kinds = ("pipe", "device", "directory", "loop", "large", "junk")
    for kind in kinds:
        (tmp_path / kind).mkdir()
    name = "model.safetensors"
    os.mkfifo(tmp_path / "pipe" / name)
    (tmp_path / "device" / name).symlink_to("/dev/zero")
    (tmp_path / "directory" / name).mkdir()
    (tmp_path / "loop" / name).symlink_to(tmp_path / "loop" / name)
    with (tmp_path / "large" / name).open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "junk" / name).write_bytes(os.urandom(1000))
    for kind in kinds:
        status, answer = ask(url, "/update_weights_from_disk", {"model_path": str(tmp_path / kind)})
        assert status == 400
        assert not json.loads(answer)["success"]
        check(url, status, answer)
    safetensors.save_file({"other": torch.zeros(3)}, tmp_path / "junk" / name)
    check(url, *ask(url, "/update_weights_from_disk", {"model_path": str(tmp_path / "junk")}))
