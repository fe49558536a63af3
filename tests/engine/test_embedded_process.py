"""The engine's process: how it starts, how it fails, and that it never outlives the process that started it."""

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from agl_slime.engine import EmbeddedEngine
from agl_slime.engine.process import embedded_engine_ahead
from agl_slime.errors import EngineError
from tests.harness.processes import is_running
from tests.harness.waiting import becomes_true


def children() -> set[int]:
    """Processes that this one has started and that still run."""
    return {child.pid for child in psutil.Process().children() if is_running(child.pid)}


def test_engine_uses_a_free_port_checks_its_token_and_stops_mid_request(policy_dir: Path) -> None:
    engine = EmbeddedEngine(policy_dir, context_length=512, env={"AGL_SLIME_ENGINE_TOKEN": "s3cret"})
    with pytest.raises(EngineError, match="has not been started"):
        _ = engine.url
    with engine:
        pid = engine.pid
        assert pid is not None
        assert engine.url.startswith("http://127.0.0.1:")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{engine.url}/v1/models", timeout=10)
        assert caught.value.code == 401
        caught.value.close()
        token = {"Authorization": "Bearer s3cret"}
        request = urllib.request.Request(f"{engine.url}/v1/models", headers=token)
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert b'"max_model_len":512' in answer.read()
        with pytest.raises(EngineError, match="already started"):
            engine.start()
        url, started = engine.url, time.monotonic()
        with closing(http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=10)) as connection:
            body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
            connection.request("POST", "/generate", json.dumps(body), {**token, "Content-Type": "application/json"})
            engine.stop()
        assert time.monotonic() - started < 8  # less than a client or the start of a process waits
    assert not is_running(pid)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/health", timeout=2)


def test_engine_of_a_run_asks_no_token_of_this_process_environment(policy_dir, monkeypatch):
    monkeypatch.setenv("AGL_SLIME_ENGINE_TOKEN", "s3cret")
    with EmbeddedEngine(policy_dir) as engine, urllib.request.urlopen(f"{engine.url}/v1/models") as answer:
        assert answer.status == 200


def test_a_missing_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the embedded engine needs torch")
    with pytest.raises(
        EngineError, match=r"exit code 1; last output: .*--model-path .*nothing.* config.json"
    ) as caught:
        EmbeddedEngine(tmp_path / "nothing").start()
    assert "Traceback" not in str(caught.value)


@pytest.mark.slow
def test_preloaded_engine_process_serves_first_and_unused_one_exits(policy_dir: Path) -> None:
    old = children()
    with embedded_engine_ahead():
        (ahead,) = children() - old
        with EmbeddedEngine(policy_dir, context_length=512) as engine, EmbeddedEngine(policy_dir) as second:
            assert engine.pid == ahead != second.pid
            with urllib.request.urlopen(f"{engine.url}/get_model_info", timeout=10) as answer:
                assert json.load(answer)["model_path"] == str(policy_dir)
            too_long = {"input_ids": [1, 2, 3] * 200, "sampling_params": {"max_new_tokens": 1}}
            with pytest.raises(urllib.error.HTTPError, match="400"):  # its flags came with it
                urllib.request.urlopen(f"{engine.url}/generate", data=json.dumps(too_long).encode(), timeout=10)
    with embedded_engine_ahead():
        (unused,) = children() - old
    assert not is_running(unused)
    with embedded_engine_ahead(), pytest.raises(EngineError, match=r"no Hugging Face checkpoint"):
        EmbeddedEngine("/nowhere").start()
    assert children() == old


def test_another_address_needs_a_token(policy_dir: Path) -> None:
    command = [sys.executable, "-m", "agl_slime.engine", "--model-path", str(policy_dir)]
    command += ["--host", "0.0.0.0", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "--token" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_it_ends_when_its_parent_is_killed(policy_dir: Path) -> None:
    script = (
        "import sys\n"
        "from agl_slime.engine import EmbeddedEngine\n"
        f"engine = EmbeddedEngine({str(policy_dir)!r}).start()\n"
        "print(engine.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert is_running(child)
        finally:
            parent.send_signal(signal.SIGKILL)
    assert becomes_true(lambda: not is_running(child), 5)


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.02])
def test_stopping_it_while_another_thread_starts_it_leaves_no_process(delay_s: float, policy_dir: Path) -> None:
    old = children()
    engine = EmbeddedEngine(policy_dir)
    errors: list[BaseException] = []

    def start() -> None:
        try:
            engine.start()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    time.sleep(delay_s)  # the start must survive a stop at any of its steps
    engine.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert children() <= old
