"""``--max-concurrent auto`` beside fixed numbers, on a simulated engine whose speed changes by five and back.

    python -m benchmarks.auto_concurrency [--tools-s 2.0] [--slots 128]

Each of three minutes has another speed; the rate is measured in its second half, beside the best fixed number of that
minute. Times are simulated: the load of the machine changes nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from agl_slime.loop.auto_concurrency import AutoLimit
from tests.harness.engine_model import EngineModel
from tests.loop.test_auto_limit import rates

FIXED = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--tools-s", type=float, default=2.0)
    given = parser.parse_args()

    def engine() -> EngineModel:
        slots = given.slots
        return EngineModel(slots=slots, capacity=30.0 * slots, queue=5 * slots, tools_s=given.tools_s)

    found: dict[str, tuple[list[float], EngineModel]] = {}
    for limit in FIXED:
        model = engine()
        found[str(limit)] = rates(model, replace(AutoLimit(), limit=limit), fixed=True), model
    model = engine()
    found["auto"] = rates(model, AutoLimit()), model
    best = [max(rate) for rate in zip(*(rate for name, (rate, _) in found.items() if name != "auto"), strict=True)]
    print("| in flight | share of the best fixed number: slow | fast | slow again | calls refused |")
    print("|---|---|---|---|---|")
    for name, (rate, model) in found.items():
        shares = " | ".join(f"{one / most:.0%}" for one, most in zip(rate, best, strict=True))
        print(f"| {name} | {shares} | {model.refused / model.n_requests:.1%} |")


if __name__ == "__main__":
    main()
