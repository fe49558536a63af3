"""The run's report in a real browser: by clicks, by keys, live, with hostile texts, and with a large run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agl_slime.report.files import iter_jsonl
from agl_slime.tools.pages.file import write_report
from agl_slime.tools.slime_dumps.runs import SlimeRuns
from tests.harness.browser import facts, heading, opened, served
from tests.harness.report_runs import EMOJI, HOSTILE, AWriter, floats, write_run
from tests.harness.train_process import train
from tests.tools.slime_dumps.test_slime_dumps import write_dumps

pytestmark = pytest.mark.browser


def test_the_four_levels_by_clicks(page: Any, tmp_path: Path) -> None:
    opened(page, write_report([write_run(tmp_path)]))
    assert page.locator("figure canvas").count() >= 2
    page.locator("figure .u-over").first.click(position={"x": 5, "y": 40})  # the first iteration of the reward
    heading(page, "Step 1")
    assert page.locator("tbody tr").count() == 3
    assert "all rewards are the same" in page.inner_text("table")
    assert page.locator("svg .dot").count() == 10
    page.click("a.member:has-text('timeout')")
    heading(page, "Rollout ro-1-4")
    assert "took longer than 600 s" in page.inner_text("main")
    page.click("text=step 1")
    page.click("a[href='#rollout/0/ro-1-2']")
    heading(page, "Rollout ro-1-2")
    assert "fork: edited_history" in page.inner_text(".tree")
    assert page.locator(".message").count() == 3  # of the conversation that was continued last
    assert "model" in page.inner_text(".timeline + .legend")
    page.click("text=Sample 1")
    heading(page, "Tokens of ro-1-2")
    page.hover("#k3")
    details = facts(page)
    assert details["token"].startswith('"c"')
    assert details["mask"] == "1: trained"
    assert details["engine log-prob"] == "-0.3"
    assert details["advantage"] == "0.5"
    assert details["weight version"] == "1"
    difference = float(details["trainer log-prob"]) - float(details["engine log-prob"])
    assert float(details["difference"]) == pytest.approx(difference, abs=1e-4)
    page.hover("#k0")
    assert facts(page)["mask"] == "prompt: context"
    page.hover("#k14")
    assert facts(page)["weight version"] == "2"
    for name in ("difference", "engine", "advantage", "version"):
        earlier = page.locator("#k3").get_attribute("class")
        page.check(f"#tint-{name}")
        assert page.locator("#k3").get_attribute("class") != earlier
        assert page.locator("#k0").get_attribute("class") != page.locator("#k3").get_attribute("class")


def test_the_four_levels_by_keys(page: Any, tmp_path: Path) -> None:
    opened(page, write_report([write_run(tmp_path)]))

    def to(selector: str) -> None:
        for _ in range(60):
            if page.evaluate("s => document.activeElement?.matches(s)", selector):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not reach {selector}")

    to(".jump button")
    page.keyboard.press("Enter")
    heading(page, "Step 3")
    to("a.member")
    page.keyboard.press("Enter")
    heading(page, "Rollout ro-3-0")
    to("a.button")
    page.keyboard.press("Enter")
    heading(page, "Tokens of ro-3-0")
    to(".tokens")
    assert facts(page)["token"].startswith('"c"')  # the first trained token
    page.keyboard.press("ArrowRight")
    assert facts(page)["token"].startswith('"a"')
    page.keyboard.press("End")
    assert facts(page)["token"].startswith('"e"')
    to("nav a[href^='#rollouts']")
    page.keyboard.press("Enter")
    heading(page, "Rollouts")
    to(".virtual")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    heading(page, "Rollout ro-3-11")


@pytest.mark.parametrize("live", [False, True], ids=["file", "served"])
def test_model_output_is_shown_as_text(page: Any, tmp_path: Path, live: bool) -> None:
    write_run(tmp_path, iterations=1, tool_result=HOSTILE + EMOJI)
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    with served(tmp_path) as url:
        page.goto(url if live else write_report([tmp_path]).as_uri())
        page.wait_for_selector("h1")
        page.evaluate("location.hash = '#rollouts/0'")
        heading(page, "Rollouts")
        page.fill("#find", "What IS 3?")  # in the messages of a rollout
        page.wait_for_function("() => document.querySelector('main p[role=status]').textContent.startsWith('1 of 12')")
        assert "ro-1-3" in page.inner_text(".rows .row:not([hidden])")
        page.evaluate("location.hash = '#rollout/0/ro-1-0'")
        heading(page, "Rollout ro-1-0")
        text = page.inner_text(".message.tool pre")
    assert text.startswith(HOSTILE.partition("\u2028")[0])
    assert page.locator("main img").count() == 0
    assert "hacked" not in page.title()
    if live:
        assert "Show more" in text
        page.click(".message.tool pre button")
        assert len(page.inner_text(".message.tool pre")) > 100_000  # of two UTF-16 units each
    assert all(each.startswith(("file:", "http://127.0.0.1:")) for each in addresses)


def test_a_run_that_is_followed_grows(page: Any, tmp_path: Path) -> None:
    writer = AWriter(tmp_path / "one")
    writer.iteration(1)
    with served(tmp_path, follow=True) as url:
        page.goto(url)
        heading(page, "Trend")
        assert "running" in page.inner_text("#runs")
        writer.iteration(2)
        page.wait_for_function("() => document.querySelector('#live').textContent.includes('iteration 2, 24 rollouts')")
        page.evaluate("location.hash = '#rollout/0/ro-2-1'")
        heading(page, "Rollout ro-2-1")
        assert page.locator(".message").count() > 0
        page.click("nav a[href^='#rollouts']")
        heading(page, "Rollouts")
        writer.iteration(3, **{"val/start_reward_mean": 0.25, "val/reward_mean": 0.75})
        page.wait_for_function("() => document.querySelector('main p[role=status]').textContent.includes('36 of 36')")
        page.evaluate("location.hash = '#trend'")
        heading(page, "Trend")
        assert "validation rose from 0.25 to 0.75 over 3 iterations" in page.inner_text(".about >> nth=0")
        described = page.get_attribute("[aria-label^='Validation. ']", "aria-label")
        assert described == "Validation. reward_mean: 0.25 in iteration 2, 0.75 in iteration 3"
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator("figure canvas").count() == page.locator("figure").count() > 2
        writer.finish()
        page.wait_for_function("() => document.querySelector('#runs').textContent.includes('finished')")
        write_run(tmp_path / "two", iterations=1)
        page.wait_for_selector("label:has-text('two')")
        assert "one: reward_mean" in page.inner_text("figure >> nth=0")
        page.uncheck("#run0")
        page.wait_for_function("() => !document.querySelector('figure').textContent.includes('one')")


def test_damaged_and_absent_files_are_described_on_the_page(page: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.json").write_text("{")
    (run / "summary.json").unlink()
    opened(page, write_report([run]))
    assert "config.json is not a JSON object" in page.inner_text(".about")
    assert "unknown" in page.inner_text("#runs")
    write_dumps(tmp_path / "slime", train=False)
    opened(page, write_report([tmp_path / "slime"], convert=SlimeRuns()))
    assert page.locator(".about .badge", has_text="not written").count() == 3
    assert page.locator(".about .badge", has_text="damaged").count() == 0


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_no_serious_fault(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason='no axe-core: pip install "agl-slime[browser]"')
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    opened(page, write_report([write_run(tmp_path)]))
    page.add_script_tag(path=Path(axe.__file__).with_name("axe.min.js"))
    serious = []
    for place in ("trend", "step/0/1", "rollouts/0", "rollout/0/ro-1-2", "token/0/ro-1-2/0", "alarms/0"):
        page.evaluate("hash => location.hash = hash", place)
        page.wait_for_timeout(200)
        for violation in page.evaluate("async () => (await axe.run()).violations"):
            if violation["impact"] in ("serious", "critical"):
                serious.append(f"{place}, {violation['id']}: {violation['nodes'][0]['html'][:200]}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, place
    page.close()
    assert not serious


ODD = """
    rollout/9/% rollout/0/% token/0/%E0%A4%A/0 token/9/ro-1-2/0 token/0/ro-1-2/99 token/0/ro-1-2/x rollout/-1/x step/9/1
    step/0/x step/0.5/1 rollouts/9 alarms/1e9 rollout token step % __proto__/0 constructor/0/x rollout/0/__proto__ ///
