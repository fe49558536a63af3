"""Log-probs that recorded tokens would have under one fault each: of the sampling convention, the routing, the
positions in images, the token ids, the weights, or the arithmetic. Plain forward passes of one sequence at a time, in
float32 unless the fault is the format.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_slime.engine.experts import routers_of
from agl_slime.errors import TrainerError
from agl_slime.tools.forensics.faults import (
    Edited,
    end_marks,
    insert,
    line_ends,
    position_faults,
    remove,
    thinking_blocks,
    with_prompt,
)
from agl_slime.tools.forensics.gaps import Candidate, Conditions, KeptSample, mean_gap
from agl_slime.train.local.loss import token_log_probs
from agl_slime.train.local.model import force_experts, load_model

Scores = list[NDArray[np.float32]]

_TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0)
_PADDED_TO = 128  # Megatron's default, times the tensor-parallel ranks
_NUCLEI = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)
_TOP_KS = (10, 20, 40, 50, 100)
_ROPE_THETAS, _ROPE_FACTORS = (10_000.0, 500_000.0, 1_000_000.0), (2.0, 4.0, 8.0)
_ROPE_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_MOST_POSITIONS = 128  # at which a token is left out, or added, one forward pass each
_LIKELY = ("\n", " ", "\n\n")


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """Inputs of a forward pass: ``ids``, of which those at ``places`` are scored, the ``experts`` that the routers pick
    (a negative one, or ``None``, is the router's own choice), and images with M-RoPE's ``positions`` ``[rows,
    len(ids)]`` (``None``: the model's own)."""

    ids: NDArray[np.int64]
    places: NDArray[np.int64]
    experts: NDArray[Any] | None = None
    images: Mapping[str, NDArray[Any]] | None = None
    positions: NDArray[np.int64] | None = None

    def edited(self, ids: NDArray[np.int64], places: NDArray[np.int64]) -> _Inputs:
        """With other ids, which the model routes and places itself."""
        return _Inputs(ids=ids, places=places, images=self.images)


class Counterfactuals:
    """The model in ``directory``, which should have sampled the ``samples``, and the faults that may have
    happened."""

    def __init__(
        self,
        directory: Path,
        samples: Sequence[KeptSample],
        *,
        conditions: Conditions,
        tokenizer: Any = None,
    ) -> None:
        self._directory = directory
        self.model = self._load(directory)
        self._samples, self._conditions = samples, conditions
        self._check()
        self._passes = [
            _Inputs(ids=sample.ids, places=sample.places, experts=sample.experts, images=sample.images or None)
            for sample in samples
        ]
        self._tokenizer = tokenizer
        try:
            self.expected = self._score_all(self.model)
            """The log-probs as they should be."""
        except Exception as error:  # of the model's own code, which also raises StopIteration here
            if not any(inputs.images for inputs in self._passes):
                raise
            raise TrainerError(f"{directory} does not fit the images of the Samples: {error}") from error

    def faults(self, recorded: Sequence[NDArray[Any]]) -> Iterator[Candidate]:
        """The faults, simplest first; each is computed when it is drawn. ``recorded`` are the log-probs to explain, by
        which unknown places are searched for."""
        yield from self._conventions()
        yield from self._routing()
        yield from self._image_positions()
        yield from self._token_faults()
        yield from self._weight_faults()
        yield from self._arithmetic()
        yield from self._single_tokens(recorded)

    def _check(self) -> None:
        """Raise ``TrainerError`` for token ids or experts that the model does not have."""
        embedded = self.model.get_input_embeddings().weight.shape[0]
        experts = next((int(router.num_experts) for router in routers_of(self.model).values()), 0)
        for sample in self._samples:
            routed = int(sample.experts.max()) if sample.experts is not None and sample.experts.size else -1
            for highest, count, unit in ((int(sample.ids.max()), embedded, "token ids"), (routed, experts, "experts")):
                if highest >= count:
                    raise TrainerError(f"{self._directory} has {count} {unit}, and a Sample has number {highest}")

    # -- the sampling convention --------------------------------------------------------------------------------------

    def _conventions(self) -> Iterator[Candidate]:
        usual, top_p, top_k = self._conditions.temperature, self._conditions.top_p, self._conditions.top_k
        ways: dict[tuple[str, str], tuple[float, float, int]] = {}
        for t in _TEMPERATURES:
            if t != usual:
                ways["temperature", f"the log-probs are at temperature {t:g} and not {usual:g}"] = (t, top_p, top_k)
        if (top_p, top_k) != (1.0, -1):
            ways["nucleus", "the log-probs are of the whole vocabulary and not of the nucleus"] = (usual, 1.0, -1)
        else:
            text = "the log-probs are of a nucleus with {} and not of the whole vocabulary"
            ways |= {("nucleus", text.format(f"top_p {p:g}")): (usual, p, -1) for p in _NUCLEI}
            ways |= {("nucleus", text.format(f"top_k {k}")): (usual, 1.0, k) for k in _TOP_KS}
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        padding = {-vocabulary % (_PADDED_TO * ranks) for ranks in (1, 2, 4, 8)} - {0}
        text = "the softmax includes {} rows of a padded vocabulary (Megatron's --make-vocab-size-divisible-by)"
        padded = {("padded_vocabulary", text.format(rows)): rows for rows in sorted(padding)}
        scores: dict[tuple[str, str], Scores] = {way: [] for way in (*ways, *padded)}
        for inputs in self._passes:
            logits, targets = self._logits(inputs), self._targets(inputs)
            for way, sampling in ways.items():
                scores[way].append(_log_probs(logits, targets, *sampling))
            for way, rows in padded.items():  # the rows are 0 when slime loads a checkpoint
                with_rows = torch.nn.functional.pad(logits, (0, rows))
                scores[way].append(_log_probs(with_rows, targets, usual, top_p, top_k))
        for (name, text), values in scores.items():
            yield Candidate(name, text, values)
        for step, neighbour in ((1, "the next"), (-1, "the last")):
            shifted = [np.roll(values, -step) for values in self.expected]
            yield Candidate("shift", f"each log-prob is of {neighbour} token's place", shifted)

    # -- routed experts -----------------------------------------------------------------------------------------------

    def _routing(self) -> Iterator[Candidate]:
        """The engine used other experts than recorded."""
        if all(inputs.experts is None for inputs in self._passes):
            return
        ways: dict[str, Callable[[NDArray[np.int64]], NDArray[np.int64] | None]] = {
            "the experts that are recorded for the token before": lambda experts: _moved(experts, 1, axis=0),
            "the experts that are recorded for the next token": lambda experts: _moved(experts, -1, axis=0),
            "the experts that are recorded for the layer before": lambda experts: _moved(experts, 1, axis=1),
            "the experts that are recorded for the next layer": lambda experts: _moved(experts, -1, axis=1),
            "the router's own choice and not the recorded experts": lambda _: None,
        }
        for text, change in ways.items():
            changed = [
                inputs if inputs.experts is None else replace(inputs, experts=change(inputs.experts.astype(np.int64)))
                for inputs in self._passes
            ]
            yield Candidate("routing", f"the engine used {text}", [self._score(inputs) for inputs in changed])

    # -- images -------------------------------------------------------------------------------------------------------

    def _image_positions(self) -> Iterator[Candidate]:
        """The engine had other positions in M-RoPE's rows, of time, height and width."""
        positions = [self._positions(inputs) for inputs in self._passes]
        if all(rows is None for rows in positions):
            return
        columns = [*zip(self._passes, self._samples, positions, strict=True)]
        for text, change in position_faults():
            changed = [
                inputs
                if rows is None
                else replace(inputs, positions=change(rows, self._kinds(inputs.ids) > 0, sample.prompt_length))
                for inputs, sample, rows in columns
            ]
            yield Candidate("image_positions", f"the engine {text}", [self._score(inputs) for inputs in changed])

    def _positions(self, inputs: _Inputs) -> NDArray[np.int64] | None:
        """M-RoPE's rows as the model computes them; ``None`` for other models, and without images."""
        compute = getattr(self.model.base_model, "get_rope_index", None)
        if compute is None or inputs.images is None:
            return None
        features = {"mm_token_type_ids": self._kinds(inputs.ids)[None], **inputs.images}
        names = inspect.signature(compute).parameters
        tensors = {name: torch.from_numpy(value) for name, value in features.items() if name in names}
        return compute(torch.from_numpy(inputs.ids)[None], **tensors)[0][:, 0].numpy()

    def _kinds(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """1 for the tokens of images, 2 for tokens of videos, 0 for text."""
        kinds = np.zeros_like(ids)
        for kind, name in enumerate(("image_token_id", "video_token_id"), 1):
            kinds[ids == getattr(self.model.config, name, None)] = kind
        return kinds

    def _same_images(self, ids: NDArray[np.int64], edited: NDArray[np.int64]) -> bool:
        """Whether both have the tokens of the same images, image by image."""
        edges = [np.flatnonzero(np.diff(self._kinds(ids), prepend=0, append=0)) for ids in (ids, edited)]
        ours, theirs = (np.diff(each.reshape(-1, 2)) for each in edges)
        return np.array_equal(ours, theirs)

    # -- token ids ----------------------------------------------------------------------------------------------------

    def _token_faults(self) -> Iterator[Candidate]:
        ends, begin = self._end_ids(), getattr(self._tokenizer, "bos_token_id", None)
        begins = {int(sample.ids[0]) for sample in self._samples}
        first = begin if begin is not None else begins.pop() if len(begins) == 1 else None
        if first is not None:
            text = "the engine was asked with a second first token (a double BOS)"
            if begin is not None and begins != {begin}:
                text = "the engine was asked with a BOS token that the records lack"
            yield Candidate("double_bos", text, self._inserted(lambda _: 0, int(first)))
            yield Candidate("missing_bos", "the engine was asked without the first token", self._without(lambda _: [0]))
        text = "the engine was asked without the end marks of earlier messages"
        yield Candidate("end_mark", text, self._without(lambda sample: end_marks(sample, ends)))
        text = "the engine was asked without the line ends after earlier messages"
        yield Candidate("newline", text, self._without(lambda sample: line_ends(sample, ends)))
        if (thinking := self._thinking()) is not None:
            text = "the engine was asked without the thinking of earlier turns"
            yield Candidate("thinking", text, self._without(lambda sample: thinking_blocks(sample, *thinking)))
        for name, text, render in self._conditions.renderings:
            rendered = [render(sample) for sample in self._samples]
            if any(ids is not None for ids in rendered):
                edited = self._edited(lambda sample, n, rendered=rendered: with_prompt(sample, rendered[n]))
                yield Candidate(name, text, edited)

    def _single_tokens(self, records: Sequence[NDArray[Any]]) -> Iterator[Candidate]:
        """One token more or less at an unknown place, which is searched for in the sequence with the largest gap."""
        gaps = [mean_gap([a], [b]) for a, b in zip(records, self.expected, strict=True)]
        worst = int(np.argmax(gaps))
        sample, recorded, expected = self._samples[worst], records[worst], self.expected[worst]
        wrong = np.flatnonzero(np.abs(recorded - expected) > max(1e-3, gaps[worst] / 10))
        end = int(sample.places[wrong[0]]) if len(wrong) else sample.prompt_length
        sampled = {*sample.places.tolist()}
        written = {*np.flatnonzero(self._kinds(sample.ids) == 0).tolist()}
        free = [place for place in range(end) if place in written - sampled][-_MOST_POSITIONS:]

        def gap_after_edit(ids: NDArray[np.int64], places: NDArray[np.int64]) -> float:
            return mean_gap([self._score(self._passes[worst].edited(ids, places))], [recorded])

        def clauses(place: int) -> Iterator[tuple[str, Callable[[KeptSample], int]]]:
            yield f"{place} from the start", lambda _: place
            back = sample.prompt_length - place
            yield f"{back} before the answer", lambda sample: sample.prompt_length - back

        if free:
            place = min(free, key=lambda place: gap_after_edit(*remove(sample, [place])[:2]))
            for where_text, find_place in clauses(place):
                text = f"the engine was asked without the token at place {where_text}"
                removed = self._without(lambda sample, find_place=find_place: [find_place(sample)])
                yield Candidate("token_removed", text, removed)
        special = {*getattr(self._tokenizer, "get_added_vocab", dict)().values()}
        edges = {0, min(sample.prompt_length, end)}
        edges |= {p + d for p in free if int(sample.ids[p]) in special for d in range(4) if p + d <= end}
        edges = {place for place in edges if {place - 1, place} & written}  # not within an image
        added = [(place, token) for place in sorted(edges)[-_MOST_POSITIONS // 4 :] for token in self._likely()]
        if added:
            place, token = min(added, key=lambda pair: gap_after_edit(*insert(sample, *pair)[:2]))
            piece = self._tokenizer.decode([token])
            for where_text, find_place in clauses(place):
                text = f"the engine was asked with a further token {piece!r} at place {where_text}"
                yield Candidate("token_inserted", text, self._inserted(find_place, token))

    def _inserted(self, place: Callable[[KeptSample], int], token: int) -> Scores:
        return self._edited(lambda sample, _: insert(sample, place(sample), token))

    def _without(self, places: Callable[[KeptSample], Sequence[int]]) -> Scores:
        return self._edited(lambda sample, _: remove(sample, places(sample)))

    def _edited(self, edit: Callable[[KeptSample, int], Edited]) -> Scores:
        """The scores of edited Samples. An edit that changes the tokens of images is none."""
        scores: Scores = []
        for number, (sample, expected) in enumerate(zip(self._samples, self.expected, strict=True)):
            ids, places, remaining = edit(sample, number)
            if np.array_equal(ids, sample.ids) or not self._same_images(ids, sample.ids):
                scores.append(expected)
                continue
            values = expected.copy()
            values[remaining] = self._score(self._passes[number].edited(ids, places))
            scores.append(values)
        return scores

    def _end_ids(self) -> set[int]:
        config = getattr(self.model.generation_config, "eos_token_id", None) or self.model.config.eos_token_id
        ids = config if isinstance(config, (list, tuple)) else [config]
        return {int(i) for i in (*ids, getattr(self._tokenizer, "eos_token_id", None)) if i is not None}

    def _thinking(self) -> tuple[int, int] | None:
        vocabulary = self._tokenizer.get_vocab() if self._tokenizer is not None else {}
        pair = vocabulary.get("<think>"), vocabulary.get("</think>")
        return pair if None not in pair else None  # type: ignore[return-value]

    def _likely(self) -> list[int]:
        if self._tokenizer is None:
            return []
        texts = (self._tokenizer.encode(text, add_special_tokens=False) for text in _LIKELY)
        ids = [encoded[0] for encoded in texts if len(encoded) == 1]
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids += [i for n in names if (i := getattr(self._tokenizer, n, None)) is not None]
        return [i for i in dict.fromkeys(ids) if not self._kinds(np.array([i])).any()]

    # -- weights ------------------------------------------------------------------------------------------------------

    def _weight_faults(self) -> Iterator[Candidate]:
        if (base := self._conditions.without_adapter) is not None:
            scores = self._score_all(self._load(base))
            yield Candidate("adapter", "the engine had the base model without the adapter", scores)
        for name, directory in self._conditions.other_weights.items():
            stale = self._load(directory)
            yield Candidate("late_weights", f"the engine had {name}", self._score_all(stale))
            scores = [self._score_with_prefix(*pair, stale) for pair in zip(self._passes, self._samples, strict=True)]
            yield Candidate("stale_cache", f"the prompt's KV cache was of {name}", scores)
            yield from self._partial(name, stale)

    def _partial(self, name: str, stale: Any) -> Iterator[Candidate]:
        """One group of weights (a layer, the embedding, ...) is of the other version."""
        mine, theirs = self.model.state_dict(), stale.state_dict()
        groups: dict[str, list[str]] = {}
        for key in mine:
            if key in theirs and not torch.equal(mine[key], theirs[key]):
                groups.setdefault(_group(key), []).append(key)
        for group, keys in groups.items() if len(groups) > 1 else ():
            saved = {key: mine[key].clone() for key in keys}
            with torch.no_grad():
                for key in keys:
                    mine[key].copy_(theirs[key])
                scores = self._score_all(self.model)
                for key in keys:
                    mine[key].copy_(saved[key])
            yield Candidate("partial_weights", f"the weights of {group} were still as in {name}", scores)

    # -- arithmetic ---------------------------------------------------------------------------------------------------

    def _arithmetic(self) -> Iterator[Candidate]:
        scores = []
        for inputs in self._passes:
            output = self._forward(inputs, self.model, self.model.base_model)
            hidden = output.last_hidden_state[0, torch.from_numpy(inputs.places - 1)]
            head = self.model.get_output_embeddings().weight
            logits = hidden.bfloat16() @ head.bfloat16().t()
            scores.append(self._log_probs(logits.float(), inputs))
        yield Candidate("bf16_head", "the output layer computed in bfloat16", scores)
        low = self._load(self._directory).bfloat16()
        yield Candidate("bf16", "the engine computed in bfloat16", self._score_all(low))
        del low
        rope = dict(getattr(self.model.config.get_text_config(), "rope_parameters", None) or {})
        if "rope_theta" not in rope:
            return
        variants = [{**rope, "rope_theta": theta} for theta in _ROPE_THETAS]
        plain = {**{name: rope[name] for name in _ROPE_KEPT if name in rope}, "rope_type": "default"}
        variants += [plain, *({**plain, "rope_type": "linear", "factor": factor} for factor in _ROPE_FACTORS)]
        for variant in variants:
            if variant == rope:
                continue
            config = copy.deepcopy(self.model.config)
            config.get_text_config().rope_parameters = variant
            scaled = type(self.model)(config).eval()
            scaled.load_state_dict(self.model.state_dict(), strict=False)
            changes = ", ".join(f"{key} {value}" for key, value in variant.items() if rope.get(key) != value)
            text = f"the engine had other rotary embeddings ({changes or 'no scaling'})"
            yield Candidate("rope", text, self._score_all(scaled))

    # -- forward passes -----------------------------------------------------------------------------------------------

    def _load(self, directory: Path) -> Any:
        return load_model(directory, device=torch.device("cpu"), images=True).requires_grad_(False)

    def _score_all(self, model: Any) -> Scores:
        return [self._score(inputs, model) for inputs in self._passes]

    def _score(self, inputs: _Inputs, model: Any = None) -> NDArray[np.float32]:
        return self._log_probs(self._logits(inputs, model), inputs)

    def _log_probs(self, logits: Tensor, inputs: _Inputs) -> NDArray[np.float32]:
        conditions = self._conditions
        return _log_probs(logits, self._targets(inputs), conditions.temperature, conditions.top_p, conditions.top_k)

    def _targets(self, inputs: _Inputs) -> Tensor:
        return torch.from_numpy(inputs.ids[inputs.places])

    def _logits(self, inputs: _Inputs, model: Any = None) -> Tensor:
        logits = self._forward(inputs, model or self.model).logits
        return logits[0, torch.from_numpy(inputs.places - 1)].float()

    @torch.no_grad()
    def _forward(
        self, inputs: _Inputs, model: Any, body: Any = None, *, start: int = 0, end: int = 0, **cache: Any
    ) -> Any:
        """The output of ``model``, or its ``body``, for the ids from ``start`` to ``end``, by default to the last
        scored one, or to the last of images."""
        part = slice(start, end or (int(inputs.places[-1]) if inputs.images is None else len(inputs.ids)))
        arguments = {"input_ids": inputs.ids[None, part]}
        if inputs.images is not None and start == 0:
            arguments |= inputs.images
            if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
                arguments["mm_token_type_ids"] = self._kinds(inputs.ids)[None, part]
        if (positions := self._positions(inputs) if inputs.positions is None else inputs.positions) is not None:
            arguments["position_ids"] = positions[:, None, part]
        tensors = {name: torch.from_numpy(value) for name, value in arguments.items()}
        tensors = {name: t.to(model.dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        experts = None if inputs.experts is None else torch.from_numpy(inputs.experts[part].astype(np.int64))
        force_experts(model, experts)
        return (body or model)(**tensors, **{"use_cache": False, **cache})

    def _score_with_prefix(self, inputs: _Inputs, sample: KeptSample, stale: Any) -> NDArray[np.float32]:
        """With the KV cache of all but the prompt's last token computed by ``stale``."""
        split = sample.prompt_length - 1
        if split < 1 or not self._same_images(inputs.ids[:split], inputs.ids):  # images of later turns
            return self._score(inputs)
        cache = self._forward(inputs, stale, end=split, use_cache=True).past_key_values
        logits = self._forward(inputs, self.model, start=split, past_key_values=cache, use_cache=True).logits
        return self._log_probs(logits[0, torch.from_numpy(inputs.places - 1 - split)].float(), inputs)


def _log_probs(logits: Tensor, targets: Tensor, temperature: float, top_p: float, top_k: int) -> NDArray[np.float32]:
    """At a temperature, of the tokens that top_k and top_p keep (in SGLang's order: top_k first) and the target."""
    if (top_p, top_k) != (1.0, -1):
        ordered, order = (logits / temperature).sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        out = torch.arange(logits.shape[-1], device=logits.device) >= (top_k if top_k > 0 else logits.shape[-1])
        out = out | (probabilities.cumsum(-1) - probabilities > top_p)
        out = torch.zeros_like(out.expand_as(logits)).scatter(-1, order, out.expand_as(logits))
        out[torch.arange(len(targets)), targets] = False
        logits = logits.masked_fill(out, -1e30)
    return token_log_probs(logits, targets, temperature=temperature).cpu().numpy()


def _moved(experts: NDArray[np.int64], step: int, *, axis: int) -> NDArray[np.int64]:
    """The experts of each token or layer, ``step`` further on; the router's own choice where there are none."""
    moved = np.moveaxis(np.roll(experts, step, axis=axis), axis, 0)
    moved[slice(step) if step > 0 else slice(step, None)] = -1
    return np.moveaxis(moved, 0, axis)


def _group(key: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` is of ``layers.3``."""
    words = key.split(".")
    number = next((i for i, word in enumerate(words) if word.isdecimal()), None)
    return ".".join((words[-2:-1] or words) if number is None else words[max(0, number - 1) : number + 1])
