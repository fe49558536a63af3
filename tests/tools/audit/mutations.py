"""Changes to the files of a run that an audit has to find.

``damage`` changes bytes as a disk, an editor or a bug does; ``lose`` removes whole files; ``lie`` writes false records
with right checksums. A lie contradicts another file or another line.
Figures without a second source are not drawn, for no reader can check them: seconds, losses and other metrics of the
trainer and of validations, texts, tools and tasks, forks and prompts of turns; ids of validation rollouts and of
rollouts that a restart has cut off, which stand in the ledger alone; the id of a group of which no rollout is kept; the
tokens of a cancelled straggler, which no metric counts; the ledger's numbers of untrained ends, for any number between
its neighbours' says the same; the order of groups within one iteration.
"""

import base64
import json
import random
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from agl_slime.tools.audit.figures import STRAGGLERS

JSONL = ("metrics.jsonl", "trained.jsonl", "groups.jsonl", "rollouts.jsonl")
_SUMMED = "count failed groups_ready groups_dropped tokens_sampled tokens_under_mask reward_mean reward_max turns_mean"
_SUMMED += " response_tokens_mean response_tokens_mean_trained cancelled_stragglers groups_zero_variance staleness_max"
_SEALS = "agl_slime_checksums.json"


def damage(run: Path, rng: random.Random) -> tuple[Path, str]:
    """Change bytes of one file; returns the file and the change."""
    files = [run / name for name in JSONL]
    if rng.random() < 0.25:
        files = sorted(path for path in (run / "checkpoints").rglob("*") if path.is_file() and path.name != _SEALS)
    path = rng.choice([file for file in files if file.stat().st_size])
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    number, kind = rng.randrange(len(lines)), rng.choice(("byte", "digit", "less", "twice", "moved", "cut"))
    if kind == "moved" and len(lines) > 1:
        second = rng.choice([n for n in range(len(lines)) if n != number])
        lines[number], lines[second] = lines[second], lines[number]
    elif kind == "less":
        del lines[number]
    elif kind == "twice":
        lines.insert(rng.randrange(len(lines) + 1), lines[number])
    elif kind == "cut":
        lines[number] = lines[number][: rng.randrange(len(lines[number]))]
    else:
        digits = [n for n, byte in enumerate(content) if chr(byte).isdigit()] if kind == "digit" else ()
        place = rng.choice(digits or range(len(content)))
        new = rng.choice([n for n in (b"0123456789" if kind == "digit" else range(256)) if n != content[place]])
        lines = [content[:place], bytes([new]), content[place + 1 :]]
    path.write_bytes(b"".join(lines))
    return path, f"{kind} in line {number + 1}"


LOSSES = ("ledger", "empty ledger", "trained", "groups", "metrics", "rollouts", "newest checkpoint", "older checkpoint")
LOSSES += ("model", "weights of the model", "iteration of the model", "best model's validation")
LOSSES += tuple(f"garbage after {name}" for name in JSONL)


def lose(run: Path, loss: str) -> None:
    """Remove one of ``LOSSES`` from a finished run, or put something in its place."""
    if loss in ("ledger", "empty ledger"):
        for suffix in ("", "-wal", "-shm"):
            (run / f"ledger.sqlite{suffix}").unlink(missing_ok=True)
        if loss == "empty ledger":
            (run / "ledger.sqlite").touch()
    elif loss.startswith("garbage after "):
        with (run / loss.removeprefix("garbage after ")).open("ab") as file:
            file.write(b'{"iteration": 9, "rollouts"')
    elif loss.endswith("checkpoint"):
        steps = sorted((run / "checkpoints").glob("step_*"))
        shutil.rmtree(steps[-1 if loss.startswith("newest") else -2])
    elif loss == "model":
        shutil.rmtree(run / "model")
    elif loss == "weights of the model":
        path = run / "model" / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.unlink()  # its content is a checkpoint's, too
        path.write_bytes(content)
    elif loss in ("iteration of the model", "best model's validation"):
        path = run / ("model" if loss.endswith("the model") else "model-best") / "agl_slime_model.json"
        about = json.loads(path.read_text())
        about.update({"iteration": 1} if loss.endswith("the model") else {"validation": 0.987})
        path.write_text(json.dumps(about))
    else:
        (run / f"{loss}.jsonl").unlink()


