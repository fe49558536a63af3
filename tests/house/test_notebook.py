"""The notebook runs from its first cell to its last, as Jupyter would run it: with a loop that is running already."""

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason='the notebook trains: pip install "agl-slime[local]"')

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"


@pytest.mark.slow
async def test_the_notebook_runs_and_the_reward_has_risen() -> None:
    pytest.importorskip("matplotlib", reason="the notebook draws: pip install matplotlib").use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # outputs depend on the machine
            code = compile("".join(cell["source"]), f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            ended = eval(code, names)
            if inspect.isawaitable(ended):
                await ended
    rewards = names["rewards"]
    assert len(rewards) == 12
    assert max(rewards[-4:]) > rewards[0] + 0.2
