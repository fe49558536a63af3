"""A launcher of slime's scripts that adds the flags of the agent rollout to slime's parser.

    python -m agl_slime.train.slime.launch $SLIME_DIR/train_async.py --agent-rollout-buffer-url http://127.0.0.1:8889 …

slime's parser ignores unknown flags and accepts only its own four values of ``--loss-mask-type``. A script that calls
``parse_args`` itself can pass ``add_arguments`` to it, which adds all flags but ``--loss-mask-type``.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.support.slime import INSTALL_SLIME, find, installed, module_of
from agl_slime.support.terminal import exit_code_of

FLAGS = {
    "--agent-rollout-buffer-url": "Rollout Buffer that agl_slime.buffer.agent_rollout takes groups from.",
    "--agent-rollout-eval-task-type": "Generator of evaluations; without it there are none.",
    "--rollout-num-process": "Rollouts that the generator runs at a time.",
}
_PROVIDER = "get_slime_extra_args_provider"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add missing ``FLAGS`` to ``parser``, and let its ``--loss-mask-type``, if any, accept every name and
    ``module:Class``."""
    actions = {option: action for action in parser._actions for option in action.option_strings}
    for flag, text in FLAGS.items():
        if flag not in actions:
            parser.add_argument(flag, type=int if flag.endswith("num-process") else str, default=None, help=text)
    if (masks := actions.get("--loss-mask-type")) is not None:
        masks.choices = None
    return parser


def extend_parser() -> None:
    """Have slime's parser call ``add_arguments``. Raises ``UnknownVersionError`` when it is not found."""
    provider = find(_PROVIDER)

    def with_flags(add_custom_arguments: Any = None) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
        add = provider(add_custom_arguments)
        return lambda parser: add_arguments(add(parser))

    setattr(import_module(module_of(_PROVIDER) or ""), _PROVIDER, with_flags)


def launch(script: str, flags: Sequence[str]) -> None:
    """Run ``script`` as a program with ``flags``, with a parser that has ``FLAGS``.

    Raises:
        ConfigError: there is no such script.
        UnknownVersionError, MissingDependencyError: slime's parser is not found, or slime is not installed.
    """
    if Path(script).suffix != ".py" or not Path(script).is_file():
        raise ConfigError(f"{script}: there is no such Python file; give slime's train.py or train_async.py")
    if not installed():
        raise MissingDependencyError(INSTALL_SLIME)
    extend_parser()
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def main(argv: Sequence[str] | None = None) -> int:
    """``launch`` from the command line; returns the exit code."""
    script, *flags = [*(sys.argv[1:] if argv is None else argv)] or [""]
    return exit_code_of(lambda: launch(script, flags))


if __name__ == "__main__":
    sys.exit(main())