def lie(run: Path, rng: random.Random) -> tuple[Path, str]:
    """Change the records of one file, as if they had been written so; returns the file and the change."""
    name = rng.choice((*JSONL, "ledger.sqlite", "loop.json"))
    path = run / name
    if name == "ledger.sqlite":
        return path, _ledger(path, rng)
    if name == "loop.json":
        path = rng.choice(sorted((run / "checkpoints").glob("step_*")))
        return path / name, _loop(path, rng)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    number = rng.randrange(len(records))
    kind = rng.choice(("less", "twice", "field", "field", "field", "field"))
    if kind == "less":
        del records[number]
    elif kind == "twice":
        records.insert(number, records[number])
    else:
        change = {JSONL[0]: _metrics, JSONL[1]: _trained, JSONL[2]: _groups, JSONL[3]: _rollouts}[name]
        kind = change(records[number], rng)
    write_records(path, records)
    return path, f"line {number + 1} {kind}"


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    """Write lines with right checksums."""
    crc, text = 0, b""
    for record in records:
        body = json.dumps({key: value for key, value in record.items() if key != "crc"}, ensure_ascii=False).encode()
        crc = zlib.crc32(body[:-1], crc)
        text += body[:-1] + b', "crc": %d}\n' % crc
    path.write_bytes(text)


def _metrics(row: dict[str, Any], rng: random.Random) -> str:
    names = [name for name in (f"rollout/{name}" for name in _SUMMED.split()) if row.get(name) is not None]
    names += [name for name in row if name.startswith(("rollout/failed/", "rollout/dropped/", "train/tokens_trained"))]
    name = rng.choice([*names, "weights/version", "iteration"])
    row[name] = str(int(row[name]) + 1) if isinstance(row[name], str) else row[name] + rng.choice((-1, 1, 0.25, 7))
    return name


def _trained(line: dict[str, Any], rng: random.Random) -> str:
    name, sample = rng.choice(sorted(line["rollouts"])), rng.choice(line["samples"])
    changes: dict[str, Callable[[], Any]] = {
        "rollout": lambda: line["rollouts"].update({name[:-1] + "x": line["rollouts"].pop(name)}),
        "reward": lambda: line["rollouts"].update({name: line["rollouts"][name] + rng.choice((1, -1e-3))}),
        "task": lambda: line.update(instance_id=str(int(line["instance_id"]) + rng.choice((1, 1000)))),
        "iteration": lambda: line.update(iteration=line["iteration"] + rng.choice((-1, 1))),
        "sample's rollout": lambda: sample.__setitem__(0, "ro-x"),
        "digest": lambda: sample.__setitem__(1, "0" * 16),
        "tokens": lambda: sample.__setitem__(2, sample[2] + rng.choice((-1, 1))),
        "versions": lambda: sample.__setitem__(3, {str(int(v) + rng.choice((1, 99))): n for v, n in sample[3].items()}),
        "sample twice": lambda: line["samples"].append(sample),
        "sample less": lambda: line["samples"].remove(sample),
    }
    return _one_of(changes, rng)


