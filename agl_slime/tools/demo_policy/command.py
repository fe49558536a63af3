from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import tyro

from agl_slime.agent.loading import DEFAULT_AGENT, load_agent
from agl_slime.errors import ConfigError, missing_as_error
from agl_slime.support.terminal import print_line


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
    demonstrations = getattr(load_agent(agent or DEFAULT_AGENT), "demonstrations", None)
    if demonstrations is None:
        raise ConfigError(f"{agent} has no `demonstrations` that a tiny policy could learn its format from")
    with missing_as_error('a tiny policy needs torch: pip install "agl-slime[local]"'):
        from agl_slime.tools.demo_policy.warmup import make_policy
    progress = partial(print_line, to=sys.stderr)
    print_line(make_policy(directory, seed=seed, demonstrations=demonstrations, progress=progress))
