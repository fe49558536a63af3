"""The pictures of docs/report.md: every level of a run's page, wide and narrow, light and dark.

    python scripts/report_screenshots.py RUN_DIR docs/images
    python scripts/report_screenshots.py RUN_DIR docs/images --front    # of the README

Needs `pip install "agl-slime[browser,local]"` and a Chromium. Rollout and tokens are of the rollout with the most
Samples and weight versions; the pictures have 128 colours, which makes them small.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path
from typing import Any

from agl_slime.report.files import iter_jsonl
from agl_slime.tools.pages.file import write_report

COLOURS = 128
FRONT = {"trend": ".charts > *", "tokens": ".reading"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--front", action="store_true")
    given = parser.parse_args()
    from PIL import Image
    from playwright.sync_api import sync_playwright

    from tests.harness.browser import launched

    def worth(sample: dict[str, Any]) -> tuple[int, int]:
        return len(sample["weight_versions"]), len(sample["pieces"])

    kept = [one for one in iter_jsonl(given.run / "rollouts.jsonl") if one["samples"] and one["outcome"] == "trained"]
    if given.front:  # one that earned its reward
        kept = [one for one in kept if one["reward"] == 1] or kept
    seen = max(kept, key=lambda one: (len(one["samples"]), max(map(worth, one["samples"]))))
    number = max(range(len(seen["samples"])), key=lambda i: worth(seen["samples"][i]))
    places = {"trend": "trend", "step": f"step/0/{seen['iteration']}", "rollouts": "rollouts/0", "alarms": "alarms/0"}
    places |= {"rollout": f"rollout/0/{seen['rollout_id']}", "tokens": f"token/0/{seen['rollout_id']}/{number}"}
    report = write_report([given.run], Path(tempfile.mkdtemp()) / "report.html")
    with sync_playwright() as driver:
        browser = launched(driver)
        for width, height in ((1280, 860),) if given.front else ((1280, 860), (390, 780)):
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(report.as_uri())
                parts: dict[str, Image.Image] = {}
                for name, place in places.items():
                    page.evaluate("place => (location.hash = place)", place)
                    page.wait_for_selector(f".of-{place.partition('/')[0]}")
                    if name == "tokens":
                        page.check("#tint-version")
                        page.hover(f"#k{seen['samples'][number]['prompt_length'] + 4}")
                    page.wait_for_timeout(300)  # until charts that have come into sight are drawn
                    parts[name] = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                    if given.front and name in FRONT:
                        boxes = [found.bounding_box() for found in page.locator(FRONT[name]).all()[:3]]
                        top = min(box["y"] for box in boxes if box) if name == "trend" else 55
                        bottom = max(box["y"] + box["height"] for box in boxes if box)
                        parts[name] = parts[name].crop((0, int(top) - 10, width, int(bottom) + 10))
                    if not given.front:
                        to = given.images / f"report-{name}-{width}-{scheme}.png"
                        parts[name].quantize(COLOURS).save(to, optimize=True)
                if given.front:
                    charts, tokens = parts["trend"], parts["tokens"]
                    whole = Image.new("RGB", (width, charts.height + tokens.height))
                    whole.paste(charts, (0, 0))
                    whole.paste(tokens, (0, charts.height))
                    whole.quantize(COLOURS).save(given.images / f"front-{scheme}.png", optimize=True)
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