def _groups(line: dict[str, Any], rng: random.Random) -> str:
    place = rng.randrange(len(line["rollouts"]))
    sealed = line["sealed"][place]

    def put(name: str, value: Any) -> Callable[[], Any]:
        return lambda: line[name].__setitem__(place, value)

    changes: dict[str, Callable[[], Any]] = {
        "rollout": put("rollouts", "ro-x"),
        "reward": put("rewards", rng.choice((None, 0.5)) if line["rewards"][place] is not None else 1.0),
        "outcome": put(
            "outcomes", rng.choice([o for o in ("trained", "failed", "stale") if o != line["outcomes"][place]])
        ),
        "reason": put("reasons", "" if line["reasons"][place] else "no_reward"),
        "turns": put("turns", line["turns"][place] + 1),
        "samples": put("samples", line["samples"][place] + 1),
        "member less": lambda: [
            line[name].pop(place) for name in ("rollouts", "rewards", "outcomes", "reasons", "tokens")
        ],
        "task": lambda: line.update(instance_id=str(int(line["instance_id"]) + rng.choice((1, 1000)))),
        "collected": lambda: line.update(collected=line["collected"] + rng.choice((-1, 1))),
        "iteration": lambda: line.update(iteration=line["iteration"] + rng.choice((-1, 1, 30))),
        "ready": lambda: line.update(ready=not line["ready"]),
        "code": lambda: line.update(code="" if line["code"] else "zero_variance"),
        "versions": lambda: line.update(weight_versions=["99", *line["weight_versions"]]),
        "kept": lambda: line.update(kept=line["kept"][1:] if line["kept"] else [line["rollouts"][place]]),
    }
    if line["reasons"][place] not in STRAGGLERS:
        changes["tokens"] = put("tokens", line["tokens"][place] + rng.choice((-1, 1, 50)))
    if sealed and line["outcomes"][place] == "trained":
        changes["digest"] = lambda: sealed[0].__setitem__(0, "0" * 16)
        changes["sealed tokens"] = lambda: sealed[0].__setitem__(1, sealed[0][1] - 1)
        changes["sealed versions"] = lambda: sealed[0].__setitem__(2, {"99": sealed[0][1]})
        changes["version less"] = lambda: line.update(weight_versions=[])
    if line["kept"]:
        changes["group"] = lambda: line.update(group_id="x")
    return _one_of(changes, rng)


def _rollouts(line: dict[str, Any], rng: random.Random) -> str:
    changes: dict[str, Callable[[], Any]] = {
        "rollout": lambda: line.update(rollout_id="ro-x"),
        "reward": lambda: line.update(reward=0.123),
        "tokens": lambda: line.update(tokens=line["tokens"] + rng.choice((-1, 1))),
        "outcome": lambda: line.update(outcome="stale"),
        "reason": lambda: line.update(reason="" if line["reason"] else "no_reward"),
        "task": lambda: line.update(instance_id=str(int(line["instance_id"]) + 1)),
        "group": lambda: line.update(group_id="x"),
        "iteration": lambda: line.update(iteration=line["iteration"] + rng.choice((-1, 1))),
        "collected": lambda: line.update(collected=line["collected"] + rng.choice((-1, 1))),
    }
    if line["samples"]:
        sample = rng.choice(line["samples"])
        first = sample["trained"][0]
        changes |= {
            "id": lambda: _packed(sample, "tokens", "<i4", rng),
            "log-prob": lambda: _packed(sample, "engine_log_probs", "<f4", rng, among=range(first[0], first[1])),
            "mask": lambda: _moved(first, rng),
            "mask less": lambda: sample["trained"].pop(),
            "version": lambda: sample["weight_versions"][0].__setitem__(0, rng.choice(("98", "99"))),
            "version's span": lambda: sample["weight_versions"][0].__setitem__(1, sample["weight_versions"][0][2]),
            "piece": lambda: sample["pieces"].pop(),
            "prompt": lambda: sample.update(prompt_length=sample["prompt_length"] - 1),
            "sample less": lambda: line["samples"].remove(sample),
            "sample again": lambda: line["samples"].append(sample),
            "sample left out": lambda: line["left_out"].update(samples=1),
            "token left out": lambda: sample.update(left_out=3),
            "advantage outside of the mask": lambda: sample.update(advantages=_shifted(sample["advantages"])),
        }
        if line["rewards"]:
            changes["primary reward"] = lambda: line["rewards"].update(primary=0.123)
        if line["outcome"] == "trained":
            place = range(first[0], first[1])
            changes["trainer's log-prob"] = lambda: _packed(sample, "trainer_log_probs", "<f4", rng, among=place)
            changes["advantage"] = lambda: _packed(sample, "advantages", "<f4", rng, among=place)
        else:
            changes["trained after all"] = lambda: sample.update(trainer_log_probs=sample["engine_log_probs"])
        if line["turns"]:
            changes["turn less"] = lambda: line["turns"].pop()
            changes["turn"] = lambda: line["turns"][0].update(tokens=line["turns"][0]["tokens"] + 1)
    return _one_of(changes, rng)