"""


def test_odd_addresses_get_a_page_that_says_so(page: Any, tmp_path: Path) -> None:
    report = write_report([write_run(tmp_path)])
    for place in ODD.split():
        page.goto("about:blank")
        page.goto(f"{report.as_uri()}#{place}")
        page.wait_for_selector("h1")
        text = page.inner_text("main")
        assert "needs JavaScript" not in text, place
        broken = "/%" in place or "9/" in place or place.split("/")[1:2] in (["-1"], ["0.5"], ["9"], ["1e9"])
        assert ("This cannot be shown" in text) == broken, (place, text)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tokens": "#"}, "no base64 of 32-bit numbers"),
        ({"tokens": "AAA="}, "no base64 of 32-bit numbers"),
        ({"engine_log_probs": "AAAAAA=="}, "different lengths"),
        ({"advantages": ""}, "different lengths"),
        ({"trained": [[-1, 2]]}, "different lengths"),
        ({"prompt_length": -1}, "different lengths"),
    ],
)
def test_damaged_token_arrays_are_named_as_such(page, tmp_path, fields, sentence):
    run = write_run(tmp_path)
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["rollout_id"] == "ro-1-2"]
    line["samples"][0] |= fields
    (run / "rollouts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    page.goto(f"{write_report([run]).as_uri()}#token/0/ro-1-2/0")
    heading(page, "This cannot be shown")
    assert sentence in page.inner_text("main")
    page.click("text=Trend")
    heading(page, "Trend")


LISTEN = """() => {
  const live = document.querySelector('#live');
  window.told = [live.textContent];
  new MutationObserver(() => told.push(live.textContent)).observe(live, { childList: true });
}"""


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
    rollouts = {line["rollout_id"]: line for line in iter_jsonl(run / "rollouts.jsonl")}
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
