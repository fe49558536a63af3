"""Images in prompts and from tools: one Sample holds them with the sampled tokens."""

import io
from typing import Any

from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.tokens.images import MARK, ImageSettings
from agl_slime.train.slime.replay import in_slimes_form
from agl_slime.types import sample_from_json, sample_to_json
from tests.harness.engine_faults import Abort
from tests.harness.gateway import QUICK, engine_saying
from tests.harness.loop_thread import in_thread
from tests.harness.rollouts import Finished, run_rollouts
from tests.harness.tokenizers import small_tokenizer
from tests.harness.vision import expand, picture, uri, vision_tokenizer

CALL = '<tool_call>\n{"name": "zoom", "arguments": {"place": "top"}}\n</tool_call>'
SEEN = picture(1)


def opened(data: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data))


def zoom(place: str) -> list[Any]:
    """Look closer."""
    return [f"the {place}:", opened(picture(2, (28, 56)))]


class Looker(SGLangLitAgent):
    tools = [zoom]
    max_turns = 4

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        content = [{"type": "text", "text": "Which colour? "}, {"type": "image", "image": opened(SEEN)}]
        return [{"role": "user", "content": content}]

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0


async def looked(
    agent: type[SGLangLitAgent], *says: str, faults: Any = (), tokenizer: Any = None
) -> tuple[Finished, Any]:
    tokenizer = tokenizer or vision_tokenizer()
    engine = engine_saying(tokenizer, says, expand=expand)
    engine.script("/generate", *faults)
    with in_thread(engine):
        looker = agent(tokenizer=tokenizer, client_settings=QUICK)
        (finished,) = await run_rollouts(looker, [{}], endpoint=engine.url, max_new_tokens=256)
    return finished, [request.payload for request in engine.received if request.path == "/generate"]


async def test_images_of_prompt_and_tools_are_in_one_sample_in_order() -> None:
    finished, payloads = await looked(Looker, f"Let me see. {CALL}", "Red.")
    assert finished.failure is None
    (sample,) = finished.convert(vision_tokenizer()).samples
    assert [len(payload["image_data"]) for payload in payloads] == [1, 2]
    images = sample.multimodal_inputs["images"]
    assert [image.size for image in images] == [(56, 28), (28, 56)]
    assert images[0].convert("RGB").tobytes() == opened(SEEN).tobytes()
    turns = finished.convert(None).trajectory.turns
    assert expand(payloads[1]["input_ids"], payloads[1]["image_data"]) == turns[1].prompt_ids.tolist()
    assert turns[1].token_ids.tolist() == sample.tokens
    assert sum(sample.loss_mask) == sum(len(turn.response_ids) for turn in turns)
    assert "the top:<image>" in vision_tokenizer().decode(sample.tokens)
    assert turns[0].messages is not None  # which have a mark in the place of the picture
    assert MARK.findall(turns[0].messages[0]["content"]) == [turns[0].images[0].sha]

    restored = sample_from_json(sample_to_json(in_slimes_form([sample], vision_tokenizer())[0]))
    assert len(sample.multimodal_train_inputs["pixel_values"]) == 2
    assert restored.multimodal_train_inputs is None
    in_slimes_form([restored], vision_tokenizer())
    for name, tensor in sample.multimodal_train_inputs.items():
        assert tensor.equal(restored.multimodal_train_inputs[name])
    assert [image.tobytes() for image in restored.multimodal_inputs["images"]] == [image.tobytes() for image in images]


async def test_answer_cut_by_a_weight_update_resumes_with_the_same_images() -> None:
    """The two rollouts are of one group, too: they share one image and one tensor of pixels."""
    whole, _ = await looked(Looker, "It is a very red one.")
    cut, (first, second) = await looked(Looker, "It is a very red one.", faults=[Abort(2)])
    assert second["image_data"] == first["image_data"]
    assert second["input_ids"][: len(first["input_ids"])] == first["input_ids"]
    assert len(second["input_ids"]) == len(first["input_ids"]) + 2
    conversions = [finished.convert(None) for finished in (whole, cut)]
    samples = [sample for conversion in conversions for sample in conversion.samples]
    assert samples[0].tokens == samples[1].tokens
    assert samples[0].rollout_log_probs == samples[1].rollout_log_probs
    images = [turn.images[0] for conversion in conversions for turn in conversion.trajectory.turns]
    assert images[0] is images[1]
    in_slimes_form(samples, vision_tokenizer())
    pixels = [sample.multimodal_train_inputs["pixel_values"] for sample in samples]
    assert pixels[0] is pixels[1]


async def test_invalid_image_fails_the_rollout_with_the_reason() -> None:
    class Small(Looker):
        image_settings = ImageSettings(max_megapixels=0.001)

        def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"role": "user", "content": [{"type": "image", "image": uri(SEEN)}]}]

    finished, payloads = await looked(Small, "Red.")
    assert finished.failure is not None
    assert "max_megapixels is 0.001" in finished.failure[1]
    blind, _ = await looked(Looker, "Red.", tokenizer=small_tokenizer())
    assert blind.failure is not None
    assert "has no processor" in blind.failure[1]
    assert not payloads
