"""Commands on models, files of runs, and the machine: functions whose parameters are the flags.
``agl_slime.cli.main`` prints their errors."""

from __future__ import annotations

import asyncio
import shutil
import sys
from functools import partial
from pathlib import Path

import tyro

from agl_slime.errors import AglSlimeError, ConfigError, MissingDependencyError
from agl_slime.support.terminal import print_line


def doctor(sglang_url: str | None = None) -> None:
    """Check machine, packages and servers, and say how to fix each. Exit code 1 when `python train.py` will not
    run.

    Args:
        sglang_url: An SGLang server to check, too.
    """
    from agl_slime.cli.doctor import examine, used

    lines = []
    for line in examine(sglang_url=sglang_url):
        lines.append(line)
        print_line(f"{line.verdict:<5}{line.name:<20} {line.text}")
    print_line(f"\n{used(lines)}")
    if any(line.verdict == "FAIL" for line in lines):
        raise AglSlimeError("a requirement of the first command is missing")


def model(name: tyro.conf.Positional[Path]) -> None:
    """Fetch a model and print the directory it is in, for --model-path or an SGLang server.

    Args:
        name: smollm2, a name on the Hugging Face hub, or the directory of a model or a run.
    """
    from agl_slime.cli.models import find_model

    print_line(find_model(name, partial(print_line, to=sys.stderr)))


def new(directory: tyro.conf.Positional[Path]) -> None:
    """Write an agent to start from: two tools, a reward of two parts, a test, and a README with the next commands.

    Args:
        directory: A new directory.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists: name a new directory")
    shutil.copytree(Path(__file__).parent / "new_agent", directory, ignore=shutil.ignore_patterns("__pycache__"))
    print_line(f"{directory}: agent.py, test_agent.py and README.md, which has the next commands")


def demo_policy(
    directory: tyro.conf.Positional[Path], agent: tyro.conf.Positional[str | None] = None, seed: int = 0
) -> None:
    """Make a tiny policy that knows the format of an agent's answers, in some 10 seconds, for --model-path.

    Args:
        directory: A new directory, or one with a tiny policy, which is replaced.
        agent: module:Class or path/to/file.py:Class, with ``demonstrations`` (see agl_slime.cli.demo.formats); by
            default the agent of the first command.
        seed: Seed of the weights and the demonstrations.
    """
    from agl_slime.agent.loading import DEFAULT_AGENT, load_agent

    demonstrations = getattr(load_agent(agent or DEFAULT_AGENT), "demonstrations", None)
    if demonstrations is None:
        raise ConfigError(f"{agent} has no `demonstrations` that a tiny policy could learn its format from")
    try:
        from agl_slime.cli.demo.warmup import make_policy
    except ImportError as error:
        raise MissingDependencyError('a tiny policy needs torch: pip install "agl-slime[local]"') from error
    progress = partial(print_line, to=sys.stderr)
    print_line(make_policy(directory, seed=seed, demonstrations=demonstrations, progress=progress))


def report(
    run_dirs: tyro.conf.Positional[tuple[Path, ...]], output: Path | None = None, tokenizer: Path | None = None
) -> None:
    """Write runs as one HTML page that needs no network: trend, steps, rollouts, tokens.

    Args:
        run_dirs: Directories of runs, or one with runs in it; also of slime's --dump-details.
        output: The page's file; report.html in the first directory by default.
        tokenizer: For slime's own runs, a directory with the model's tokenizer.json.
    """
    from agl_slime.report.page import write_report

    if not run_dirs:
        raise ConfigError("name the directory of a run: agl-slime report RUN_DIR")
    print_line(write_report(run_dirs, output, tokenizer=tokenizer))


def view(
    run_dirs: tyro.conf.Positional[tuple[Path, ...]],
    follow: bool = False,
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
    tokenizer: Path | None = None,
) -> None:
    """Show runs in the browser, one or several side by side.

    Args:
        run_dirs: Directories of runs, or one with runs in it; also of slime's --dump-details.
        follow: Update the page while a run continues.
        host: Address to listen on; other addresses than loopback need AGL_SLIME_VIEW_TOKEN.
        port: Port to listen on; 0 takes a free one.
        browser: Open the page.
        tokenizer: For slime's own runs, a directory with the model's tokenizer.json.
    """
    from agl_slime.report import view as server

    if not run_dirs:
        raise ConfigError("name the directory of a run: agl-slime view RUN_DIR")
    asyncio.run(server.view(run_dirs, host=host, port=port, follow=follow, browser=browser, tokenizer=tokenizer))


def audit(run_dir: tyro.conf.Positional[Path]) -> None:
    """Check that the files of a run agree: each rollout has one outcome, each sampled token was trained at most
    once, and sampled by weights that the run pushed. Exit code 1 for findings.

    Args:
        run_dir: The directory of a run that is not running.
    """
    from agl_slime.report.audit import audit as audit_run

    result = audit_run(run_dir)
    for sentence in result.findings:
        print_line(sentence)
    counts = ", ".join(f"{n:,} {name}" for name, n in result.counts.items())
    if result.findings:
        raise AglSlimeError(f"{len(result.findings)} findings in {run_dir} ({counts})")
    state = "" if result.finished else "; the run did not finish, so its last iteration may be incomplete"
    print_line(f"The files of {run_dir} agree: {counts}{state}.")


def onset(run_dir: tyro.conf.Positional[Path], least_rise: float = 0.15, most: int = 10) -> None:
    """Name behaviours that began during a run: phrases, tool calls, the answer's shape and length, refusals, echoes of
    the prompt, rewards without a tool; each with its iteration, first rollouts and effect on the reward. Reads kept
    rollouts (train with --keep-rollouts all); needs no model and no network.

    Args:
        run_dir: The directory of a run.
        least_rise: Least rise of the share of rollouts that show a behaviour.
        most: Behaviours that are shown.
    """
    from agl_slime.cli.export import kept_rollouts
    from agl_slime.report.onset import LEAST_AFTER, LEAST_BEFORE, find_onsets
    from agl_slime.report.traits import see

    if not 0 < least_rise < 1:
        raise ConfigError(f"--least-rise {least_rise}: must be between 0 and 1")
    seen = [one for line in kept_rollouts(run_dir) if (one := see(line)) is not None]
    iterations = len({one.iteration for one in seen})
    if iterations < LEAST_BEFORE + LEAST_AFTER:
        least = f"an onset needs {LEAST_BEFORE + LEAST_AFTER}"
        raise ConfigError(f"{run_dir}: kept rollouts with answers are of {iterations} iterations; {least}")
    onsets = find_onsets(seen, least_rise=least_rise)
    print_line(f"Behaviours that began: {len(onsets)}, in {len(seen)} kept rollouts of {iterations} iterations.")
    for begun in onsets[:most]:
        print_line(f"\n{begun.sentence}\n  first rollouts: {', '.join(begun.first)}")
        if begun.also:
            print_line(f"  in nearly the same rollouts: {'; '.join(map(str, begun.also[:3]))}")
