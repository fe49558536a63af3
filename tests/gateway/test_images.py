"""Images through the gateway: what the engine is sent, what is kept, what becomes of it in Samples, what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from agl_slime.gateway.settings import GatewaySettings
from agl_slime.tokens import attributes as names
from agl_slime.tokens.converter import convert_trajectory
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.images import ImageSettings
from agl_slime.tokens.trajectory import Trajectory
from agl_slime.train.slime.replay import with_train_inputs
from tests.harness.gateway import Case, serving, trained_once
from tests.harness.vision import expand, picture, processor, uri, vision_tokenizer

RED, BLUE = uri(picture(1)), uri(picture(2))
TALL = uri(picture(3, (28, 56)))


def serve(*says: str, **how: Any) -> Any:
    return serving(*says, **{"tokenizer": vision_tokenizer(), "expand": expand, **how})


def post(case: Case, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {case.llm.api_key}", "anthropic-version": "2023-06-01"}
    return httpx.post(f"{case.llm.endpoint}{path}", json={"model": "m", **body}, headers=headers, timeout=30)


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def shown(image: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image}}


def chat(case: Case, *messages: Any, **how: Any) -> httpx.Response:
    return post(case, "/chat/completions", {"messages": list(messages), **how})


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def samples(case: Case) -> list[Any]:
    made = Trajectory(rollout_id="ro-1", attempt_id="at-1", task={}, turns=tuple(case.turns), reward=1.0)
    return list(with_train_inputs(convert_trajectory(made, case.tokenizer).samples, case.tokenizer))


def pixels(given: list[Any]) -> list[bytes]:
    return [one.convert("RGB").tobytes() for one in given]


def test_image_conversation_is_one_sample_with_the_engines_token_count() -> None:
    with serve("A red one.", "And a tall one.", "Bye.") as case:
        first = user(text("What is "), shown(RED), text("?"))
        one = chat(case, first).json()
        answer = {"role": "assistant", "content": one["choices"][0]["message"]["content"]}
        second = user(shown(TALL), text("and this?"))
        two = chat(case, first, answer, second).json()
        later = {"role": "assistant", "content": two["choices"][0]["message"]["content"]}
        chat(case, first, answer, second, later, {"role": "user", "content": "Thanks."})
        asked = [(payload["image_data"], payload["input_ids"]) for payload in case.payloads]
        assert [images for images, _ in asked] == [[RED], [RED, TALL], [RED, TALL]]
        mark = processor().image_token_id
        assert [ids.count(mark) for _, ids in asked] == [1, 2, 2]
        turns = case.turns
        assert [expand(ids, images) for images, ids in asked] == [turn.prompt_ids.tolist() for turn in turns]
        assert one["usage"]["prompt_tokens"] == len(turns[0].prompt_ids)
        (segment,) = case.segments
        trained_once(turns, case.segments)
        (sample,) = samples(case)
        assert sample.tokens == segment.token_ids.tolist()
        assert pixels(sample.multimodal_inputs["images"]) == pixels([image.open() for image in segment.images])
        assert sample.tokens.count(mark) == turns[1].prompt_ids.tolist().count(mark)
        made = processor()(
            text=["<image><image>"], images=sample.multimodal_inputs["images"], images_kwargs={"return_tensors": "pt"}
        )
        assert sample.multimodal_train_inputs.keys() == {"pixel_values", "image_sizes"}
        for name, tensor in sample.multimodal_train_inputs.items():
            assert tensor.equal(made[name])


def test_an_image_is_kept_once_whatever_number_of_turns_shows_it() -> None:
    with serve(*(f"Answer {n}." for n in range(6))) as case:
        messages: list[Any] = [
            user(shown(RED), text("one")),
        ]
        for n in range(6):
            said = chat(case, *messages).json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, user(text(f"more {n}"), shown(RED if n % 2 else BLUE))]
        files = [span.attributes[names.IMAGE_DATA] for span in case.spans if names.IMAGE_DATA in span.attributes]
        assert [len(json.loads(file)) for file in files] == [1, 1]
        held = RED.partition(",")[2]
        assert sum(held in str(span.attributes) for span in case.spans) == 1
        assert len({image.sha for turn in case.turns for image in turn.images}) == 2
        assert [len(turn.images) for turn in case.turns] == [1, 2, 3, 4, 5, 6]
        assert len(case.segments) == 1


def test_responses_and_messages_show_images_as_chat_does() -> None:
    with serve("Red.") as case:
        chat(case, user(text("What is "), shown(RED)))
        post(
            case,
            "/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "What is "},
                            {"type": "input_image", "image_url": RED},
                        ],
                    }
                ]
            },
        )
        source = {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]}
        content = [text("What is "), {"type": "image", "source": source}]
        post(case, "/messages", {"max_tokens": 64, "messages": [user(*content)]})
        count = post(case, "/messages/count_tokens", {"messages": [user(*content)]}).json()
        assert [payload["image_data"] for payload in case.payloads] == [[RED]] * 3
        first, *others = (turn.prompt_ids.tolist() for turn in case.turns)
        assert others == [first, first]
        assert count == {"input_tokens": len(first)}


def test_results_of_tools_show_images_in_all_three_protocols() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asks: Any = {"role": "user", "content": "Look."}
    with serve("Red.") as case:
        chat(
            case,
            asks,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [text("here:"), shown(RED)]},
        )
        made = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
        output = [{"type": "input_text", "text": "here:"}, {"type": "input_image", "image_url": RED}]
        post(
            case,
            "/responses",
            {"input": [asks, made, {"type": "function_call_output", "call_id": "call_1", "output": output}]},
        )
        source = {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]}
        result = {
            "type": "tool_result",
            "tool_use_id": "call_1",
            "content": [text("here:"), {"type": "image", "source": source}],
        }
        use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
        post(
            case,
            "/messages",
            {"max_tokens": 64, "messages": [asks, {"role": "assistant", "content": [use]}, user(result)]},
        )
        assert [payload["image_data"] for payload in case.payloads] == [[RED]] * 3
        first, *others = (case.tokenizer.decode(turn.prompt_ids.tolist()) for turn in case.turns)
        assert "<|im_start|>tool\nhere:<image>" in first
        assert others == [first, first]


def test_other_image_of_equal_size_is_a_fork_despite_equal_tokens() -> None:
    with serve("It is red.", "It is blue.", "Still blue.") as case:
        red, blue = user(shown(RED), text("Colour?")), user(shown(BLUE), text("Colour?"))
        said = chat(case, red).json()["choices"][0]["message"]["content"]
        answer, more = {"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}
        chat(case, blue, answer, more)
        first, second = case.turns
        assert second.prompt_ids.tolist()[: first.length] == first.token_ids.tolist()
        assert second.fork is ForkReason.EDITED_HISTORY
        assert [segment.images for segment in case.segments] == [first.images, second.images]
        assert first.images != second.images
        trained_once(case.turns, case.segments)


def refused(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


LIMITS = ImageSettings(max_image_mb=0.02, max_megapixels=0.004, max_images=2)
NOISE = picture(5, (90, 90))


@pytest.mark.parametrize(
    ("images", "named"),
    [
        ([uri(NOISE)], "max_image_mb is 0.02"),
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
        ([None], "must be a URI data:image/"),
    ],
)
def test_an_image_beyond_the_limits_is_a_400_that_names_the_limit(images: list[Any], named: str) -> None:
    with serve("Red.", settings=GatewaySettings(images=LIMITS)) as case:
        said = refused(chat(case, user(*(shown(image) for image in images))))
        assert named in said
        assert not case.payloads
        assert chat(case, user(text("Hello."))).status_code == 200  # and the gateway lives


def test_images_of_the_system_and_the_model_are_refused() -> None:
    with serve("Red.") as case:
        assert "'system' shows an image" in refused(chat(case, {"role": "system", "content": [shown(RED)]}))
        said = {"role": "assistant", "content": [shown(RED)]}
        assert "'assistant' shows an image" in refused(chat(case, user(text("?")), said, user(text("?"))))


def test_text_that_equals_the_image_token_is_refused_beside_images() -> None:
    with serve("Red.") as case:
        said = refused(chat(case, user(text("<image>"), shown(RED))))
        assert said.startswith("the conversation has the image token <image>")
        assert not case.payloads


def test_a_model_without_processor_refuses_images_in_a_sentence() -> None:
    with serving("Red.") as case:
        assert "has no processor" in refused(chat(case, user(shown(RED))))


def test_image_token_count_mismatch_is_an_error_and_trains_nothing() -> None:
    with serve("Red.", expand=lambda ids, images: [*expand(ids, images), 7]) as case:
        answer = chat(case, user(shown(RED)))
        assert answer.status_code == 500
        assert "tokens in a prompt with images" in answer.text
        assert not case.turns


def test_non_rgb_image_is_sent_and_trained_as_the_same_rgb() -> None:
    with serve("Red.") as case:
        given = picture(4, mode="RGBA")
        assert chat(case, user(shown(uri(given)))).status_code == 200
        (sample,) = samples(case)
        (sent,) = case.payloads[0]["image_data"]
        assert sent != uri(given)
        (image,) = case.turns[0].images
        assert sent == image.uri
        assert pixels(sample.multimodal_inputs["images"]) == pixels([image.open()])
        assert sample.multimodal_inputs["images"][0].mode == "RGB"


@contextmanager
def pictures_at() -> Iterator[tuple[str, list[str]]]:
    """A server of pictures on a free port, and what it was asked for."""
    asked: list[str] = []

    class Pictures(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            sizes = {"/small.png": (28, 28), "/large.png": (90, 90)}
            self.send_response(200 if self.path in sizes else 302)
            self.send_header("Location", "http://127.0.0.1:1/elsewhere.png")
            self.end_headers()
            if self.path in sizes:
                self.wfile.write(picture(1, sizes[self.path]))

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_images_are_fetched_from_hosts_that_are_allowed_and_from_no_other() -> None:
    allowed = GatewaySettings(images=ImageSettings(image_hosts=("127.0.0.1",), max_image_mb=0.02))
    with pictures_at() as (address, asked), serve("Red.", settings=allowed) as case:
        assert chat(case, user(shown(f"{address}/small.png"))).status_code == 200
        assert case.payloads[0]["image_data"] == [uri(picture(1, (28, 28)))]
        assert "max_image_mb" in refused(chat(case, user(shown(f"{address}/large.png"))))
        assert "status 302" in refused(chat(case, user(shown(f"{address}/moved.png"))))
        assert asked == ["/small.png", "/large.png", "/moved.png"]
        other = f"http://localhost:{address.rpartition(':')[2]}/small.png"
        assert "image_hosts alone (127.0.0.1)" in refused(chat(case, user(shown(other))))
        assert len(asked) == 3
