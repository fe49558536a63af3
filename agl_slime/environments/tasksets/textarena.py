"""TextArena's games for two: against a fixed opponent, an untrained model, or the policy itself, trained on both seats.

The game runs in this process; its observations are the players' user messages, and the library gives each seat's
reward. TextArena draws from the process-wide ``random``; here each game has its own generator, so that concurrent games
do not affect each other.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.utils.loaders import plugged_fn

try:
    import textarena  # noqa: F401 (fills the registry)
    from textarena.core import GAME_ID
    from textarena.envs.registration import ENV_REGISTRY, make
except ImportError as e:
    raise ImportError("The taskset textarena needs its package: pip install textarena") from e

SYSTEM_PROMPT = (
    "You play a game against another player. Read the rules, think briefly, and end each reply with one move in "
    "square brackets, in the format that the game asks for."
)

DEALS = 8
"""Most games of a task, which is repeated with swapped seats while no trained seat has had a move."""
BETWEEN_DEALS = 1_000_000
"""Distance of their seeds; even, because the parity of a seed is its split."""


class _PerGame:
    """Replaces ``random`` in TextArena's modules: delegates to the current game's generator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_generator.get(), name)


_generator: ContextVar[random.Random] = ContextVar("textarena_generator")
_PER_GAME = _PerGame()


