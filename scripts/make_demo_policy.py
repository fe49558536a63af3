"""Makes a tiny policy that knows the format of an agent's answers, in some 10 seconds:

    python scripts/make_demo_policy.py DIRECTORY [AGENT] [SEED]

AGENT (module:Class or path/to/file.py:Class) has ``demonstrations``; by default it is the lookup agent of the first
command, whose policy agl_slime/cli/demo/lookup_policy ships. The same machine and library versions give the same files
to the last bit (tests/integration/test_policy_checkpoint.py). Every tiny policy has its chat template from the shipped
chat_template.jinja: edit it there.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agl_slime.agent.loading import DEFAULT_AGENT, load_agent
from agl_slime.errors import AglSlimeError
from scripts.tiny_policy.warmup import make_policy


def main(directory: str, agent: str = DEFAULT_AGENT, seed: str = "0") -> None:
    demonstrations = getattr(load_agent(agent), "demonstrations", None)
    if demonstrations is None:
        sys.exit(f"error: {agent} has no `demonstrations` that a tiny policy could learn its format from")
    try:
        print(make_policy(directory, seed=int(seed), demonstrations=demonstrations))
    except AglSlimeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