def _one_of(changes: dict[str, Callable[[], Any]], rng: random.Random) -> str:
    name = rng.choice(sorted(changes))
    changes[name]()
    return name


def _moved(span: list[int], rng: random.Random) -> None:
    """Another begin or end; the span of an answer of one token ends at its begin + 1 already."""
    place, places = rng.choice((0, 1)), (span[0] + 1, span[0] + 2, 999)
    span[place] = rng.choice([each for each in places if each != span[place]])


def _packed(sample: dict[str, Any], name: str, kind: str, rng: random.Random, *, among: Any = None) -> None:
    values = np.frombuffer(base64.b64decode(sample[name]), kind).copy()
    place = rng.choice(among or range(len(values)))
    values[place] = values[place] + 1 if kind == "<i4" else values[place] - np.float32(0.5)
    sample[name] = base64.b64encode(values.tobytes()).decode()


def _shifted(text: str) -> str:
    values = np.frombuffer(base64.b64decode(text), "<f4")
    return base64.b64encode(np.append(values, np.float32(1)).tobytes()).decode()


def _loop(directory: Path, rng: random.Random) -> str:
    path = directory / "loop.json"
    state = json.loads(path.read_bytes())
    names = ["iteration"] + (["version", "reward_means"] if state["iteration"] else [])
    name = rng.choice(names)
    if name == "reward_means":
        state[name][rng.randrange(len(state[name]))] = 0.987
    else:
        state[name] = str(int(state[name]) + 1) if name == "version" else state[name] + 1
    path.write_text(json.dumps(state))
    sums = json.loads((directory / _SEALS).read_bytes())
    sums["loop.json"] = [path.stat().st_size, zlib.crc32(path.read_bytes())]
    (directory / _SEALS).write_text(json.dumps(sums))
    return name


def _ledger(path: Path, rng: random.Random) -> str:
    trained = "state = 2 AND rollout_id IN (SELECT rollout_id FROM ledger_rollouts WHERE outcome = 'trained')"
    steps = [int(step.name.removeprefix("step_")) for step in (path.parent / "checkpoints").glob("step_*")]
    statements = (
        f"UPDATE ledger_rollouts SET rollout_id = 'ro-x' WHERE {trained}",
        f"UPDATE ledger_rollouts SET instance_id = '999' WHERE {trained}",
        f"UPDATE ledger_rollouts SET closed_no = closed_no + 1 WHERE {trained}",
        "UPDATE ledger_rollouts SET outcome = 'stale' WHERE state = 2",
        "UPDATE ledger_rollouts SET reason = 'no_such' WHERE state = 2",
        "UPDATE ledger_rollouts SET state = 1 WHERE state = 2",
        "DELETE FROM ledger_rollouts WHERE state = 2",
        "UPDATE ledger_counts SET n = n + 1 WHERE kind <> 'closed_no'",
        "DELETE FROM ledger_counts WHERE n > 0 AND kind <> 'closed_no'",
        "UPDATE ledger_finished SET instance_id = instance_id + 1 WHERE 1",
        "DELETE FROM ledger_finished WHERE 1",
        f"DELETE FROM ledger_checkpoints WHERE step IN ({', '.join(map(str, steps))})",
    )
    statement = rng.choice(statements)
    table = statement.split()[2 if statement.startswith("DELETE") else 1]
    key = {"ledger_rollouts": "rollout_id", "ledger_finished": "no", "ledger_checkpoints": "step"}.get(table)
    condition = statement.partition(" WHERE ")[2]
    with sqlite3.connect(path) as connection:
        columns = key or "kind || '/' || reason"
        rows = connection.execute(f"SELECT {columns} FROM {table} WHERE {condition}").fetchall()
        connection.execute(f"{statement} AND {columns} = ?", rng.choice(sorted(rows)))
    connection.close()
    return statement
