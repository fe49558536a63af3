"""``agl-slime rehearse``: plays a launch script, checks it, forecasts the run, and writes all of it to a directory."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from agl_slime import metric_names as names
from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.report.files import RunDir, dump, open_run_dir
from agl_slime.support.files import write_file
from agl_slime.support.flags import parse_flags, split_at_dashes
from agl_slime.support.terminal import print_line
from agl_slime.tools.rehearse.checks import Arguments, Finding, Nodes, check, check_script
from agl_slime.tools.rehearse.forecast import Forecast, Shape, Speeds, compare
from agl_slime.tools.rehearse.live import Live, play_live
from agl_slime.tools.rehearse.parsing import parse
from agl_slime.tools.rehearse.script import Training, play
from agl_slime.tools.rehearse.speeds import Size, shape_of, speeds_of

if TYPE_CHECKING:
    from agl_slime.tools.rehearse.megatron.steps import Steps

_MOST_SIMULATED = 2_000_000  # rollouts of a batch times engines
_BAR_WIDTH = 64
_TITLES = {"breaks": "Will break", "costs": "Costs time or has no effect", "note": "About this rehearsal"}


class MeasuredSpeeds(make_dataclass("Fields", [(key.name, float | None, None) for key in fields(Speeds)], frozen=True)):
    """Measured speeds, in place of ``--card``. Seconds of: a decoding step, what each sequence adds to it, a
    prefilled token, a training step, a token of its batch, a weight update, a handover of shared GPUs, and tools and
    reward of a rollout."""


@dataclass(frozen=True)
class RehearseConfig:
    """Play a launch script of slime's style on this machine, without GPUs: what will break, and a forecast.

    Args after -- are passed to the script.
    """

    script: tyro.conf.Positional[Path]
    """The launch script, as it stands; its environment variables are this shell's."""
    nodes: int = 1
    """Machines that the run would get."""
    gpus_per_node: int = 8
    """GPUs of each."""
    slime_dir: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="default: $SLIME_DIR")] = None
    """slime's checkout."""
    python: Path = Path(sys.executable)
    """A Python with slime's requirements (scripts/slime_cpu.sh makes one)."""
    card: Literal["a100", "h100", "h200", "b200", "mi300x"] = "h100"
    """The GPU, for the forecast."""
    response_tokens: float | None = None
    """Mean length of responses; a third of --rollout-max-response-len by default."""
    prompt_tokens: int = 200
    """Mean length of prompts."""
    live_steps: int = 0
    """Also run this many steps of slime's own driver, on Ray with logical GPUs and stand-ins (3 or more). Code
    that the script's flags name then runs outside of the sandbox."""
    live_seconds: float = 60.0
    """Seconds to which the live steps are scaled."""
    speeds: MeasuredSpeeds = field(default_factory=MeasuredSpeeds)
    without_sandbox: bool = False
    """Run a script that you trust without bubblewrap: it writes and deletes files of this machine."""
    output_dir: Path | None = None
    """Where the rehearsal is written, for agl-slime report; runs/TIME-SCRIPT by default."""
    overwrite: bool = False
    """Replace a rehearsal in --output-dir."""


@dataclass(frozen=True)
class Rehearsal:
    """The findings, and the forecasts by change; none when slime's arguments are unknown or sample nothing."""

    findings: tuple[Finding, ...]
    shape: Shape | None = None
    forecasts: tuple[tuple[str, Forecast], ...] = ()
    live: Live | None = None
    trained: Steps | None = None


