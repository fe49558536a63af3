"""Buffer and ledger under any order of writes, repetitions, late items, timeouts, reads, lost answers and restarts."""

import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from agl_slime.buffer.models import parse_items
from agl_slime.buffer.pipeline import GroupPipeline
from agl_slime.buffer.settings import PipelineSettings
from agl_slime.buffer.store import Batch, ItemStore
from agl_slime.data.results import Outcome
from agl_slime.errors import BufferRequestError
from agl_slime.support.database import Database
from tests.harness.examples import examples

TASK = "sums"
TIMEOUT_S = 300.0


class BufferMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(group_size=st.integers(1, 4), keep=st.sampled_from([0, 1, 100]))
    def begin(self, group_size: int, keep: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.group_size, self.keep = group_size, keep
        self.now = 1000.0
        self.accepted: dict[str, dict[str, Any]] = {}
        self.out: Counter[str] = Counter()  # uids that are with the reader
        self.groups_out: dict[str, list[str]] = {}  # by name, the uids of each group that is with the reader
        self.trained: set[str] = set()  # names of groups that the reader keeps for good
        self.answers: dict[str, Batch | None] = {}
        self.next_request = 0
        self.store = self._open()

    def _open(self) -> ItemStore:
        database = Database(path=Path(self.directory.name) / "buffer.sqlite", exclusive=True)
        store = ItemStore(database=database, keep_delivered=self.keep, clock=lambda: self.now)
        store.set_task(
            TASK, GroupPipeline(settings=PipelineSettings(group_size=self.group_size, reward_range=(0.0, 1.0)))
        )
        return store

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.directory.cleanup()

    # -- what may happen ----------------------------------------------------------------------------------------------

    @rule(
        entries=st.lists(
            st.tuples(
                st.integers(0, 30),
                st.integers(0, 2),
                st.sampled_from([-1.0, 0.0, 0.5, 1.0]),
                st.sampled_from([None, 0, 1]),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def write(self, entries: list[tuple[int, int, float, int | None]]) -> None:
        items = [
            {"uid": f"u{uid}", "instance_id": f"i{instance}", "messages": [], "reward": reward, "group_id": group_id}
            for uid, instance, reward, group_id in entries
        ]
        _, written = parse_items(orjson.dumps(items))
        (result,) = self.store.write([(TASK, written)])
        if isinstance(result, BufferRequestError):
            assert result.status == 409
            first_items = dict(self.accepted)
            conflicts = 0
            for item in items:
                conflicts += first_items.setdefault(item["uid"], item) != item
            assert conflicts
            return
        for item in items:
            if item["uid"] in self.accepted and self.store.ledger.is_open(f"{TASK}/{item['uid']}"):
                assert self.accepted[item["uid"]] == item  # an item that is held must not be taken for another
        fresh = {item["uid"]: item for item in items if item["uid"] not in self.accepted}
        assert result == len(fresh)
        self.accepted.update(fresh)

    @rule(seconds=st.sampled_from([1.0, 150.0, TIMEOUT_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=requests, max_groups=st.sampled_from([None, 1, 2]))
    def read(self, max_groups: int | None) -> str:
        request_id = f"r{self.next_request}"
        self.next_request += 1
        batch = self.store.read(TASK, max_groups=max_groups, request_id=request_id)
        if batch is not None:
            self._take(batch, max_groups)
            self.answers[request_id] = batch
        return request_id

    @rule(request_id=requests)
    def ask_again(self, request_id: str) -> None:
        """The answer was lost: the same request gets it again, unless the groups were confirmed or forgotten in
        between."""
        first = self.answers.get(request_id)
        if first is None:
            return
        names = {item["buffer_group"] for item in map(orjson.loads, first.items_json)}
        intact = {name for name in names if name in self.groups_out and name not in self.trained}
        if intact == names and len(self.groups_out) <= self.keep:
            assert self.store.read(TASK, request_id=request_id) == first

    @rule(request_id=consumes(requests))
    def acknowledge(self, request_id: str) -> None:
        first = self.answers.pop(request_id, None)
        self.store.acknowledge(TASK, [request_id])
        if first is not None:
            names = {item["buffer_group"] for item in map(orjson.loads, first.items_json)}
            self.trained |= names & self.groups_out.keys()

    @rule()
    def restart_buffer(self) -> None:
        self.store.close()
        self.store = self._open()

    @rule(data=st.data())
    def restart_trainer(self, data: st.DataObject) -> None:
        """The trainer remembers some of the groups that it was handed; the others go out again as far as the buffer
        still has them."""
        open_names = sorted(self.groups_out.keys() - self.trained)
        remembered = set(data.draw(st.sets(st.sampled_from(open_names)))) if open_names else set()
        old_counts = self.store.ledger.counts()
        lost = self.store.resume(TASK, [], trained_groups=remembered | self.trained)
        if self.keep == 100:
            assert lost == len(open_names) - len(remembered)
        assert self.store.ledger.counts().ready == 0
        assert self.store.ledger.counts().opened == old_counts.opened
        self.trained |= remembered
        self.answers.clear()
        gone = [name for name in open_names if name not in remembered]
        for name in gone:
            uids = self.groups_out.pop(name)
            if any(self.store.ledger.is_open(f"{TASK}/{uid}") for uid in uids):
                self.out.subtract(uids)  # they may come out once more
            else:
                self.trained.add(name)  # beyond the window: counted as trained
                self.groups_out[name] = uids

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _take(self, batch: Batch, max_groups: int | None) -> None:
        data = [*map(orjson.loads, batch.items_json)]
        assert data
        assert len(data) % self.group_size == 0
        assert max_groups is None or len(data) <= max_groups * self.group_size
        assert {item["instance_id"] for item in data} <= set(batch.meta_info["finished_groups"])
        for start in range(0, len(data), self.group_size):
            group = data[start : start + self.group_size]
            assert len({item["instance_id"] for item in group}) == 1
            assert len({item["uid"] for item in group}) == self.group_size
            assert math.isclose(math.fsum(item["reward"] for item in group), 0.0, abs_tol=1e-6)
            unpadded = [item for item in group if "padding_of" not in item]
            assert {item["padding_of"] for item in group if "padding_of" in item} <= {item["uid"] for item in unpadded}
            for item in unpadded:
                self.out[item["uid"]] += 1
                assert self.out[item["uid"]] == 1, f"{item['uid']} came out twice"
                assert self.accepted[item["uid"]]["reward"] == item["raw_reward"]
                assert 0 <= item["raw_reward"] <= 1
            self.groups_out[group[0]["buffer_group"]] = [item["uid"] for item in unpadded]

    @invariant()
    def every_item_is_accounted_for(self) -> None:
        if not hasattr(self, "store"):
            return
        counts = self.store.ledger.counts()
        assert counts.opened == len(self.accepted)
        assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())
        with_reader = sum(1 for n in self.out.values() if n > 0)
        assert counts.ready + counts.closed.get(Outcome.TRAINED, 0) == with_reader
        undecided = self.store.undecided(TASK)
        assert self.store.held_items == sum(group.count for group in undecided)
        assert counts.open <= self.store.held_items
        for uid in self.accepted:
            if self.store.ledger.is_open(f"{TASK}/{uid}"):
                assert self.out[uid] == 0


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
