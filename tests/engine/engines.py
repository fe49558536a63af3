"""The embedded engine's thread without HTTP, and requests that report their end."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_slime.engine.requests import Request, Sampling

if TYPE_CHECKING:
    from agl_slime.engine.engine import Engine


def load_model(directory: Path) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")


@contextmanager
def running_engine(policy: Path, **limits: Any) -> Iterator[Engine]:
    import transformers

    from agl_slime.engine.engine import Engine

    engine = Engine(load_model(policy), transformers.AutoTokenizer.from_pretrained(policy), **limits)
    try:
        yield engine
    finally:
        engine.close()


class Requests:
    """Submits requests to an engine; ``ended`` has them in the order in which they end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ended: queue.Queue[Request] = queue.Queue()

    def make(self, rid: str, ids: list[int] | None = None, *, score_from: int = -1, **sampling: Any) -> Request:
        return Request(
            rid=rid,
            input_ids=ids or [5, 6, 7],
            sampling=Sampling(**{"ignore_eos": True} | sampling),
            logprob_start_len=score_from,
            on_finish=self.ended.put,
        )

    def submit(self, rid: str, ids: list[int] | None = None, **options: Any) -> None:
        self.engine.submit(self.make(rid, ids, **options))

    def next(self) -> Request:
        return self.ended.get(timeout=60)

    def run(self, *prompts: list[int], **options: Any) -> list[Request]:
        """The requests of greedy prompts, submitted together, when all have ended."""
        options = {"max_new_tokens": 5, "temperature": 0} | options
        requests = [self.make(str(number), prompt, **options) for number, prompt in enumerate(prompts)]
        self.engine.submit(*requests)
        for _ in requests:
            self.next()
        return requests
