"""Random conversations with images through our session, spans and converter, beside slime's own
``examples/geo3k_vlm_multi_turn`` on the same engine answers, field by field; then slime's manager's conversion.

python -m tests.programs.slime.images ROLLOUTS SEED

Of slime's example three things are set right here, which its commit or the newer transformers have wrong: it gives
log-probs for tokens of observations, which its ``Sample`` refuses; it asks the processor for no tensors in the first
prompt; and its observations begin without what a template writes after an answer, so the template here writes nothing.
"""

from __future__ import annotations

import asyncio
import base64
import io
import random
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from PIL import Image


def _pictures_of(messages: list[Any]) -> tuple[list[Any] | None, None]:
    shown = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
    return shown or None, None


sys.modules["qwen_vl_utils"] = vision = ModuleType("qwen_vl_utils")
vision.process_vision_info = _pictures_of  # type: ignore[attr-defined]

from examples.geo3k_vlm_multi_turn import rollout as slimes  # noqa: E402
from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv  # noqa: E402
from slime.ray.rollout import RolloutManager  # noqa: E402
from slime.utils.processing_utils import build_processor_kwargs  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

from agl_slime.agent.session import RolloutSession  # noqa: E402
from agl_slime.engine.client.generation import Generation, SamplingParams, parse_generation  # noqa: E402
from agl_slime.tokens.converter import convert_trajectory  # noqa: E402
from agl_slime.tokens.loading import load_tokenizer  # noqa: E402
from agl_slime.tokens.span_codec import decode_turns  # noqa: E402
from agl_slime.tokens.template import ChatTemplate  # noqa: E402
from agl_slime.tokens.trajectory import Trajectory  # noqa: E402
from agl_slime.train.slime.replay import with_train_inputs  # noqa: E402
from tests.harness.slime_programs import report  # noqa: E402
from tests.harness.vision import picture, save_qwen2_vl  # noqa: E402

SIZES = ((28, 28), (56, 28), (28, 84), (56, 56))
FIELDS = ("tokens", "response_length", "loss_mask", "rollout_log_probs", "response")


class Engine:
    """Answers as SGLang does, the same to the same prompt; ``sent`` is what it was shown with each."""

    def __init__(self, seed: int, tokenizer: Any) -> None:
        self.seed, self.tokenizer, self.sent = seed, tokenizer, list[tuple[list[int], list[bytes]]]()

    def answer(self, prompt: list[int], image_data: list[str]) -> dict[str, Any]:
        self.sent.append((prompt, [pixels(read(data)) for data in image_data]))
        rng = random.Random(hash((self.seed, *prompt)))
        ids = [rng.randrange(250) for _ in range(rng.randint(0, 5))] + [self.tokenizer.eos_token_id]
        meta = {
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "output_token_logprobs": [[-rng.randrange(1, 64) / 16, token, None] for token in ids],
            "prompt_tokens": len(prompt),
            "cached_tokens": 0,
            "weight_version": "1",
        }
        return {"text": self.tokenizer.decode(ids[:-1]), "meta_info": meta}

    async def generate(self, input_ids: Any, sampling: SamplingParams, *, images: Any = None, **_: Any) -> Generation:
        return parse_generation(self.answer([*input_ids], [*images.data] if images is not None else []))

    async def post(self, url: str, payload: dict[str, Any]) -> dict[str, Any]:
        return self.answer([*payload["input_ids"]], payload.get("image_data") or [])


class Env(BaseInteractionEnv):
    def __init__(self, turns: list[tuple[list[Any], str]]) -> None:
        self.left = list(turns)

    def reset(self) -> None:
        pass

    def step(self, response_text: str) -> Any:
        if not self.left:
            return None, True, None
        pictures, text = self.left.pop(0)
        return {"obs_str": text, "multi_modal_data": {"images": pictures} if pictures else {}}, False, None


def read(uri: str) -> Any:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def pixels(one: Any) -> bytes:
    return one.convert("RGB").tobytes()


def conversation(rng: random.Random) -> list[tuple[list[Any], str]]:
    """The pictures and the words of each turn; the first shows one at least, as slime's example does."""
    turns = []
    for number in range(rng.randint(1, 4)):
        files = [picture(rng.randrange(9), rng.choice(SIZES)) for _ in range(rng.randint(number == 0, 2))]
        turns.append(([Image.open(io.BytesIO(file)) for file in files], f"said {rng.randrange(99)}"))
    return turns


