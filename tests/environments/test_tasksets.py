"""Tasksets of ours: their scores are the libraries' own, and verifiers itself runs their episodes."""

from typing import Any

import pytest

from tests.harness.environments import ask

pytestmark = pytest.mark.environments


def test_episode_scores_equal_the_librarys_for_all_kinds_of_answers() -> None:
    rows = ask("tasksets", "scores")

    assert len(rows) == 32 * 7
    for name, kind, ours, theirs in rows:
        if isinstance(theirs, str):  # its scorer raises: the rollout fails with that error, and is no 0
            assert isinstance(ours, str), (name, kind)
            assert theirs in ours, (name, kind)
        else:
            assert ours == theirs, (name, kind)
    right = [ours for name, kind, ours, _ in rows if kind == "right" and name not in ("boxnet", "ab")]
    assert right.count(1.0) >= len(right) - 2, right  # a scorer may ask for another form than its own answer's


def test_no_question_is_in_training_and_in_evaluation_whatever_the_seeds() -> None:
    splits = ask("tasksets", "splits")

    assert splits["train 0 0"] == splits["train 0 1"], "the same seed gives the same tasks"
    assert splits["train 0 0"] != splits["train 1 0"]
    train = {q for name, questions in splits.items() if name.startswith("train") for q in questions}
    held_out = {q for name, questions in splits.items() if name.startswith("eval") for q in questions}
    assert len(held_out) >= 100
    assert not train & held_out
    for questions in splits.values():
        assert len(set(questions)) == len(questions) == 60


def test_datasets_are_drawn_by_their_weights_and_levels_and_end() -> None:
    drawn = ask("tasksets", "weights")
    assert sum(drawn.values()) == 400
    assert 250 <= drawn["chain_sum"] <= 350
    levels = ask("tasksets", "levels")
    assert [level for level, _ in levels] == [0, 0, 1, 1, 2, 2]
    assert sum(size for _, size in levels[:2]) < sum(size for _, size in levels[4:]), "later problems are longer"
    assert 0 < ask("tasksets", "few") < 500, "a dataset with fewer questions ends"


def test_unknown_dataset_game_or_level_is_an_error_in_one_sentence() -> None:
    dataset, instructions, level, nothing, weight, game, players = ask("tasksets", "refused")

    assert dataset.startswith("reasoning-gym has no dataset 'chain_summ'; it has ab, acre")
    assert instructions.startswith("instructions 'loud': one of")
    assert level.startswith("reasoning-gym's chain_sum has no level 99")
    assert "give the datasets after a colon, as reasoning-gym:NAME" in nothing
    assert "the weight of chain_sum must be a number" in weight
    assert game.startswith("TextArena has no game 'NoSuchGame-v0'; it has")
    assert "taken" not in players


def test_concurrent_games_share_no_random_state() -> None:
    games = ask("tasksets", "games")

    first, second, same = games["together"]
    assert first == same == games["alone"], "one seed is one game, whatever is played beside it"
    assert second != first
    assert games["untouched"]


def played(name: str, answers: list[str], tasks: int = 1, **env: Any) -> list[dict[str, Any]]:
    return ask("episodes", stdin={"name": name, "answers": answers, "tasks": tasks, "env": env})


IN_TURN = [f"I take [{i}]" for i in range(9)]


def test_self_play_rewards_both_seats_and_trains_both() -> None:
    (game,) = played("textarena:TicTacToe-v0", IN_TURN, play="self")

    assert game["ok"], game["errors"]
    by_agent = {trace["agent"]: trace for trace in game["traces"]}
    assert by_agent["player"]["rewards"] == {"game": 1.0}  # 0 2 4 6: the diagonal
    assert by_agent["opponent"]["rewards"] == {"game": -1.0}
    assert [by_agent[agent]["turns"] for agent in ("player", "opponent")] == [4, 3]
    assert all(trace["trainable"] for trace in game["traces"])
    last = game["requests"][-1]["messages"]
    assert [m["role"] for m in last] == ["system", *["user", "assistant"] * 3, "user"]
    assert "cell 5" in last[-1]["content"], "the prompt has the other player's move"
    (game,) = played("textarena:TicTacToe-v0", IN_TURN, play="untrained")
    assert {trace["agent"]: trace["trainable"] for trace in game["traces"]} == {"player": True, "opponent": False}


def test_fixed_opponent_is_not_trained_and_player_alternates_seats() -> None:
    first, second = played("textarena:TicTacToe-v0", ["[9]"], tasks=2)

    for game, seat in ((first, 0.0), (second, 1.0)):
        (trace,) = game["traces"]
        assert trace["agent"] == "player"
        assert trace["metrics"]["seat"] == seat
        assert trace["metrics"]["invalid_move"] == 1.0
        assert trace["rewards"] == {"game": -1.0}, "the library's own reward of a move that is none, made twice"
        assert trace["turns"] == 2


def test_fixed_opponent_ignores_moves_suggested_by_the_player() -> None:
    assert ask("tasksets", "opponents") == [True] * 20


def test_a_game_that_ends_before_the_trained_seat_has_moved_is_dealt_again() -> None:
    """The other seat begins and loses by two invalid moves: the trained one has no token to train."""
    games = played("textarena:KuhnPoker-v0", ["rubbish"], tasks=2, play="untrained")

    dealt_again = []
    for game in games:
        assert game["ok"], game["errors"]
        (player,) = [trace for trace in game["traces"] if trace["agent"] == "player"]
        assert (player["turns"], player["rewards"]) == (2, {"game": -1.0})
        assert player["metrics"]["seat"] == 1.0, "the seat that begins"
        opponents = [trace for trace in game["traces"] if trace["agent"] == "opponent"]
        assert not any(trace["rewards"] for trace in opponents), "the game that counts had ended before its turn"
        dealt_again.append(player["metrics"]["dealt_again"])
        assert len(opponents) == dealt_again[-1]
    assert dealt_again == [1.0, 0.0]


def test_seat_without_moves_trains_nothing_and_leaves_the_other_intact() -> None:
    (game,) = played("textarena:KuhnPoker-v0", ["rubbish"], play="self")

    assert game["ok"], game["errors"]
    assert [(t["agent"], t["turns"], t["rewards"]) for t in game["traces"]] == [("opponent", 2, {"game": -1.0})]


def test_a_game_that_was_cut_off_has_failed_and_has_no_reward() -> None:
    (game,) = played("textarena:TicTacToe-v0", IN_TURN, play="self", player={"max_turns": 1})

    assert not game["ok"]
    assert any("was stopped before the game had ended" in error for error in game["errors"])
    assert all(not trace["rewards"] for trace in game["traces"])


def test_a_game_without_listed_moves_asks_for_them() -> None:
    (game,) = played("textarena:ConnectFour-v0", ["[col 3]"], tasks=1, opponent_fn=None)
    (named,) = played("textarena:ConnectFour-v0", ["[col 3]"], moves=[f"[col {i}]" for i in range(7)])

    assert any("--env.moves" in error for error in game["errors"])
    assert named["traces"][0]["rewards"], named["errors"]
