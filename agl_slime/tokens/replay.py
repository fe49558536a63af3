"""Routed experts and nuclei of turns, as span attributes and along a segment's tokens as in slime's Samples."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_slime.engine.client.replay import Nucleus, RoutedExperts
from agl_slime.errors import TraceError
from agl_slime.tokens import attributes as names
from agl_slime.tokens.codec import pack_array, unpack_token_ids
from agl_slime.tokens.replay_files import KINDS, FiledReplay
from agl_slime.tokens.turn import Turn


def replay_attributes(turn: Turn) -> dict[str, Any]:
    """The attributes of a turn's replay data; empty for a turn without any."""
    if turn.filed is not None:
        return {names.REPLAY_FILE: json.dumps(astuple(turn.filed))}
    attributes: dict[str, Any] = {}
    if turn.experts is not None:
        rows = np.ascontiguousarray(turn.experts.rows, dtype=KINDS[turn.experts.rows.itemsize])
        shape = [turn.experts.start, *rows.shape, rows.itemsize, zlib.crc32(rows.data)]
        attributes[names.EXPERTS] = base64.b64encode(rows.data).decode("ascii")
        attributes[names.EXPERTS_SHAPE] = json.dumps(shape)
    if turn.nucleus is not None:
        attributes[names.NUCLEUS_IDS] = pack_array(turn.nucleus.ids)
        attributes[names.NUCLEUS_OFFSETS] = pack_array(turn.nucleus.offsets)
    return attributes


def decode_replay(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """``experts`` and ``nucleus`` of a turn, or ``filed``, if it has them. Raises ``TraceError`` when they are
    damaged."""
    replay: dict[str, Any] = {}
    if names.REPLAY_FILE in attributes:
        try:
            *place, experts, nucleus = json.loads(attributes[names.REPLAY_FILE])
            shapes = [None if shape is None else tuple(shape) for shape in (experts, nucleus)]
            return {"filed": FiledReplay(*place, *shapes)}
        except (TypeError, ValueError, IndexError) as error:
            raise TraceError(f"{names.REPLAY_FILE} cannot be read: {error}") from error
    if names.EXPERTS in attributes:
        try:
            start, *shape, size, checksum = json.loads(attributes[names.EXPERTS_SHAPE])
            raw = base64.b64decode(attributes[names.EXPERTS])  # the checksum is the validation
            rows = np.frombuffer(raw, dtype=KINDS[size]).reshape(shape)
            whole = rows.ndim == 3 and start >= 0 and zlib.crc32(raw) == checksum
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{names.EXPERTS} cannot be read: {error}") from error
        if not whole:
            raise TraceError(f"{names.EXPERTS} does not match its checksum")
        replay["experts"] = RoutedExperts(start, rows)
    if names.NUCLEUS_IDS in attributes:
        ids, offsets = (
            unpack_token_ids(str(attributes.get(name)), name=name)
            for name in (names.NUCLEUS_IDS, names.NUCLEUS_OFFSETS)
        )
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
            raise TraceError(f"{names.NUCLEUS_OFFSETS} do not divide the {len(ids)} ids of {names.NUCLEUS_IDS}")
        replay["nucleus"] = Nucleus(ids, offsets)
    return replay


def experts_of(turns: Sequence[Turn], index: int) -> NDArray[Any] | None:
    """``[tokens - 1, layers, experts per token]`` of all tokens of turn number ``index`` but the last; ``None`` if
    some tokens have none. Rows that a turn lacks are in its base turn."""
    end, at, pieces = turns[index].length - 1, index, []
    while end > 0:
        turn = turns[at]
        if turn.experts is None or turn.experts.end < end:
            return None
        start = min(turn.experts.start, end)
        pieces.append(turn.experts.rows[: end - start])
        if not (end := start):
            break
        if turn.base_turn is None:
            return None
        at = turn.base_turn
    if not pieces:
        return None
    pieces.reverse()
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def nucleus_of(turns: Sequence[Turn], places: Sequence[tuple[int, int]], length: int) -> Nucleus | None:
    """The nucleus of ``length`` tokens, of which turn ``places[i][0]`` sampled the tokens from ``places[i][1]`` on;
    other tokens keep no ids. ``None`` where a turn has no nucleus."""
    counts, ids = np.zeros(length, dtype=np.int32), []
    for turn, start in places:
        nucleus = turns[turn].nucleus
        if nucleus is None:
            return None
        counts[start : start + len(nucleus)] = np.diff(nucleus.offsets)
        ids.append(nucleus.ids)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return Nucleus(np.concatenate(ids), offsets)
