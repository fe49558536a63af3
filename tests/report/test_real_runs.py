"""The page of a real run, the first command's, followed from its begin to its end."""

import re
from pathlib import Path
from typing import Any

import pytest

from agl_slime.report.files import iter_jsonl
from agl_slime.report.page import write_report
from tests.harness.browser import facts, heading, opened
from tests.harness.report_runs import floats
from tests.harness.train_process import train

pytestmark = pytest.mark.browser
LISTEN = """() => {
  const live = document.querySelector('#live');
  window.told = [live.textContent];
  new MutationObserver(() => told.push(live.textContent)).observe(live, { childList: true });
}"""


def kept_of(run: Path) -> dict[str, dict[str, Any]]:
    return {line["rollout_id"]: line for line in iter_jsonl(run / "rollouts.jsonl")}


def hover_trained(page: Any, sample: dict[str, Any], offset: int) -> None:
    """Point at a token of the response; its facts equal the recorded ones."""
    place = sample["prompt_length"] + offset
    page.hover(f"#k{place}")
    details = facts(page)
    engine, trainer, advantage = (
        float(floats(sample[name])[offset]) for name in ("engine_log_probs", "trainer_log_probs", "advantages")
    )
    (version,) = (version for version, start, end in sample["weight_versions"] if start <= offset < end)
    assert details["mask"] == "1: trained"
    assert details["weight version"] == version
    figures = {"engine log-prob": engine, "trainer log-prob": trainer, "advantage": advantage}
    figures["difference"] = trainer - engine
    for name, value in figures.items():
        # the page shows at least three significant digits, which round by up to 0.5 %
        assert float(details[name]) == pytest.approx(value, rel=5.1e-3, abs=1e-9), name
    assert f"place {place})" in details["token"]


def test_the_first_command_is_followed_and_read_to_its_tokens(page: Any, tmp_path: Path) -> None:
    run = tmp_path / "first"
    # with one minibatch every token is first seen by the weights that sampled it
    flags = ("--num-iterations", "10", "--local.n-minibatches", "1")
    with train("--output-dir", run, *flags, "--view", "web") as process:
        process.until("the run is at ")
        (url,) = [line.rpartition(" ")[2] for line in process.lines if line.startswith("the run is at ")]
        page.goto(url)
        heading(page, "Trend")
        assert "running" in page.inner_text("#runs")
        page.evaluate(LISTEN)
        page.wait_for_function("() => document.querySelector('#runs').textContent.includes('finished')")
        grown = [int(n) for text in page.evaluate("told") for n in re.findall(r"Live: iteration (\d+)", text)]
        page.goto("about:blank")
        assert grown == sorted(grown)
        assert len(set(grown) - {0}) >= 3, grown  # it grew during the run
        assert grown[-1] == 10
        assert process.end()[0] == 0, process.text
    rollouts = kept_of(run)
    opened(page, write_report([run]))
    page.locator("figure .u-over").first.click(position={"x": 5, "y": 40})
    heading(page, "Step 1")
    assert page.locator("tbody tr").count() == 16
    assert page.locator("svg .dot").count() == 64
    page.locator("a.member.trained.kept").first.click()
    heading(page, "Rollout")
    rollout = rollouts[page.inner_text("h1 code")]
    assert page.locator(".message").count() == len(rollout["messages"])
    assert "model" in page.inner_text(".timeline + .legend")
    page.click("text=show every token")
    heading(page, "Tokens of")
    (sample,) = rollout["samples"]
    for start, end in sample["trained"]:
        hover_trained(page, sample, start)
        hover_trained(page, sample, end - 1)
    assert abs(float(facts(page)["difference"])) < 1e-4
    page.hover("#k0")
    assert facts(page)["mask"] == "prompt: context"
