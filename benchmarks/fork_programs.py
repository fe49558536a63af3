"""Samples per rollout of command-line agents themselves, on published chat templates.

    python -m benchmarks.fork_programs --templates DIR --packages DIR [--models qwen3.8] [--programs codex]

A scripted policy answers nine requests with a thought, a sentence and a call of the program's shell, the tenth with
text, and a request that offers no shell, for a title, with text. Templates are the models' own, vocabulary and special
tokens those of ``benchmarks/published.py``. Gemini CLI is not here: it speaks Google's API alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agl1_server import markdown
from benchmarks.answers import Speaker
from benchmarks.forks import Line, Refused, played
from benchmarks.published import MODELS, tokenizer_of
from benchmarks.scripted_gateway import Sampled, scripted_gateway


@dataclass(frozen=True, kw_only=True)
class Program:
    """``tool`` is its shell's name and argument, ``before`` a command that runs first. $URL and $ROOT are the gateway's
    address with ``/v1`` and without."""

    package: str
    protocol: str = "chat"
    tool: tuple[str, str]
    words: str
    before: str = ""
    settings: str = ""


_CLAUDE: Any = {"protocol": "messages", "tool": ("Bash", "command")}
_CLAUDE["words"] = "-p 'Look around.' --model claude-sonnet-4-5 --allowedTools Bash"
_CLAUDE["settings"] = "ANTHROPIC_BASE_URL=$ROOT ANTHROPIC_API_KEY=any IS_SANDBOX=1 DISABLE_AUTOUPDATER=1"
_CLAUDE["settings"] += " CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1"
_COPILOT: Any = {"package": "@github/copilot@latest", "tool": ("bash", "command")}
_COPILOT["words"] = "-p 'Look around.' --allow-all --no-auto-update --disable-builtin-mcps"
_COPILOT_ENV = "COPILOT_PROVIDER_BASE_URL=$URL COPILOT_PROVIDER_API_KEY=any COPILOT_MODEL=gpt-5.4 "
_CODEX: Any = {"protocol": "responses", "tool": ("exec_command", "cmd"), "settings": "OPENAI_API_KEY=any"}
_SERVER = """{name="agl",base_url="$URL",wire_api="responses",env_key="OPENAI_API_KEY"}"""
_CODEX["words"] = "exec -m m --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -c model_provider=agl "
_CODEX["words"] += f"-c 'model_providers.agl={_SERVER}' 'Look around.'"
_PROVIDER = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "$URL", "apiKey": "any"}, "models": {"m": {}}}
_CONFIG = {"permission": "allow", "model": "agl/m", "small_model": "agl/m", "provider": {"agl": _PROVIDER}}
_OPENCODE = f"OPENCODE_DISABLE_MODELS_FETCH=true OPENCODE_CONFIG_CONTENT='{json.dumps(_CONFIG)}'"
_QWEN: Any = {"tool": ("run_shell_command", "command"), "words": "--yolo --auth-type openai --prompt 'Look around.'"}
_QWEN["settings"] = "OPENAI_API_KEY=any OPENAI_BASE_URL=$URL OPENAI_MODEL=m"
_CLINE: Any = {"tool": ("run_commands", "commands"), "words": "-P openai -m m 'Look around.'"}
_CLINE |= {"before": "auth -p openai -k any -m m -b $URL", "settings": "CLINE_SESSION_BACKEND_MODE=local"}  # no daemon

PROGRAMS = {
    "claude 2.1.117": Program(package="@anthropic-ai/claude-code@2.1.117", **_CLAUDE),
    "claude": Program(package="@anthropic-ai/claude-code@latest", **_CLAUDE),
    "copilot": Program(protocol="responses", settings=_COPILOT_ENV + "COPILOT_PROVIDER_WIRE_API=responses", **_COPILOT),
    "copilot chat": Program(settings=_COPILOT_ENV, **_COPILOT),
    "codex": Program(package="@openai/codex@latest", **_CODEX),
    "opencode": Program(
        package="opencode-ai@latest", tool=("bash", "command"), words="run --pure 'Look around.'", settings=_OPENCODE
    ),
    "qwen": Program(package="@qwen-code/qwen-code@latest", **_QWEN),
    "cline": Program(package="cline@latest", **_CLINE),
}


@dataclass
class Policy(list[Sampled]):
    """The answers of one rollout, each made when the engine takes it."""

    line: Line
    program: Program
    calls: int = 0

    def pop(self, index: Any = -1) -> Sampled:
        line, number, (name, argument) = self.line, self.calls, self.program.tool
        prompt = line.speaker.tokenizer.decode(line.rollout.engine.prompts[-1])
        said = line.said(calls=int(number < 9 and re.search(f'[">]{name}["<]', prompt) is not None))
        said.message["content"] = line.text()
        for call in said.message.get("tool_calls", ()):
            command = f"echo {line.text()}"
            value = [command] if argument.endswith("s") else command
            call["id"] = line.speaker.model.ids.format(name=name, number=number)
            call["function"] = {"name": name, "arguments": {argument: value, "description": "?"}}
            self.calls += 1
        return line.speaker.sampled(said)


def player(program: Program, binary: Path) -> Callable[[Line], None]:
    def run(line: Line) -> None:
        line.rollout.engine.answers, url = Policy(line, program), line.rollout.url

        def filled(text: str) -> list[str]:
            return shlex.split(text.replace("$URL", url).replace("$ROOT", url.removesuffix("/v1")))

        with tempfile.TemporaryDirectory() as home:
            settings = dict(setting.split("=", 1) for setting in filled(program.settings))
            how: Any = {"cwd": home, "env": {"PATH": os.environ["PATH"], "HOME": home, **settings}, "timeout": 600}
            how |= {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
            for words in filter(None, map(filled, (program.before, program.words))):
                if (ended := subprocess.run([binary, *words], check=False, **how)).returncode:
                    raise Refused((ended.stdout + ended.stderr)[-300:])

    return run


def installed(package: str, packages: Path) -> tuple[Path, str]:
    """The directory of its commands, where it is installed once, and its version."""
    modules = packages / package.replace("/", "_") / "node_modules"
    file = modules / package.rpartition("@")[0] / "package.json"
    if not file.is_file():
        subprocess.run(["npm", "install", "--prefix", str(modules.parent), package], check=True)
    return modules / ".bin", json.loads(file.read_text(encoding="utf-8"))["version"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--templates", type=Path, required=True, help="directory of NAME.jinja")
    parser.add_argument("--packages", type=Path, required=True, help="where npm's programs are, or will be installed")
    parser.add_argument("--models", nargs="*", default=["qwen3.8", "kimi-k2.5", "nemotron-3-super"], choices=[*MODELS])
    parser.add_argument("--programs", nargs="*", default=[*PROGRAMS], choices=[*PROGRAMS])
    options = parser.parse_args()
    rows = []
    for model in (MODELS[name] for name in options.models):
        tokenizer = tokenizer_of(model, options.templates, renderers=False)
        speaker = Speaker(model, tokenizer, None)
        with scripted_gateway(tokenizer) as gateway:
            for name, program in ((name, PROGRAMS[name]) for name in options.programs):
                commands, version = installed(program.package, options.packages)
                found = played(player(program, commands / name.split()[0]), gateway, speaker)
                forks = ", ".join(f"{reason} {n}" for reason, n in found.forks.most_common()) or "none"
                rows.append([name, version, program.protocol, model.name, str(found.turns), str(found.samples)])
                rows[-1] += [f"{found.tokens:,}", f"{found.tokens / found.conversation:.2f}", found.refused or forks]
    columns = ["program", "version", "protocol", "template", "turns", "Samples", "tokens", "over one Sample's", "forks"]
    print(markdown("Samples of programs", columns, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
