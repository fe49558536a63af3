"""The pages of runs that really ran: the first command's, followed from its begin to its end, and one whose rollouts
fork and fail while weights change in the middle of answers."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_slime.report.files import iter_jsonl
from agl_slime.report.page import write_report
from tests.harness.browser import facts, heading, opened
from tests.harness.train_process import train

pytestmark = pytest.mark.browser
FORKING = Path(__file__).parents[1] / "programs" / "agents" / "forking_lookup.py"
LISTEN = """() => {
  const live = document.querySelector('#live');
  window.told = [live.textContent];
  new MutationObserver(() => told.push(live.textContent)).observe(live, { childList: true });
}"""


def kept_of(run: Path) -> dict[str, dict[str, Any]]:
    return {line["rollout_id"]: line for line in iter_jsonl(run / "rollouts.jsonl")}


def floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def check_facts(told: dict[str, str], sample: dict[str, Any], place: int) -> None:
    """What the page says of a trained token is what was recorded of it."""
    at = place - sample["prompt_length"]
    engine, trainer, advantage = (
        float(floats(sample[name])[at]) for name in ("engine_log_probs", "trainer_log_probs", "advantages")
    )
    (version,) = (version for version, start, end in sample["weight_versions"] if start <= at < end)
    assert told["mask"] == "1: trained"
    assert told["weight version"] == version
    figures = {"engine log-prob": engine, "trainer log-prob": trainer, "advantage": advantage}
    figures["difference"] = trainer - engine
    for name, value in figures.items():
        # the page shows at least three significant digits, which round by up to 0.5 %
        assert float(told[name]) == pytest.approx(value, rel=5.1e-3, abs=1e-9), name
    assert f"place {place})" in told["token"]


def hover_trained(page: Any, sample: dict[str, Any], at: int) -> None:
    """Point at the response's token number ``at``; its facts are those that were recorded."""
    place = sample["prompt_length"] + at
    page.hover(f"#k{place}")
    check_facts(facts(page), sample, place)


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
        assert len(set(grown) - {0}) >= 3, grown  # it grew while the run went on
        assert grown[-1] == 10
        assert process.end()[0] == 0, process.text
    kept = kept_of(run)
    opened(page, write_report([run]))
    page.locator("figure .u-over").first.click(position={"x": 5, "y": 40})
    heading(page, "Step 1")
    assert page.locator("tbody tr").count() == 16
    assert page.locator("svg .dot").count() == 64
    page.locator("a.member.trained.kept").first.click()
    heading(page, "Rollout")
    rollout = kept[page.inner_text("h1 code")]
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


@pytest.fixture(scope="module")
def forking_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("forking") / "run"
    overlap = ("--max-staleness", "2", "--weight-pause", "in_place", "--rollout-batch-size", "4")
    flags = ("--num-iterations", "6", "--eval-interval", "0", "--keep-rollouts", "all")
    with train("--output-dir", run, "--agent", f"{FORKING}:ForkingLookup", *overlap, *flags) as process:
        assert process.end(within_s=240)[0] == 0, process.text
    return run


def test_forks_are_shown_as_a_tree(page: Any, forking_run: Path) -> None:
    trained = [one for one in kept_of(forking_run).values() if one["outcome"] == "trained"]
    forked = [one for one in trained if {"branch", "edited_history"} <= {turn["fork"] for turn in one["turns"]}]
    opened(page, write_report([forking_run]))
    page.click("nav a[href^='#rollouts']")
    page.fill("#find", forked[0]["rollout_id"])
    page.click(".row.kept a")
    heading(page, forked[0]["rollout_id"])
    # it thought aloud; it called, which goes on to the answer and, from the edited call, to another one
    roots = page.locator(".tree > li:not(.branch)").all_inner_texts()
    assert [text.partition(":")[0] for text in roots] == ["call 1", "call 2"]
    assert "fork: branch" in roots[1]
    under = page.locator(".tree > .branch > ul > li").all_inner_texts()
    assert [text.partition(":")[0] for text in under] == ["call 3", "call 4"]
    assert "fork: edited_history" in under[1]
    assert page.locator("a.button:has-text('Sample')").count() == len(forked[0]["samples"]) == 3


def test_failed_rollout_shows_its_reason_and_turns(page: Any, forking_run: Path) -> None:
    failed = [one for one in kept_of(forking_run).values() if one["outcome"] == "failed"]
    opened(page, write_report([forking_run]))
    page.select_option("#jump0", str(failed[0]["iteration"]))
    page.click("text=Open step")
    heading(page, f"Step {failed[0]['iteration']}")
    page.click(f"a.member.failed[href$='{failed[0]['rollout_id']}']")
    heading(page, failed[0]["rollout_id"])
    said = page.inner_text("section[aria-label=Outcome]")
    assert "failed" in said
    assert "bad_reward: the judge is out of order" in said
    # what it had sampled by then
    assert failed[0]["tokens"] == sum(turn["tokens"] for turn in failed[0]["turns"]) > 160
    assert page.locator(".message").count() == len(failed[0]["messages"])


def test_answer_of_two_weight_versions_shows_both(page: Any, forking_run: Path) -> None:
    def changes(sample: dict[str, Any]) -> list[int]:
        """Where another version goes on in the middle of an answer."""
        begins = [start for _, start, _ in sample["weight_versions"]]
        return [at for at in begins if any(start < at < end for start, end in sample["turn_spans"])]

    trained = [one for one in kept_of(forking_run).values() if one["outcome"] == "trained"]
    found = [(one, i) for one in trained for i, sample in enumerate(one["samples"]) if changes(sample)]
    assert found, "no answer was going on when weights changed"
    rollout, i = found[0]
    sample = rollout["samples"][i]
    opened(page, write_report([forking_run]))
    page.click("nav a[href^='#rollouts']")
    page.fill("#find", rollout["rollout_id"])
    page.click(".row.kept a")
    page.click(f"a.button:has-text('Sample {i + 1}')")
    heading(page, "Tokens of")
    page.check("#tint-version")
    for at in changes(sample):
        hover_trained(page, sample, at - 1)
        before = facts(page)["weight version"]
        hover_trained(page, sample, at)
        assert int(facts(page)["weight version"]) > int(before)
        first, second = (f"#k{sample['prompt_length'] + place}" for place in (at - 1, at))
        assert page.locator(first).get_attribute("class") != page.locator(second).get_attribute("class")
    told = page.locator(".reading").locator("xpath=preceding-sibling::ul").inner_text()
    assert all(version in told for version, _, _ in sample["weight_versions"])
