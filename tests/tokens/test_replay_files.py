"""Routed experts and nuclei in files of the run: equal Samples, checked references, no leftovers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.data.source import GroupSource
from agl_slime.engine.client.replay import Nucleus, RoutedExperts
from agl_slime.errors import TraceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.files import scratch_directory
from agl_slime.tokens import attributes as names
from agl_slime.tokens import replay as replay_files
from agl_slime.tokens.converter import convert_trajectory
from agl_slime.tokens.replay import FiledReplay, file_replay, remove_replay
from agl_slime.tokens.span_codec import TurnEncoder, decode_turns
from agl_slime.tokens.trajectory import Trajectory
from agl_slime.tokens.turn import Turn, with_replay
from agl_slime.types import sample_to_json
from tests.harness.datasource import QUICK, Listener
from tests.harness.examples import examples
from tests.harness.samples import encode
from tests.harness.stores import enqueue, finish
from tests.harness.waiting import until

FROM = "agl_slime.tokens.replay.FILED_FROM_BYTES"


def experts(start: int, count: int, *, most: int = 8, seed: int = 0) -> RoutedExperts:
    rng = np.random.default_rng([seed, start, count])
    return RoutedExperts(start, rng.integers(0, most, (count, 2, 3)).astype(np.uint8 if most < 256 else np.uint16))


def random_turns(rng: random.Random) -> list[Turn]:
    """A rollout that grows, forks and starts new contexts, with experts of any size, nuclei, or neither."""
    most, with_experts, with_nucleus = rng.choice((8, 300)), rng.random() < 0.8, rng.random() < 0.5
    turns: list[Turn] = []
    for number in range(rng.randint(1, 6)):
        index = rng.choice([None, *range(number)]) if number else None
        base = turns[index] if index is not None else None
        length = 0 if base is None else rng.choice((base.length, rng.randint(0, base.length)))
        prompt = [] if base is None else base.token_ids[:length].tolist()
        prompt += [rng.randrange(99) for _ in range(rng.randint(0 if prompt else 1, 40))]
        response = [rng.randrange(99) for _ in range(rng.randint(1, 40))]
        start = 0 if base is None else min(length, base.experts_end, len(prompt) - 1)
        counts = [rng.randint(1, 5) for _ in response]
        ids = np.array([rng.randrange(99) for _ in range(sum(counts))], dtype=np.int32)
        count = len(prompt) + len(response) - 1 - start
        turns.append(
            Turn(
                prompt_ids=prompt,
                response_ids=response,
                log_probs=[-1.0] * len(response),
                base_turn=index,
                kept_tokens=length,
                experts=experts(start, count, most=most) if with_experts else None,
                nucleus=Nucleus(ids, np.cumsum([0, *counts]).astype(np.int32)) if with_nucleus else None,
            )
        )
    return turns


def filed(turn: Turn, directory: Path, rollout_id: str) -> Turn:
    """As a session writes it."""
    place = file_replay(str(directory), rollout_id, "00000001", turn.experts, turn.nucleus)
    return turn if place is None else replace(turn, experts=None, nucleus=None, filed=place)


def samples_of(turns: list[Turn], directory: Path | None = None) -> list[Any]:
    read = decode_turns(encode(turns))
    made = Trajectory(rollout_id="a", attempt_id="1", task={}, turns=tuple(read), reward=1.0)
    return [sample_to_json(sample) for sample in convert_trajectory(made, replay_files=directory).samples]


@given(seed=st.integers(0, 2**32), limit=st.sampled_from((1, 200, 600)), name=st.text(max_size=20))
@settings(max_examples=examples(60), deadline=None)
def test_samples_are_the_same_by_file_and_by_span(
    seed: int, limit: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    turns = random_turns(random.Random(seed))
    directory = tmp_path_factory.mktemp("replay")
    rollout_id = f"ro-{name}".encode(errors="replace").decode()
    with patch(FROM, limit):
        written = [filed(turn, directory, rollout_id) for turn in turns]
    for turn, stored in zip(turns, written, strict=True):
        sizes = [turn.experts.rows.nbytes] if turn.experts is not None else []
        if turn.nucleus is not None:
            sizes += [turn.nucleus.ids.nbytes, turn.nucleus.offsets.nbytes]
        assert (stored.filed is not None) == (sum(sizes) >= limit)
        assert with_replay(stored, directory) == turn
    assert samples_of(written, directory) == samples_of(turns)
    remove_replay(directory, [rollout_id])
    assert [*directory.iterdir()] == []


def test_small_experts_or_no_directory_leave_all_in_the_span(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert replay_files.FILED_FROM_BYTES == 256 * 1024
    large = experts(0, 60_000)
    assert file_replay(str(tmp_path / "elsewhere"), "ro-1", "s", large, None) is None
    assert file_replay(str(tmp_path), "ro-1", "s", experts(0, 60), None) is None  # small
    assert file_replay(str(tmp_path), "", "s", large, None) is None  # a session of no rollout
    assert [*tmp_path.iterdir()] == []
    place = file_replay(str(tmp_path), "ro-1", "s", large, None)
    assert place is not None
    assert place.length == large.rows.nbytes
    (tmp_path / "ro-2").write_text("a file in the place of the rollout's directory, as on a full disk")
    assert file_replay(str(tmp_path), "ro-2", "s", large, None) is None
    assert "stay in spans" in caplog.text


def test_branches_that_write_at_once_have_their_own_places(tmp_path: Path) -> None:
    parts = [experts(0, 50_000 + number, seed=number) for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        places = list(pool.map(lambda part: file_replay(str(tmp_path), "ro-1", "s", part, None), parts))
    for part, place in zip(parts, places, strict=True):
        assert place is not None
        assert place.read(tmp_path) == {"experts": part}


def filed_turn(directory: Path, rollout_id: str = "ro-1") -> Turn:
    with patch(FROM, 1):
        turn = Turn(prompt_ids=[1, 2], response_ids=[3, 4], log_probs=[-1.0, -1.0], experts=experts(0, 3))
        return filed(turn, directory, rollout_id)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


def _link(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b""), _flip, _link, _pipe])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, damage: Any) -> None:
    turn = filed_turn(tmp_path)
    with pytest.raises(TraceError, match="give replay_files"):  # never a Sample without experts
        samples_of([turn])
    damage(tmp_path / "ro-1" / "00000001")
    with pytest.raises(TraceError, match="routed experts") as raised:
        samples_of([turn], tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "bad",
    [
        *({"file": name} for name in ("../x", "/etc/passwd", "ro-1/../x", "ro-1/a/b", 3)),
        {"offset": -1},
        {"length": 10**18},
        {"length": True},
        *({"experts": sizes} for sizes in ((0, 10**6, 2, 3, 1), (0, 3, 2, 3, 5), None)),
        {"nucleus": (1, 1)},
    ],
    ids=str,
)
def test_a_span_cannot_name_another_file_nor_other_sizes(bad: dict[str, Any]) -> None:
    good: dict[str, Any] = {"file": "ro-1/s", "offset": 0, "length": 18, "checksum": 1, "experts": (0, 3, 2, 3, 1)}
    FiledReplay(**good)
    with pytest.raises(TraceError):
        FiledReplay(**{**good, **bad})


@pytest.mark.parametrize("text", ["", "3", "[1, 2, 3]", '["a/b", 0, 0, 0, 7, null]', '["a/b", 0, 0, 0, null, null, 1]'])
def test_a_damaged_reference_is_an_error_of_its_turn(text: str, tmp_path: Path) -> None:
    encoded = TurnEncoder().encode(filed_turn(tmp_path))
    encoded[names.REPLAY_FILE] = text
    with pytest.raises(TraceError, match="turn 0"):
        decode_turns([SimpleNamespace(attributes=encoded)])


async def _play(store: BridgeStore, directory: Path, *, lost: bool = False) -> str:
    """A rollout of one turn, whose experts are in a file."""
    [rollout_id] = await enqueue(store)
    turn = filed_turn(directory, rollout_id)
    if lost:
        (directory / rollout_id / "00000001").unlink()
    await finish(store, rollout_id, turns=[turn])
    return rollout_id


async def test_a_missing_file_fails_its_rollout_and_all_go_with_their_release(tmp_path: Path) -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK, replay_files=tmp_path) as source:
        listener = Listener(source)
        first, lost, last = [await _play(store, tmp_path, lost=number == 1) for number in range(3)]
        await listener.until(lambda: len(listener.members) == 3)
        members = {member.rollout_id: member for member in listener.members}
        for rollout_id in (first, last):
            assert members[rollout_id].ok
            assert np.array_equal(members[rollout_id].samples[0].rollout_routed_experts, experts(0, 3).rows)
        assert (members[lost].ok, members[lost].failure) == (False, "bad_trace")
        assert members[lost].trajectory is not None  # its turns are shown nevertheless
        await until(lambda: not [*tmp_path.glob("ro-*")])
    assert [*tmp_path.iterdir()] == []
    assert store.usage().released == 3


async def test_non_releasing_reader_waits_for_the_releasing_one(tmp_path: Path) -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=replace(QUICK, release=False), replay_files=tmp_path) as source:
        listener = Listener(source)
        first, second = [await _play(store, tmp_path) for _ in range(2)]
        await listener.until(lambda: len(listener.members) == 2)
        await store.release([first])
        await until(lambda: not (tmp_path / first).exists())
        assert (tmp_path / second / "00000001").exists()
        await store.release([second])
        await until(lambda: not (tmp_path / second).exists())


def test_killed_runs_replay_directory_is_removed_by_the_next(tmp_path: Path) -> None:
    program = f"""
        import os, signal
        from pathlib import Path
        import numpy as np
        from agl_slime.engine.client.replay import RoutedExperts
        from agl_slime.support.files import scratch_directory
        from agl_slime.tokens.replay import file_replay
        with scratch_directory(Path({str(tmp_path)!r}), "replay") as directory:
            rows = RoutedExperts(0, np.zeros((60_000, 2, 3), dtype=np.uint8))
            assert file_replay(str(directory), "ro-1", "s", rows, None)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len([*tmp_path.rglob("ro-1")]) == 1
    with scratch_directory(tmp_path, "replay") as directory:
        assert [*tmp_path.iterdir()] == [directory]
        assert file_replay(str(directory), "ro-2", "s", experts(0, 60_000), None) is not None
    assert [*tmp_path.iterdir()] == []