def message(turn: tuple[list[Any], str]) -> dict[str, Any]:
    pictures, text = turn
    parts = [{"type": "image", "image": one} for one in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


async def ours(turns: list[Any], engine: Engine, tokenizer: Any, number: int) -> Sample:
    spans: list[Any] = []
    session = RolloutSession(
        client=engine,
        template=ChatTemplate(tokenizer=tokenizer),
        sampling=SamplingParams(max_new_tokens=64),
        messages=[message(turns[0])],
        write=lambda attributes, _: spans.append(SimpleNamespace(attributes=attributes)),
    )
    await session.ask()
    for turn in turns[1:]:
        await session.ask(message(turn))
    made = Trajectory(rollout_id=str(number), attempt_id="1", task={}, turns=tuple(decode_turns(spans)), reward=1.0)
    conversion = convert_trajectory(made, tokenizer, index=number, rollout_id=number, group_index=0)
    (sample,) = with_train_inputs(conversion.samples, tokenizer)
    return sample


async def theirs(turns: list[Any], engine: Engine, tokenizer: Any, processor: Any) -> Sample:
    text = tokenizer.apply_chat_template([message(turns[0])], tokenize=False, add_generation_prompt=True)
    sample = Sample(prompt=text, multimodal_inputs={"images": list(turns[0][0]), "videos": None})
    slimes.GenerateState = lambda args: SimpleNamespace(tokenizer=tokenizer, processor=processor)
    slimes.post = engine.post
    args = Namespace(
        env=Env(turns[1:]),
        rollout_interaction_env_path=__file__,
        max_turns=len(turns),
        partial_rollout=False,
        sglang_router_ip="",
        sglang_router_port=0,
        rollout_max_context_len=100_000,
        apply_chat_template=True,
        apply_chat_template_kwargs={},
        use_rollout_routing_replay=False,
        rollout_top_p=1.0,
    )
    return await slimes.generate(args, sample, {"max_new_tokens": 64})


def build_env(sample: Any, args: Any) -> Env:
    return args.env


def _without_log_probs_of_observations() -> None:
    append = slimes._append_to_sample

    def corrected(*given: Any, loss_mask_val: int, **more: Any) -> None:
        *others, log_probs = given
        append(*others, log_probs if loss_mask_val else None, loss_mask_val=loss_mask_val, **more)

    slimes._append_to_sample = corrected


def with_tensors_of_images(processor: Any) -> Any:
    return lambda text, **given: processor(text=text, **{**build_processor_kwargs(given), **given})


def differences(a: Sample, b: Sample) -> list[str]:
    found = [name for name in FIELDS if getattr(a, name) != getattr(b, name)]
    shown = [[pixels(one) for one in each.multimodal_inputs["images"]] for each in (a, b)]
    if shown[0] != shown[1] or a.multimodal_inputs.keys() != b.multimodal_inputs.keys():
        found.append("multimodal_inputs")
    one, two = a.multimodal_train_inputs, b.multimodal_train_inputs
    if one.keys() != two.keys() or not all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    ):
        found.append("multimodal_train_inputs")
    return found


async def compare(rollouts: int, seed: int) -> dict[str, Any]:
    _without_log_probs_of_observations()
    with tempfile.TemporaryDirectory() as directory:
        path = save_qwen2_vl(Path(directory))
        tokenizer = load_tokenizer(str(path))
        tokenizer._tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n", "<|im_end|>")
        processor = with_tensors_of_images(tokenizer._processor)
        convert = RolloutManager.__ray_metadata__.modified_class._convert_samples_to_train_data
        counts = {"rollouts": 0, "turns": 0, "images": 0, "converted": 0}
        different: list[Any] = []
        for number in range(rollouts):
            turns = conversation(random.Random(seed * 1_000_003 + number))
            one, two = (Engine(number, tokenizer._tokenizer) for _ in range(2))
            a = await ours(turns, one, tokenizer, number)
            b = await theirs(turns, two, tokenizer._tokenizer, processor)
            found = differences(a, b)
            if one.sent != two.sent:
                found.append("what the engine was sent")
            if found:
                different.append([number, found])
            manager = SimpleNamespace(
                args=Namespace(use_rollout_routing_replay=False, rollout_top_p=1.0),
                custom_convert_samples_to_train_data_func=None,
                _post_process_rewards=lambda given: ([1.0] * len(given), [1.0] * len(given)),
            )
            data = convert(manager, [a])
            counts["converted"] += data["multimodal_train_inputs"] == [a.multimodal_train_inputs]
            counts["rollouts"] += 1
            counts["turns"] += len(turns)
            counts["images"] += len(a.multimodal_inputs["images"])
    return {**counts, "different": different[:10], "n_different": len(different)}


if __name__ == "__main__":
    report(asyncio.run(compare(int(sys.argv[1]), int(sys.argv[2]))))
