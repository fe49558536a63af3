"""Loss scales choose the trained answers."""

from typing import Any

import pytest

from agl_slime.agent.outcome import untrained_turns
from agl_slime.errors import ConfigError
from agl_slime.tokens.turn import Turn


def turns(*responses: list[int]) -> list[Turn]:
    return [
        Turn(prompt_ids=[1], response_ids=ids, text=f"answer {n}", messages=[{"role": "user", "content": "?"}])
        for n, ids in enumerate(responses)
    ]


def test_loss_scale_trains_all_last_or_selected_turns() -> None:
    three = turns([1], [2], [3])
    assert untrained_turns("default", three) == ()
    assert untrained_turns("last_round", three) == (0, 1)
    assert untrained_turns(lambda messages, turn, turns: int(turn != 2), three) == (1,)
    assert untrained_turns(lambda messages, turn, turns: messages[-1]["content"] == "answer 2", three) == (0, 1)
    assert untrained_turns("last_round", turns([1], [2], [])) == (0,)  # an answer without tokens is no round
    assert untrained_turns("last_round", []) == ()


def test_weights_nothing_at_all_and_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 0\.5 for answer 1"):
        untrained_turns(lambda messages, turn, turns: 0.5, turns([1]))
    with pytest.raises(ConfigError, match="all 2 answers"):
        untrained_turns(lambda messages, turn, turns: 0, turns([1], [2]))
    bad: Any = "first_round"
    with pytest.raises(ConfigError, match="got 'first_round'"):
        untrained_turns(bad, turns([1]))