class Game:
    """One game of TextArena, with its own random generator."""

    def __init__(self, name: str, seed: int, options: dict[str, Any]) -> None:
        raw = name if name.endswith("-raw") else f"{name.removesuffix('-train')}-raw"
        if raw not in ENV_REGISTRY:
            games = [key for key in ENV_REGISTRY if not key.endswith(("-raw", "-train"))]
            raise ValueError(f"TextArena has no game {name!r}; it has {', '.join(sorted(games))}")
        self._random = random.Random(seed)
        with self._playing():
            self._game = make(raw, **options)
        for module in [m for key, m in sys.modules.items() if key.startswith("textarena.")]:
            if getattr(module, "random", None) is random:
                module.random = _PER_GAME  # type: ignore[attr-defined]
        with self._playing():
            self._game.reset(num_players=2, seed=seed)
        players = self._game.state.num_players
        if players != 2:
            raise ValueError(f"TextArena's {name} is a game for {players}; this taskset needs a game for two")

    @contextlib.contextmanager
    def _playing(self) -> Iterator[None]:
        token = _generator.set(self._random)
        try:
            yield
        finally:
            _generator.reset(token)

    def observe(self) -> tuple[int, str]:
        """The seat whose turn it is, and its new observations."""
        with self._playing():
            seat, messages = self._game.get_observation()
        names = {**self._game.state.role_mapping, GAME_ID: "GAME"}
        lines = [f"[{names.get(sender, f'Player {sender}')}] {text}" for sender, text, _ in messages]
        return seat, "\n".join(lines)

    def step(self, action: str) -> bool:
        with self._playing():
            return bool(self._game.step(action)[0])

    def outcome(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        rewards, info = self._game.close()
        return {seat: float(reward) for seat, reward in rewards.items()}, info


def random_move(observation: str, draw: random.Random, moves: list[str] | None = None) -> str:
    """One of `moves`; by default of the moves that the observation lists last."""
    if not moves:
        listed = re.findall(r"(?im)^.*(?:available|valid|legal|possible|options|choice)\b.*\[.*$", observation)
        last = re.sub(r"^\[(?:GAME|Player \d+)\] ", "", listed[-1]) if listed else ""  # the speaker is not a move
        moves = [m for m in re.findall(r"\[[^\[\]]+\]", last) if not re.search(r"\b[A-Z]\b", m)]
    if not moves:
        raise ValueError(
            "this game does not list its moves; name them with --env.moves, or an opponent with "
            "--env.opponent-fn MODULE:FUNCTION"
        )
    return draw.choice(moves)


class TwoPlayerConfig(vf.TasksetConfig):
    game: str = ""
    """TextArena's name of the game, such as `TicTacToe-v0`."""
    split: Literal["train", "eval"] = "train"
    """The splits have different seeds."""
    size: int = Field(1000, gt=0)
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the game's class."""


class TwoPlayerData(vf.TaskData):
    game: str
    seed: int
    first_seat: int
    """The seat of `player`, which alternates, so that the first move is no advantage."""
    options: dict[str, Any] = Field(default_factory=dict)


class TwoPlayerTask(vf.Task[TwoPlayerData, vf.State, vf.TaskConfig]):
    pass


class TwoPlayerTaskset(vf.Taskset[TwoPlayerTask, TwoPlayerConfig]):
    def load(self) -> Iterator[TwoPlayerTask]:
        config = self.config
        for i in range(config.size):
            seed = 2 * (config.seed * 1_000_003 + i // 2) + (config.split == "eval")
            data = TwoPlayerData(
                name=f"{config.game}#{seed}.{i % 2}",
                system_prompt=SYSTEM_PROMPT,
                game=config.game,
                seed=seed,
                first_seat=i % 2,
                options=config.options,
            )
            yield TwoPlayerTask(data, config.task)


class TwoPlayerEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    opponent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    """The model in the other seat; by default the policy."""
    play: Literal["fixed", "untrained", "self"] = "fixed"
    """The other seat's player: a program, the model of `opponent` untrained, or the policy, trained on both sides."""
    moves: list[str] = Field(default_factory=list)
    """For `fixed`: the moves to draw from, in games that do not list them."""
    opponent_fn: str | None = None
    """For `fixed`: `MODULE:FUNCTION`, called with (observation, random.Random), which returns the move."""


class TwoPlayerEnv(vf.Env[TwoPlayerEnvConfig]):
    async def setup(self, agents) -> None:
        agents.opponent.trainable = self.config.play == "self"

    async def run(self, task, agents) -> None:
        player_seat = task.data.first_seat
        for deal in range(DEALS):
            if await self._play(task, agents, player_seat, deal):
                return
            player_seat = 1 - player_seat
        raise RuntimeError(f"no trained seat had a move in {DEALS} games of {task.data.game}")

    async def _play(self, task, agents, player_seat: int, deal: int) -> bool:
        """Play one game. False if it ended before a trained seat had a move (by the other seat's invalid moves, or by
        chance): there is nothing to train then."""
        seed = task.data.seed + deal * BETWEEN_DEALS
        game = Game(task.data.game, seed, task.data.options)
        seats = {player_seat: agents.player}
        if self.config.play != "fixed":
            seats[1 - player_seat] = agents.opponent
        async with contextlib.AsyncExitStack() as stack:
            talks: dict[int, Any] = {}  # by seats that have moved
            fixed_move = self._fixed_opponent(seed)
            done = False
            while not done:
                seat, observation = game.observe()
                if seat not in seats:
                    done = game.step(fixed_move(observation))
                    continue
                if seat not in talks:
                    talks[seat] = await stack.enter_async_context(seats[seat].interaction(task))
                answer = await talks[seat].turn(observation)
                if answer.terminated:
                    raise RuntimeError(f"player {seat} was stopped before the game had ended")
                done = game.step(answer.last_reply)
            if not any(seats[seat].trainable for seat in talks):
                return False
            rewards, info = game.outcome()
            for seat, talk in talks.items():
                talk.trace.record_reward("game", rewards[seat], 1.0)
                talk.trace.record_metric("seat", float(seat))
                talk.trace.record_metric("dealt_again", float(deal))
                talk.trace.record_metric("invalid_move", float(bool(info[seat].get("invalid_move"))))
                talk.trace.info["outcome"] = str(info[seat].get("reason"))
            return True

    def _fixed_opponent(self, seed: int) -> Callable[[str], str]:
        draw = random.Random(f"opponent {seed}")
        if self.config.opponent_fn:
            play = plugged_fn(self.config.opponent_fn)
            return lambda observation: play(observation, draw)
        return lambda observation: random_move(observation, draw, self.config.moves)
