"""The directory of a run: where it is, what is in it, and that two runs with different settings never mix."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError
from agl_slime.report.jsonl import jsonable, write_json

CONFIG = "config.json"
# Settings that say where or how to start and not what is run; they may differ between a run and its continuation.
NOT_COMPARED = frozenset({"output_dir", "overwrite", "resume"})
_SECRET = re.compile(r"(^|[_-])(api_?key|auth_?token|access_?token|bearer|password|secret)$|^token$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RunDir:
    """The paths of a run. ``changed`` names the settings that differ from those of the run that was resumed."""

    path: Path
    changed: tuple[str, ...] = ()

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def agent(self) -> str:
        """What the run trains, empty when that is not known."""
        try:
            return str(json.loads(self.config.read_bytes()).get("agent", ""))
        except (OSError, ValueError, AttributeError):
            return ""

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def plot(self) -> Path:
        return self.path / "reward.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def transcripts(self) -> Path:
        return self.path / "transcripts"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def trained(self) -> Path:
        """Which instances and rollouts each iteration trained on."""
        return self.path / "trained.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def reports(self) -> tuple[Path, ...]:
        """What a new run in the same place replaces."""
        ledger = tuple(self.ledger.with_name(self.ledger.name + suffix) for suffix in ("", "-wal", "-shm"))
        return (
            self.metrics,
            self.plot,
            self.summary,
            self.tensorboard,
            self.transcripts,
            self.trained,
            self.checkpoints,
            *ledger,
        )


def open_run_dir(
    path: str | os.PathLike[str] | None,
    *,
    agent: str,
    settings: Any,
    resume: bool = False,
    overwrite: bool = False,
    root: str | os.PathLike[str] = "runs",
) -> RunDir:
    """Make or open the directory of a run and write ``config.json`` into it; ``settings`` is a mapping or a dataclass.

    ``path=None`` makes a new ``<root>/<time>-<agent>``. A directory that holds a run with other settings is refused,
    unless ``resume`` continues that run (its files are kept) or ``overwrite`` replaces it. A run with the same settings
    is replaced: the reports, checkpoints and ledger of the old run are removed, nothing else in the directory. Values
    of settings named like a password or an API key are not written.

    Raises ``ConfigError`` when the directory is refused, cannot be written, or ``resume`` finds no run in it.
    """
    wanted = redact(jsonable(settings))
    if not isinstance(wanted, dict):
        raise ConfigError(f"settings must be a mapping or a dataclass, got {type(settings).__name__}")
    if path is None:
        if resume:
            raise ConfigError("resume needs the output directory of the run to continue; name it")
        return _write(_new(Path(root), agent), wanted)
    run = RunDir(path=Path(path))
    if run.path.exists() and not run.path.is_dir():
        raise ConfigError(f"output directory {run.path} is a file; choose another path")
    changed: tuple[str, ...] = ()
    if run.config.exists():
        changed = differences(_read(run.config, overwrite=overwrite), wanted)
        if changed and not (resume or overwrite):
            some = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
            raise ConfigError(
                f"output directory {run.path} holds a run with other settings ({some}); "
                "choose another --output-dir, or replace that run with --overwrite"
            )
    elif resume:
        raise ConfigError(f"output directory {run.path} holds no run to resume ({CONFIG} is missing)")
    elif not overwrite and (foreign := [path.name for path in run.reports if path.exists()]):
        fix = "choose another directory or overwrite it"
        raise ConfigError(
            f"output directory {run.path} holds {foreign[0]} but no {CONFIG}, so it may not be a run's; {fix}"
        )
    return _write(RunDir(path=run.path, changed=changed if resume else ()), wanted, clear=not resume)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """The settings that differ, nested ones with dots, in alphabetical order."""
    found: list[str] = []
    for key in sorted({*old, *new} - (NOT_COMPARED if not prefix else frozenset())):
        left, right = old.get(key), new.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found.append(f"{prefix}{key}")
    return tuple(found)


def redact(value: Any) -> Any:
    """The settings with ``"(not written)"`` in place of passwords and API keys."""
    if isinstance(value, dict):
        return {key: "(not written)" if item and _SECRET.search(key) else redact(item) for key, item in value.items()}
    return [redact(item) for item in value] if isinstance(value, list) else value


def _new(root: Path, agent: str) -> RunDir:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", agent.rpartition(":")[2]).strip("-.") or "agent"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        path = root / f"{stem}{suffix}"
        try:
            path.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"output directory {path} cannot be made: {error.strerror}; choose another with --output-dir"
            ) from error
        return RunDir(path=path)
    raise ConfigError(f"{root} holds 999 runs of this second already; choose an output directory")


def _read(config: Path, *, overwrite: bool) -> dict[str, Any]:
    try:
        settings = json.loads(config.read_bytes())
        if isinstance(settings, dict):
            return settings
    except ValueError:
        pass
    if overwrite:
        return {}
    raise ConfigError(
        f"{config} is not a JSON object, so the run in this directory is unknown; choose another directory or overwrite it"
    )


def _clear(run: RunDir) -> None:
    for path in run.reports:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write(run: RunDir, settings: dict[str, Any], *, clear: bool = False) -> RunDir:
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        if clear:
            _clear(run)
        write_json(run.config, settings)
    except OSError as error:
        raise ConfigError(
            f"output directory {run.path} cannot be written: {error.strerror}; choose another with --output-dir"
        ) from error
    return run
