"""TextArena's games for two: against a fixed opponent, the policy untrained, or itself with both seats trained.

The game runs in this process, its observations are the players' user turns, and each seat's reward is the library's
own. TextArena draws from the process-wide ``random``; here each game has a generator of its own, so that games played
at once neither share nor disturb one.
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

from agl_slime.environments.tasksets.chat import ChatHarness

try:
    import textarena  # noqa: F401 (fills the registry)
    from textarena.core import GAME_ID
    from textarena.envs.registration import ENV_REGISTRY, make
except ImportError as e:
    raise ImportError("The taskset textarena needs its package: pip install textarena") from e

__all__ = ["ChatHarness", "TwoPlayerEnv", "TwoPlayerTaskset"]

SYSTEM_PROMPT = (
    "You play a game against another player. Read the rules, think briefly, and end each reply with one move in "
    "square brackets, in the format that the game asks for."
)

DEALS = 8
"""Games of one task at most, where no trained seat has had a move. Each has the seats the other way round: in most
games the same seat begins."""
BETWEEN_DEALS = 1_000_000
"""Between their seeds: even, as a seed's parity is its split."""


class _PerGame:
    """Stands where TextArena's modules have ``random``: the generator of the game that is being stepped."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_generator.get(), name)


_generator: ContextVar[random.Random] = ContextVar("textarena_generator")
_PER_GAME = _PerGame()


class Game:
    """One game of TextArena, with its own random numbers."""

    def __init__(self, name: str, seed: int, options: dict[str, Any]) -> None:
        raw = name if name.endswith("-raw") else f"{name.removesuffix('-train')}-raw"
        if raw not in ENV_REGISTRY:
            raise ValueError(f"TextArena has no game {name!r}; it has {', '.join(sorted(_GAMES()))}")
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
            raise ValueError(f"TextArena's {name} is a game for {players}, and this taskset's are for two")

    @contextlib.contextmanager
    def _playing(self) -> Iterator[None]:
        token = _generator.set(self._random)
        try:
            yield
        finally:
            _generator.reset(token)

    def observe(self) -> tuple[int, str]:
        """Whose turn it is, and what this player has not been told yet."""
        with self._playing():
            seat, news = self._game.get_observation()
        names = self._game.state.role_mapping
        told = [f"[{'GAME' if who == GAME_ID else names.get(who, f'Player {who}')}] {text}" for who, text, _ in news]
        return seat, "\n".join(told)

    def step(self, action: str) -> bool:
        with self._playing():
            return bool(self._game.step(action)[0])

    def outcome(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        rewards, info = self._game.close()
        return {seat: float(reward) for seat, reward in rewards.items()}, info


def _GAMES() -> list[str]:
    return [key for key in ENV_REGISTRY if not key.endswith(("-raw", "-train"))]


def random_move(observation: str, draw: random.Random, moves: list[str] | None = None) -> str:
    """One of `moves`, or of those that the observation lists last as available."""
    if not moves:
        listed = re.findall(r"(?im)^.*(?:available|valid|legal|possible|options|choice)\b.*\[.*$", observation)
        last = re.sub(r"^\[(?:GAME|Player \d+)\] ", "", listed[-1]) if listed else ""  # who says it is no move
        moves = [m for m in re.findall(r"\[[^\[\]]+\]", last) if not re.search(r"\b[A-Z]\b", m)]
    if not moves:
        raise ValueError(
            "this game does not list its moves; name them with --env.moves, or an opponent with "
            "--env.opponent-fn MODULE:FUNCTION"
        )
    return draw.choice(moves)


class TwoPlayerConfig(vf.TasksetConfig):
    game: str = ""
    """TextArena's name of the game, as `TicTacToe-v0`."""
    split: Literal["train", "eval"] = "train"
    """Evaluation's seeds are never training's."""
    size: int = Field(1000, gt=0)
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)
    """More options of the game, as its class takes them."""


class TwoPlayerData(vf.TaskData):
    game: str
    seed: int
    first_seat: int
    """The seat of `player`: it plays both in turn, so that moving first is no advantage."""
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
    """The other seat, where a model plays it; its `model` and `client` may be others than the policy's."""
    play: Literal["fixed", "untrained", "self"] = "fixed"
    """Who has the other seat: a program, the model of `opponent` (the policy, unless it names one) untrained, or the
    policy trained on both sides."""
    moves: list[str] = Field(default_factory=list)
    """For `fixed`: what it draws from, in games that do not list their moves."""
    opponent_fn: str | None = None
    """For `fixed`: `MODULE:FUNCTION` of (observation, random.Random), which returns the move."""


class TwoPlayerEnv(vf.Env[TwoPlayerEnvConfig]):
    async def setup(self, agents) -> None:
        agents.opponent.trainable = self.config.play == "self"

    async def run(self, task, agents) -> None:
        mine = task.data.first_seat
        for deal in range(DEALS):
            if await self._play(task, agents, mine, deal):
                return
            mine = 1 - mine
        raise RuntimeError(f"no trained seat had a move in {DEALS} games of {task.data.game}")

    async def _play(self, task, agents, mine: int, deal: int) -> bool:
        """One game. False where it ended before a trained seat had moved, by invalid moves of the other one or by luck:
        there is nothing to train in it, whatever it came to."""
        seed = task.data.seed + deal * BETWEEN_DEALS
        game = Game(task.data.game, seed, task.data.options)
        seats = {mine: agents.player, **({1 - mine: agents.opponent} if self.config.play != "fixed" else {})}
        async with contextlib.AsyncExitStack() as stack:
            talks: dict[int, Any] = {}  # of seats that have moved
            fixed = self._fixed(seed)
            done = False
            while not done:
                seat, news = game.observe()
                if seat not in seats:
                    done = game.step(fixed(news))
                    continue
                if seat not in talks:
                    talks[seat] = await stack.enter_async_context(seats[seat].interaction(task))
                said = await talks[seat].turn(news)
                if said.terminated:
                    raise RuntimeError(f"player {seat} was stopped before the game had ended")
                done = game.step(said.last_reply)
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

    def _fixed(self, seed: int) -> Callable[[str], str]:
        draw = random.Random(f"opponent {seed}")
        if self.config.opponent_fn:
            play = plugged_fn(self.config.opponent_fn)
            return lambda observation: play(observation, draw)
        return lambda observation: random_move(observation, draw, self.config.moves)
