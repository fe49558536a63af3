"""Images through the gateway: in the engine's requests, in spans and Samples, and the images that are refused."""

import json
from typing import Any

from agl_slime.gateway.settings import GatewaySettings
from agl_slime.tokens import attributes as names
from agl_slime.tokens.converter import convert_trajectory
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.images import ImageSettings
from agl_slime.tokens.turn import Trajectory
from agl_slime.train.slime.replay import in_slimes_form
from tests.gateway.protocols import CHATS, assistant, body_of, called, user
from tests.harness.gateway import Case, post, serving, trained_once
from tests.harness.servers import server_that_answers
from tests.harness.vision import expand, picture, processor, uri, vision_tokenizer

RED, BLUE = uri(picture(1)), uri(picture(2))
TALL = uri(picture(3, (28, 56)))


def serve(*says: str, **options: Any) -> Any:
    return serving(*says, **{"tokenizer": vision_tokenizer(), "expand": expand, **options})


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def image(url: Any, path: str = "chat/completions") -> dict[str, Any]:
    """The image as a part of a message in each protocol."""
    if path == "responses":
        return {"type": "input_image", "image_url": url}
    if path == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        return {"type": "image", "source": source}
    return {"type": "image_url", "image_url": {"url": url}}


def chat(case: Case, *messages: Any, status: int = 200) -> Any:
    """The answer as a message, or the error's text."""
    answer = post(case, "chat/completions", status=status, messages=list(messages))
    return answer["choices"][0]["message"] if status == 200 else answer["error"]["message"]


def samples(case: Case) -> list[Any]:
    trajectory = Trajectory(rollout_id="ro-1", attempt_id="at-1", task={}, turns=tuple(case.turns), reward=1.0)
    return list(in_slimes_form(convert_trajectory(trajectory, case.tokenizer).samples, case.tokenizer))


def pixels(images: list[Any]) -> list[bytes]:
    return [picture.convert("RGB").tobytes() for picture in images]


def test_image_conversation_is_one_sample_with_the_engines_token_count() -> None:
    with serve("A red one.", "And a tall one.", "Bye.") as case:
        first = user([text("What is "), image(RED), text("?")])
        answer = chat(case, first)
        second = user([image(TALL), text("and this?")])
        later = chat(case, first, answer, second)
        chat(case, first, answer, second, later, user("Thanks."))
        requests = [(payload["image_data"], payload["input_ids"]) for payload in case.payloads]
        assert [images for images, _ in requests] == [[RED], [RED, TALL], [RED, TALL]]
        mark = processor().image_token_id
        assert [ids.count(mark) for _, ids in requests] == [1, 2, 2]
        turns = case.turns
        assert [expand(ids, images) for images, ids in requests] == [turn.prompt_ids.tolist() for turn in turns]
        (segment,) = case.segments
        trained_once(turns, case.segments)
        (sample,) = samples(case)
        assert sample.tokens == segment.token_ids.tolist()
        assert pixels(sample.multimodal_inputs["images"]) == pixels([image.open() for image in segment.images])
        assert sample.tokens.count(mark) == turns[1].prompt_ids.tolist().count(mark)
        inputs = processor()(
            text=["<image><image>"], images=sample.multimodal_inputs["images"], images_kwargs={"return_tensors": "pt"}
        )
        assert sample.multimodal_train_inputs.keys() == {"pixel_values", "image_sizes"}
        for name, tensor in sample.multimodal_train_inputs.items():
            assert tensor.equal(inputs[name])


def test_an_image_is_kept_once_whatever_number_of_turns_shows_it() -> None:
    with serve(*(f"Answer {n}." for n in range(6))) as case:
        messages: list[Any] = [user([image(RED), text("first")])]
        for n in range(6):
            messages += [chat(case, *messages), user([text(f"next {n}"), image(RED if n % 2 else BLUE)])]
        files = [span.attributes[names.IMAGE_DATA] for span in case.spans if names.IMAGE_DATA in span.attributes]
        assert [len(json.loads(file)) for file in files] == [1, 1]
        data = RED.partition(",")[2]
        assert sum(data in str(span.attributes) for span in case.spans) == 1
        assert len({image.sha for turn in case.turns for image in turn.images}) == 2
        assert [len(turn.images) for turn in case.turns] == [1, 2, 3, 4, 5, 6]
        assert len(case.segments) == 1


def test_images_of_users_and_of_tools_are_shown_in_all_three_protocols() -> None:
    with serve("Red.") as case:
        for path in CHATS:
            words = text("here:", "input_text" if path == "responses" else "text")
            body = body_of(path, [user([words, image(BLUE, path)]), *called(path, "look", [words, image(RED, path)])])
            answer = post(case, path, **body)
            if path == "messages":
                count = post(case, "messages/count_tokens", **body)["input_tokens"]
            elif path == "chat/completions":
                assert answer["usage"]["prompt_tokens"] == len(case.turns[0].prompt_ids)
        assert [payload["image_data"] for payload in case.payloads] == [[BLUE, RED]] * 3
        first, second, third = (turn.prompt_ids.tolist() for turn in case.turns)
        assert first == second == third
        assert count == len(first)
        prompt = case.tokenizer.decode(first)
        assert "<|im_start|>user\nhere:<image>" in prompt
        assert "<|im_start|>tool\nhere:<image>" in prompt


