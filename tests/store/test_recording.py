"""A recording under any order of adding, writing, failing and closing: every added span is written once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agl_slime.store.recording import Recording
from agl_slime.support.agl import Span

steps = st.lists(st.sampled_from(["add", "write", "fail", "both"]), max_size=40)


class Store:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.next = 0
        self.fails = 0

    async def get_many_span_sequence_ids(self, keys: Sequence[tuple[str, str]]) -> list[int]:
        await asyncio.sleep(0)
        first, self.next = self.next + 1, self.next + len(keys)
        return list(range(first, self.next + 1))

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            raise ConnectionError("away")
        self.spans.extend(spans)
        return spans


@given(steps)
def test_spans_are_written_once_and_in_order(sequence: list[str]) -> None:
    async def run() -> None:
        store: Any = Store()
        recording = Recording("ro", "at", store=store)
        added = 0

        def add() -> None:
            nonlocal added
            number = added
            added += 1
            assert recording.add(partial(Span.from_attributes, name=str(number), attributes={}))

        for step in sequence:
            if step == "add":
                add()
            elif step == "write":
                await recording.write()
            elif step == "both":  # two writers at once, and a span between them
                writers = [asyncio.ensure_future(recording.write()) for _ in range(2)]
                await asyncio.sleep(0)
                add()
                await asyncio.gather(*writers)
            else:
                store.fails = 1
                await asyncio.gather(recording.write(), return_exceptions=True)
                store.fails = 0
        await recording.write(close=True)
        assert [int(span.name) for span in store.spans] == list(range(added))
        assert [span.sequence_id for span in store.spans] == sorted(span.sequence_id for span in store.spans)
        assert recording.written == store.spans
        assert not recording.add(partial(Span.from_attributes, attributes={}))

    asyncio.run(run())
