"""What the benchmarks share: a scripted engine in a process of its own, the work that is executed, measurements of a
process, tables."""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rich.console import Console
from rich.table import Table

REPO = Path(__file__).resolve().parent.parent
if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))

console = Console(width=150 if not sys.stdout.isatty() else None)


# -- the scripted engine ---------------------------------------------------------------------------------------------


@contextmanager
def scripted_engine(
    *, latency_s: float, spread_s: float = 0.0, tokens: int = 32, slots: int | None = None, update_s: float = 0.0
) -> Iterator[str]:
    """The URL of a server that answers every ``/generate`` with ``tokens`` ids and log-probs after ``latency_s``, give
    or take half of ``spread_s``; ``slots`` requests at a time. New weights take it ``update_s``."""
    command = [sys.executable, str(REPO / "benchmarks" / "scripted_engine.py")]
    command += ["--latency", str(latency_s), "--spread", str(spread_s), "--tokens", str(tokens)]
    command += ["--update", str(update_s), *(("--slots", str(slots)) if slots is not None else ())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the scripted engine did not start (exit code {process.wait(10)})")
        yield line
    finally:
        process.terminate()
        process.wait(10)


# -- the work --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def tokenizer() -> Any:
    """A small real tokenizer with a chat template."""
    from agl_slime.tools.demo_policy.tokenizer import train_tokenizer

    texts = [
        f"question number {n}: what is {n} plus {n + 1}? answer with {2 * n + 1} and nothing else" for n in range(300)
    ]
    return train_tokenizer(texts, vocab_size=300)


def question_agent() -> Any:
    """An agent that asks once and rewards 1: an ordinary ``SGLangLitAgent``."""
    from benchmarks.work import QuestionAgent

    return QuestionAgent(tokenizer=tokenizer())


def question(number: int) -> str:
    return f"question number {number}: what is {number} plus {number + 1}?"


def requests(count: int, *, group_size: int = 1, resources_id: str | None = None) -> list[Any]:
    """Enqueue requests of training rollouts, ``group_size`` per prompt."""
    from agl_slime.support.agl import EnqueueRolloutRequest, RolloutConfig

    config = RolloutConfig(timeout_seconds=600)
    return [
        EnqueueRolloutRequest(
            input={"prompt": question(n // group_size)},
            mode="train",
            resources_id=resources_id,
            config=config,
            metadata={"group_id": f"group-{n // group_size}", "group_size": group_size},
        )
        for n in range(count)
    ]


def llm_resources(url: str, *, max_new_tokens: int = 64) -> dict[str, Any]:
    from agl_slime.support.agl import LLM

    return {
        "main_llm": LLM(
            endpoint=url, model="scripted", sampling_parameters={"temperature": 1.0, "max_new_tokens": max_new_tokens}
        )
    }


class Countdown:
    """An event that is set when something has happened ``count`` times; ``down`` from any thread."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self.zero = threading.Event()

    def down(self, *_: Any) -> None:
        with self._lock:
            self._left -= 1
            if self._left <= 0:
                self.zero.set()

    async def wait(self, timeout_s: float) -> None:
        if not await asyncio.to_thread(self.zero.wait, timeout_s):
            raise RuntimeError(f"{self._left} rollouts had not ended after {timeout_s:g} s")


# -- measurements ----------------------------------------------------------------------------------------------------


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except (FileNotFoundError, ProcessLookupError):
        return 0


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of another process; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Peak:
    """The highest resident memory of these processes together, while the block runs."""

    def __init__(self, pids: Sequence[int | str] = ("self",), *, every_s: float = 0.1) -> None:
        self.bytes = 0
        self._pids = pids
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, sum(resident_bytes(pid) for pid in self._pids))
            if self._stop.wait(self._every_s):
                return


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The least-squares slope of y over x."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


@dataclass
class Stopwatch:
    """Wall and CPU seconds of this process since it was made."""

    began: float = 0.0
    cpu_began: float = 0.0

    def __post_init__(self) -> None:
        self.began, self.cpu_began = time.monotonic(), time.process_time()

    @property
    def wall(self) -> float:
        return time.monotonic() - self.began

    @property
    def cpu(self) -> float:
        return time.process_time() - self.cpu_began


# -- tables ----------------------------------------------------------------------------------------------------------


def load() -> str:
    """The machine as it was when the figures were taken."""
    return f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, notes: Sequence[str] = ()
) -> None:
    table = Table(title=f"{title}\n{load()}", title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def quiet() -> None:
    """Log only errors of libraries: a line per rollout would dominate the measurement."""
    import logging

    logging.basicConfig(level=logging.ERROR, force=True)
    for name in ("agentlightning", "LiteLLM", "httpx", "aiohttp"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def settle_memory() -> None:
    """Collect garbage and return free heap pages, so that resident memory equals used memory."""
    import ctypes
    import gc

    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except OSError:
        return  # not glibc


# A rollout of the scripted engine never takes longer than this, whatever the load.
PATIENCE_S = 600.0
