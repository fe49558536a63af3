"""Coverage and width of 95 % intervals of a mean: the package's, and the percentile bootstrap over tasks.

    python -m benchmarks.intervals [--tables 400]

For rewards of 0 and 1 the coverage is exact: the probability of all outcomes whose interval has the mean, the least
over p from 0.02 to 0.98. For repeats of a task (means of k rewards of 0 and 1, whose probability differs from task to
task by a beta distribution), for pass@4 of 8 such rewards and for paired differences it is the share of ``--tables``
draws, with a standard error of about 1 / sqrt(20 * tables).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

import numpy as np

from agl_slime.support.intervals import estimate
from agl_slime.tools.evaluation.statistics import pass_at_k

Interval = Callable[[Sequence[float], bool], tuple[float, float]]
SIZES = (16, 32, 64, 256)
SHARES = (0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98)
RNG = np.random.default_rng(0)


def ours(values: Sequence[float], differences: bool) -> tuple[float, float]:
    result = estimate(values, differences=differences)
    assert result is not None
    assert result.low is not None
    assert result.high is not None
    return result.low, result.high


def bootstrap(values: Sequence[float], differences: bool) -> tuple[float, float]:
    data = np.asarray(values)
    means = data[RNG.integers(0, len(data), (1000, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low) - 1e-12, float(high) + 1e-12


def exact(interval: Interval, n: int) -> Iterator[tuple[float, float]]:
    """Coverage and mean width for each p."""
    ends = [interval([1.0] * count + [0.0] * (n - count), False) for count in range(n + 1)]
    for p in SHARES:
        chances = [math.comb(n, count) * p**count * (1 - p) ** (n - count) for count in range(n + 1)]
        pairs = list(zip(chances, ends, strict=True))
        yield (
            sum(chance for chance, (low, high) in pairs if low <= p <= high),
            sum(chance * (high - low) for chance, (low, high) in pairs),
        )


def drawn(
    interval: Interval, draw: Callable[[], Sequence[float]], mean: float, tables: int, *, differences: bool = False
) -> tuple[float, float]:
    ends = [interval(draw(), differences) for _ in range(tables)]
    return fmean(low <= mean <= high for low, high in ends), fmean(high - low for low, high in ends)


def repeats(interval: Interval, n: int, tables: int) -> Iterator[tuple[float, float]]:
    for mean in (0.02, 0.05, 0.2, 0.5, 0.9, 0.98):
        for spread in (0.2, 1.0, 10.0, 1000.0):
            for k in (4, 16):
                a, b = mean * spread, (1 - mean) * spread
                yield drawn(interval, lambda a=a, b=b, k=k: list(RNG.binomial(k, RNG.beta(a, b, n)) / k), mean, tables)


def pass_rates(interval: Interval, n: int, tables: int) -> Iterator[tuple[float, float]]:
    rates = np.array([pass_at_k(samples=8, passed=passed, k=4) for passed in range(9)])
    for mean in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9):
        for spread in (0.2, 1.0, 10.0, 1000.0):

            def draw(size: int, a: float = mean * spread, b: float = (1 - mean) * spread) -> np.ndarray:
                return rates[RNG.binomial(8, RNG.beta(a, b, size))]

            yield drawn(interval, lambda draw=draw: draw(n).tolist(), float(draw(1_000_000).mean()), tables)


def paired(interval: Interval, n: int, tables: int) -> Iterator[tuple[float, float]]:
    for gained, lost in ((0.02, 0.0), (0.05, 0.0), (0.1, 0.02), (0.3, 0.1), (0.1, 0.1), (0.5, 0.0)):
        chances = [gained, lost, 1 - gained - lost]
        yield drawn(
            interval,
            lambda chances=chances: list(RNG.choice([1.0, -1.0, 0.0], n, p=chances)),
            gained - lost,
            tables,
            differences=True,
        )


def cell(pairs: Iterable[tuple[float, float]]) -> str:
    coverage, widths = zip(*pairs, strict=True)
    return f"{min(coverage):.3f}, {fmean(coverage):.3f}, {fmean(widths):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=int, default=400, help="draws for each row of repeats and differences")
    tables = parser.parse_args().tables
    print("| tasks | rewards | this package: least and mean coverage, width | bootstrap |\n|---|---|---|---|")
    for n in SIZES:
        for name, rows in (
            ("0 and 1", lambda interval, n=n: exact(interval, n)),
            ("repeats", lambda interval, n=n: repeats(interval, n, tables)),
            ("pass@4 of 8", lambda interval, n=n: pass_rates(interval, n, tables)),
            ("differences", lambda interval, n=n: paired(interval, n, tables)),
        ):
            print(f"| {n} | {name} | {cell(rows(ours))} | {cell(rows(bootstrap))} |", flush=True)


if __name__ == "__main__":
    main()