def rehearse(
    config: RehearseConfig, arguments: Sequence[str], *, slime_dir: Path, tokenizer: Path, scratch: Path
) -> Rehearsal:
    """Play, parse, check and forecast. Raises ``ConfigError`` for files and flags that cannot be used."""
    nodes = Nodes(config.nodes, config.gpus_per_node)
    boxed = {"scratch": scratch, "sandbox": not config.without_sandbox, "slime_dir": slime_dir}
    played = play(config.script, gpus=nodes.gpus, nodes=nodes.count, arguments=arguments, **boxed)
    training = played.training
    if training is None:
        return Rehearsal(tuple(check_script(played, None, nodes)))
    parsed = parse(training, python=str(config.python), **boxed)
    findings = tuple(check(played, parsed, training, nodes))
    if parsed.args is None:
        return Rehearsal(findings)
    args = Arguments(parsed.args, training)
    if not args.rollout_batch_size or args.debug_train_only or "sft" in (args.rollout_function_path or ""):
        return Rehearsal(findings)
    try:
        speeds, shape = _measures(args, config)
        forecasts = tuple(compare(speeds, shape))
    except (ConfigError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # values of any type
        return Rehearsal((*findings, Finding("note", f"no forecast: {error}")))
    live = trained = None
    if config.live_steps:
        try:
            options: dict[str, Any] = {"tokenizer": tokenizer, "python": str(config.python), "scratch": scratch}
            options |= {"slime_dir": slime_dir}
            scale = {"steps": config.live_steps, "seconds": config.live_seconds}
            live = play_live(args, training, nodes, speeds, shape, **scale, **options)
            trained, found = _train(args, training, **options)
            findings = tuple(sorted((*findings, *found), key=lambda finding: [*_TITLES].index(finding.level)))
        except ConfigError:
            raise
        except AglSlimeError as error:
            findings = (Finding("breaks", str(error)), *findings)
    return Rehearsal(findings, shape, forecasts, live, trained)


def _train(
    args: Arguments, training: Training, *, python: str, slime_dir: Path, **places: Path
) -> tuple[Steps | None, list[Finding]]:
    """The steps with Megatron itself, where ``python`` has it."""
    from agl_slime.tools.rehearse.megatron.steps import find_sources, play_steps

    try:
        sources = find_sources(python, slime_dir)
    except AglSlimeError as error:
        return None, [Finding("note", f"no step with Megatron itself was made: {error}")]
    return play_steps(args, training, sources=sources, python=python, **places)


def _measures(args: Arguments, config: RehearseConfig) -> tuple[Speeds, Shape]:
    """The run's speeds and shape. Raises ``ConfigError`` where the flags have none, or too large ones."""
    shape = shape_of(args, mean_tokens=config.response_tokens, prompt_tokens=config.prompt_tokens)
    if not (shape.groups > 0 < shape.size and shape.groups * shape.size * shape.engines <= _MOST_SIMULATED):
        sizes = f"{shape.groups} x {shape.size} rollouts on {shape.engines} engines"
        raise ConfigError(f"{sizes} are none, or too many to simulate; correct the flags")
    measured = {name: value for name, value in asdict(config.speeds).items() if value is not None}
    if (size := Size.from_args(args)) is not None:
        return replace(speeds_of(args, size, config.card, shape), **measured), shape
    if "token_s" not in measured:
        raise ConfigError("the flags have no model sizes; give --speeds.token-s and the others")
    return Speeds(**measured), shape


def lines_of(rehearsal: Rehearsal) -> list[str]:
    """The text for the terminal."""
    lines = []
    for level, title in _TITLES.items():
        texts = [finding.text for finding in rehearsal.findings if finding.level == level]
        lines += [f"{title} ({len(texts)}):", *(f"  - {text}" for text in texts), ""] if texts else []
    if not rehearsal.findings:
        lines += ["No findings.", ""]
    if (shape := rehearsal.shape) is None:
        return lines
    driver = "train_async.py" if shape.asynchronous else "train.py"
    sizes = f"{shape.groups} x {shape.size} rollouts of {shape.mean_tokens:,.0f} tokens on {shape.engines} engines"
    lines.append(f"Forecast: {driver}, {sizes}{', GPUs shared with training' if shape.colocated else ''}")
    head = ("", "s/step", "trainer waits", "engines wait", "tokens lost", "prefilled again", "behind")
    lines.append("  {:<22}{:>8}{:>15}{:>14}{:>13}{:>17}{:>8}".format(*head))
    for name, forecast in rehearsal.forecasts:
        shares = (forecast.trainer_waits, forecast.engines_wait, forecast.lost_tokens, forecast.prefilled_again)
        row = f"  {name:<22}{forecast.step_s:>8.1f}" + "{:>15.0%}{:>14.0%}{:>13.1%}{:>17.1%}".format(*shares)
        lines.append(f"{row}{forecast.behind:>8.1f}")
    lines += ["", *_timeline(rehearsal.forecasts[0][1])]
    if (live := rehearsal.live) is not None:
        off = live.step_s / live.expected.step_s - 1
        text = f"{live.steps} steps of slime's driver, {live.step_s:.2f} s each (forecast {live.expected.step_s:.2f} s"
        lines += ["", f"Live: {text}, {off:+.0%}), at 1 : {1 / live.scale:.1f} of the real time"]
    if (trained := rehearsal.trained) is not None:
        reduced = f" ({', '.join(trained.changes)})" if trained.changes else ""
        text = f"{trained.steps} steps of slime's actors on {trained.ranks} ranks{reduced}, at small sizes"
        text += ", and one from their checkpoint" if trained.resumed else ""
        lines += ["", f"Megatron: {text}; log-probs within {trained.difference:.1g} of transformers'"]
    return lines


def _timeline(forecast: Forecast) -> list[str]:
    """The first steps as bars: ``.`` waits for rollouts, ``T`` trains, ``u`` updates weights."""
    steps, bar = forecast.steps[:4], ""
    seconds = steps[-1].synced
    for step in steps:
        for until, mark in ((step.began, "."), (step.trained, "T"), (step.synced, "u")):
            bar += mark * max(0, round(_BAR_WIDTH * until / seconds) - len(bar))
    return [f"Trainer, first {len(steps)} steps, {seconds:,.0f} s (. waits, T trains, u updates weights)", f"  {bar}"]


def write(rehearsal: Rehearsal, run: RunDir, lines: Sequence[str]) -> None:
    """The directory's files: ``rehearsal.txt``, ``findings.json``, ``forecasts.json``, ``live.json``, and the run's
    ``metrics.jsonl`` and ``summary.json``, which the report opens."""
    write_file(run.path / "rehearsal.txt", "\n".join(lines) + "\n")
    write_file(run.path / "findings.json", dump([asdict(finding) for finding in rehearsal.findings], indent=2))
    forecasts = {name: asdict(forecast) for name, forecast in rehearsal.forecasts}
    write_file(run.path / "forecasts.json", dump(forecasts, indent=2))
    if rehearsal.live is not None:
        write_file(run.path / "live.json", dump(asdict(rehearsal.live), indent=2))
    if rehearsal.shape is not None:
        rows, ended = [], 0.0
        for number, step in enumerate(rehearsal.forecasts[0][1].steps):
            seconds = step.synced - ended
            row = {"iteration": number, names.ITERATION_S: seconds, names.TRAIN_S: step.trained - step.began}
            row |= {names.TRAINER_WAITED: max(0.0, step.began - ended) / seconds, names.STALENESS_MEAN: step.behind}
            row |= {names.TOKENS_PER_S: step.tokens / seconds, names.WEIGHTS_VERSION: number + 1}
            rows.append(row | {names.COUNT: rehearsal.shape.groups * rehearsal.shape.size})
            ended = step.synced
        write_file(run.metrics, b"".join(dump(row) for row in rows))
    write_file(run.summary, dump({"reason": "finished", "rehearsal": True}))


def main(arguments: list[str]) -> None:
    """The command. Raises ``ConfigError`` for flags that cannot be used, ``AglSlimeError`` where the script breaks."""
    ours, script_arguments = split_at_dashes(arguments)
    config = parse_flags(RehearseConfig, prog="agl-slime rehearse", arguments=ours)
    if min(config.nodes, config.gpus_per_node) < 1:
        raise ConfigError("--nodes and --gpus-per-node must be at least 1")
    if (slime_dir := config.slime_dir or os.environ.get("SLIME_DIR")) is None:
        raise ConfigError("slime's parser is needed: give --slime-dir, or set SLIME_DIR to slime's checkout")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-slime-rehearse-")))
        slime_dir = Path(slime_dir).resolve()
        rehearsal = rehearse(config, script_arguments, slime_dir=slime_dir, tokenizer=LOOKUP_POLICY, scratch=scratch)
        settings = asdict(replace(config, slime_dir=slime_dir))
        run = open_run_dir(config.output_dir, agent=config.script.stem, settings=settings, overwrite=config.overwrite)
        lines = lines_of(rehearsal)
        write(rehearsal, run, lines)
        if (log := scratch / "live.log").is_file():
            shutil.copy(log, run.path / "live.log")
        for line in lines:
            print_line(line)
        print_line(f"Written to {run.path}: agl-slime report {run.path}")
    if broken := sum(finding.level == "breaks" for finding in rehearsal.findings):
        raise AglSlimeError(f"{config.script} would break: {broken} of the findings above")