def test_other_image_of_equal_size_is_a_fork_despite_equal_tokens() -> None:
    with serve("It is red.", "It is blue.", "Still blue.") as case:
        answer = chat(case, user([image(RED), text("Colour?")]))
        chat(case, user([image(BLUE), text("Colour?")]), answer, user("Sure?"))
        first, second = case.turns
        assert second.prompt_ids.tolist()[: first.length] == first.token_ids.tolist()
        assert second.fork is ForkReason.EDITED_HISTORY
        assert [segment.images for segment in case.segments] == [first.images, second.images]
        assert first.images != second.images
        trained_once(case.turns, case.segments)


LIMITS = ImageSettings(max_image_mb=0.02, max_megapixels=0.004, max_images=2)
REFUSED: list[tuple[list[Any], str]] = [
    ([uri(picture(5, (90, 90)))], "max_image_mb is 0.02"),
    ([uri(picture(0, (90, 60), "JPEG"), "jpeg")], "90 x 60 pixels, max_megapixels is 0.004"),
    ([uri(picture(n, (28, 28))) for n in range(3)], "max_images, 2"),
    ([uri(picture(0, (28, 28)))] * 3, "max_images is 2"),
    ([uri(picture(0, (28, 28), "BMP"), "png")], "PNG, JPEG, WEBP"),
    ([uri(picture(0, (28, 28))[:900])], "cannot be read as PNG, JPEG, WEBP"),
    (["data:image/png;base64,%%%"], "not base64"),
    (["data:text/html;base64,AAAA"], "must be a URI data:image/"),
    (["file:///etc/passwd"], "must be a URI data:image/"),
    (["http://169.254.169.254/latest"], "image_hosts"),
    (["https://[broken/x.png"], "image_hosts"),
]


def test_an_image_beyond_the_limits_is_a_400_that_names_the_limit() -> None:
    with serve("Red.", settings=GatewaySettings(images=LIMITS)) as case:
        for images, limit in REFUSED:
            assert limit in chat(case, user([image(url) for url in images]), status=400)
        assert not case.payloads
        chat(case, user([text("Hello.")]))  # the gateway lives


def test_images_in_wrong_places_and_texts_like_the_image_token_are_refused() -> None:
    with serve("Red.") as case:
        assert "'system' shows an image" in chat(case, {"role": "system", "content": [image(RED)]}, status=400)
        assert "content has dict" in chat(case, user([{"type": {}}, image(RED)]), status=400)
        assert "of role [] shows" in chat(case, {"role": [], "content": [image(RED)]}, status=400)
        messages = [user([text("?")]), assistant([image(RED)]), user([text("?")])]
        assert "'assistant' shows an image" in chat(case, *messages, status=400)
        error = chat(case, user([text("<image>"), image(RED)]), status=400)
        assert error.startswith("the conversation has the image token <image>")
        assert not case.payloads
    with serving("Red.") as case:
        assert "has no processor" in chat(case, user([image(RED)]), status=400)


def test_image_token_count_mismatch_is_an_error_and_trains_nothing() -> None:
    with serve("Red.", expand=lambda ids, images: [*expand(ids, images), 7]) as case:
        assert "tokens in a prompt with images" in chat(case, user([image(RED)]), status=500)
        assert not case.turns


def test_non_rgb_image_is_sent_and_trained_as_the_same_rgb() -> None:
    with serve("Red.") as case:
        transparent = uri(picture(4, mode="RGBA"))
        chat(case, user([image(transparent)]))
        (sample,) = samples(case)
        (sent,) = case.payloads[0]["image_data"]
        (recorded,) = case.turns[0].images
        assert sent == recorded.uri != transparent
        assert pixels(sample.multimodal_inputs["images"]) == pixels([recorded.open()])
        assert sample.multimodal_inputs["images"][0].mode == "RGB"


def test_images_are_fetched_from_hosts_that_are_allowed_and_from_no_other() -> None:
    allowed = GatewaySettings(images=ImageSettings(image_hosts=("127.0.0.1",), max_image_mb=0.02))
    small, large = picture(1, (28, 28)), picture(1, (90, 90))
    with (
        server_that_answers(200, small) as small_url,
        server_that_answers(200, large) as large_url,
        server_that_answers(302, b"") as moved_url,
        serve("Red.", settings=allowed) as case,
    ):
        chat(case, user([image(f"{small_url}/x.png")]))
        assert case.payloads[0]["image_data"] == [uri(small)]
        assert "max_image_mb" in chat(case, user([image(f"{large_url}/x.png")]), status=400)
        assert "status 302" in chat(case, user([image(f"{moved_url}/x.png")]), status=400)
        renamed = small_url.replace("127.0.0.1", "localhost")
        assert "image_hosts alone (127.0.0.1)" in chat(case, user([image(f"{renamed}/x.png")]), status=400)
