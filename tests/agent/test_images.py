"""Images that agents show: pictures in prompts and from tools, in one Sample with what was sampled."""

from __future__ import annotations

import io
from typing import Any

from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.agent.session import RolloutSession
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.tokens.images import MARK, ImageSettings
from agl_slime.train.slime.replay import with_train_inputs
from agl_slime.types import sample_from_json, sample_to_json
from tests.harness.engine_faults import Abort
from tests.harness.gateway import QUICK, engine_saying
from tests.harness.loop_thread import in_thread
from tests.harness.rollouts import Finished, run_rollouts
from tests.harness.tokenizers import small_tokenizer
from tests.harness.vision import expand, picture, uri, vision_tokenizer

CALL = '<tool_call>\n{"name": "zoom", "arguments": {"at": "top"}}\n</tool_call>'
SEEN = picture(1)


def opened(data: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data))


def zoom(at: str) -> list[Any]:
    """Look closer."""
    return [f"the {at}:", opened(picture(2, (28, 56)))]


class Looker(SGLangLitAgent):
    tools = [zoom]
    max_turns = 4

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": "Which colour? "}, {"type": "image", "image": opened(SEEN)}]
        return [{"role": "user", "content": parts}]

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0


async def looked(
    agent: type[SGLangLitAgent], *says: str, faults: Any = (), tokenizer: Any = None
) -> tuple[Finished, Any]:
    tokenizer = tokenizer or vision_tokenizer()
    engine = engine_saying(tokenizer, says, expand=expand)
    engine.script("/generate", *faults)
    with in_thread(engine):
        made = agent(tokenizer=tokenizer, client_settings=QUICK)
        (finished,) = await run_rollouts(made, [{}], endpoint=engine.url, max_new_tokens=256)
    return finished, [one.payload for one in engine.received if one.path == "/generate"]


async def test_images_of_prompt_and_tools_are_in_one_sample_in_order() -> None:
    finished, asked = await looked(Looker, f"Let me see. {CALL}", "Red.")
    assert finished.failure is None
    (sample,) = finished.convert(vision_tokenizer()).samples
    assert [len(payload["image_data"]) for payload in asked] == [1, 2]
    shown = sample.multimodal_inputs["images"]
    assert [one.size for one in shown] == [(56, 28), (28, 56)]
    assert shown[0].convert("RGB").tobytes() == opened(SEEN).tobytes()
    turns = finished.convert(None).trajectory.turns
    assert expand(asked[1]["input_ids"], asked[1]["image_data"]) == turns[1].prompt_ids.tolist()
    assert turns[1].token_ids.tolist() == sample.tokens
    assert sum(sample.loss_mask) == sum(len(turn.response_ids) for turn in turns)
    text = vision_tokenizer().decode(sample.tokens)
    assert "the top:<image>" in text
    with_train_inputs([sample], vision_tokenizer())
    assert len(sample.multimodal_train_inputs["pixel_values"]) == 2


async def test_answer_cut_by_a_weight_update_resumes_with_the_same_images() -> None:
    whole, _ = await looked(Looker, "It is a very red one.")
    cut, asked = await looked(Looker, "It is a very red one.", faults=[Abort(2)])
    first, second = asked
    assert second["image_data"] == first["image_data"]
    assert second["input_ids"][: len(first["input_ids"])] == first["input_ids"]
    assert len(second["input_ids"]) == len(first["input_ids"]) + 2
    (one,), (two,) = (each.convert(None).samples for each in (whole, cut))
    assert one.tokens == two.tokens
    assert one.rollout_log_probs == two.rollout_log_probs


async def test_group_members_share_one_image_and_one_pixel_tensor() -> None:
    first, second = [(await looked(Looker, "Red."))[0] for _ in range(2)]
    (one,), (two,) = (each.convert(None).trajectory.turns for each in (first, second))
    assert one.images[0] is two.images[0]
    samples = [each.convert(None).samples[0] for each in (first, second)]
    with_train_inputs(samples, vision_tokenizer())
    pixels = [sample.multimodal_train_inputs["pixel_values"] for sample in samples]
    assert pixels[0] is pixels[1]


async def test_a_sample_with_images_comes_back_from_a_checkpoint() -> None:
    finished, _ = await looked(Looker, "Red.")
    (sample,) = with_train_inputs(finished.convert(None).samples, vision_tokenizer())
    again = sample_from_json(sample_to_json(sample))
    assert again.multimodal_train_inputs is None
    with_train_inputs([again], vision_tokenizer())
    for name, tensor in sample.multimodal_train_inputs.items():
        assert tensor.equal(again.multimodal_train_inputs[name])
    (picture_then,), (picture_now,) = sample.multimodal_inputs["images"], again.multimodal_inputs["images"]
    assert picture_then.tobytes() == picture_now.tobytes()


async def test_invalid_image_fails_the_rollout_with_the_reason() -> None:
    class Small(Looker):
        image_settings = ImageSettings(max_megapixels=0.001)

        def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"role": "user", "content": [{"type": "image", "image": uri(SEEN)}]}]

    finished, asked = await looked(Small, "Red.")
    assert finished.failure is not None
    assert "max_megapixels is 0.001" in finished.failure[1]
    blind, _ = await looked(Looker, "Red.", tokenizer=small_tokenizer())
    assert blind.failure is not None
    assert "has no processor" in blind.failure[1]
    assert not asked


async def test_messages_of_a_session_hold_marks_and_not_pictures() -> None:
    tokenizer = vision_tokenizer()
    engine = engine_saying(tokenizer, ["Red."], expand=expand)
    with in_thread(engine):
        agent = Looker(tokenizer=tokenizer, client_settings=QUICK)
        session = RolloutSession(
            client=agent._access.client(_llm(engine.url), tokenizer),
            sampling=SamplingParams(max_new_tokens=64),
            messages=agent.build_prompt({}),
            template=agent._access.template(tokenizer, None),
            write=lambda attributes, started: None,
        )
        await session.ask()
        await agent.aclose()
    (shown,) = session.images.values()
    assert MARK.findall(session.messages[0]["content"]) == [shown.sha]
    assert session.turns[0].images == (shown,)


def _llm(url: str) -> Any:
    from agl_slime.support.agl import LLM

    return LLM(endpoint=url, model="none")
