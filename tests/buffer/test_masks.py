"""Loss masks for text-only traces, ids of texts, and slime's ``MultiTurnLossMaskGenerator``: the same ids and masks for
the same messages."""

import copy
import importlib.util
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.buffer import masks
from agl_slime.buffer.masks import MultiTurnLossMaskGenerator, get_loss_mask_generator, register_loss_mask_generator
from agl_slime.errors import ConfigError, TraceError
from agl_slime.tokens.tokenizer import encode_text
from tests.harness.chat_templates import TEMPLATES
from tests.harness.slime_programs import slime_package
from tests.harness.tokenizers import small_tokenizer
from tests.harness.vocabularies import VOCABULARIES, chat_tokenizer

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "I look.<tool_call>a</tool_call>"},
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": "<think>\nAdd.\n</think>\n\nThree."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
MARKED = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{-
'\\n' }} {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


ANSWERS = [str(message["content"]) for message in CONVERSATION if message["role"] == "assistant"]


def trained(tokenizer: Any, messages: list[dict[str, Any]], kind: str = "auto", **options: Any) -> list[str]:
    generator = get_loss_mask_generator(tokenizer, kind)
    token_ids, loss_mask = generator.get_loss_mask(messages, **options)
    assert len(token_ids) == len(loss_mask)
    runs = groupby(zip(token_ids, loss_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for trained, run in runs if trained]


def test_the_marks_of_a_template_are_used() -> None:
    tokenizer = chat_tokenizer("anthropic", MARKED)
    assert trained(tokenizer, CONVERSATION[:4]) == ["I look.<tool_call>a</tool_call><|im_end|>"]
    plain = chat_tokenizer("anthropic", "chatml")  # the same text without marks
    marked, unmarked = (get_loss_mask_generator(each).get_loss_mask(CONVERSATION) for each in (tokenizer, plain))
    assert marked == unmarked


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("template", ["chatml", "groups_tools"])
def test_answers_are_trained_with_their_end_token_and_nothing_else(vocabulary: str, template: str) -> None:
    assert trained(chat_tokenizer(vocabulary, template), CONVERSATION) == [text + "<|im_end|>" for text in ANSWERS]


def test_answers_are_masked_as_the_template_renders_them() -> None:
    call = ANSWERS[0]
    dropped = [f"{call}<|im_end|>", "Three.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"]
    assert trained(chat_tokenizer("qwen", "drops_thinking"), CONVERSATION) == dropped
    texts = trained(chat_tokenizer("anthropic", "reasoner"), CONVERSATION)
    assert [text.strip() for text in texts] == [text + "<｜end▁of▁sentence｜>" for text in (call, "Three.", "Yes.")]
    # nothing but the next role's mark ends an answer, which GLM samples; after the last answer there is none
    texts = [text.lstrip("\n") for text in trained(chat_tokenizer("anthropic", "role_markers"), CONVERSATION)]
    assert texts == [call + "<|observation|>", ANSWERS[1] + "<|user|>", ANSWERS[2]]
    quoted = {"role": "user", "content": "You said <|im_start|>assistant\nNo.<|im_end|>\n"}
    messages = [quoted, {"role": "assistant", "content": "Did I?"}]
    assert trained(chat_tokenizer("anthropic", "chatml"), messages) == ["Did I?<|im_end|>"]


# templates that end a conversation or an opening otherwise than an answer need a registered generator
@pytest.mark.parametrize("vocabulary", ["qwen", "anthropic"])
@pytest.mark.parametrize("template", sorted({*TEMPLATES} - {"ends_with_token", "drops_empty_blocks"}))
def test_ids_equal_the_templates_rendering(vocabulary: str, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer(vocabulary, template)
    rendered = tokenizer.apply_chat_template(CONVERSATION, tokenize=True, return_dict=False)
    assert get_loss_mask_generator(tokenizer).get_loss_mask(CONVERSATION)[0] == rendered
    if template == "groups_tools":  # results of tools in a row are one turn
        monkeypatch.setattr(tokenizer, "get_added_vocab", dict)  # its DeepSeek marks mean a distilled model
        for kind in ("qwen", "qwen3"):
            assert get_loss_mask_generator(tokenizer, kind).get_loss_mask(CONVERSATION)[0] == rendered


@pytest.mark.parametrize("kind", ["auto", "qwen3", "qwen3_5"])
def test_a_message_marked_as_context_is_not_trained(kind: str) -> None:
    messages = [dict(message) for message in CONVERSATION]
    messages[2]["step_loss_mask"] = 0
    tokenizer = chat_tokenizer("qwen", "groups_tools")
    generator = get_loss_mask_generator(tokenizer, kind)
    assert generator.get_loss_mask(messages)[0] == generator.get_loss_mask(CONVERSATION)[0]
    texts, marked = ([text.strip() for text in trained(tokenizer, each, kind)] for each in (CONVERSATION, messages))
    assert marked == texts[1:]


def test_tools_are_in_the_prompt_and_response_lengths_are_counted() -> None:
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    for kind in ("auto", "qwen", "qwen3", "qwen3_5"):
        generator = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type=kind)
        token_ids, loss_mask = generator.get_loss_mask(CONVERSATION, tools=[{"function": {"name": "count"}}])
        context = [i for i, trained in zip(token_ids, loss_mask, strict=True) if not trained]
        assert '"name": "count"' in tokenizer.decode(context), kind
        assert generator.get_response_lengths([[0, 0, 1, 0, 1], [1], [0, 0], []]) == [3, 1, 0, 0]


def test_distill_qwen_has_one_question_and_one_answer() -> None:
    tokenizer = chat_tokenizer("qwen", "reasoner")
    thought = "Count.\n</think>\n\nThree."
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": thought}]
    assert trained(tokenizer, messages, "distill_qwen") == [thought]
    # a tokenizer with DeepSeek's markers is a distilled model's
    generators = MultiTurnLossMaskGenerator(tokenizer), get_loss_mask_generator(tokenizer, "distill_qwen")
    assert generators[0].get_loss_mask(messages) == generators[1].get_loss_mask(messages)


def test_a_custom_generator_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class LastOnly(MultiTurnLossMaskGenerator):
        def get_loss_mask(self, messages: Any, tools: Any = None) -> tuple[list[int], list[int]]:
            marked = [{**message, "step_loss_mask": int(message is messages[-1])} for message in messages]
            return get_loss_mask_generator(self.tokenizer).get_loss_mask(marked, tools)

    monkeypatch.setitem(masks._generators, "last_only", LastOnly)
    assert trained(chat_tokenizer("anthropic", "chatml"), CONVERSATION, "last_only") == ["Yes.<|im_end|>"]
    with pytest.raises(ConfigError, match="'last_only'"):
        register_loss_mask_generator("last_only")(LastOnly)


def test_an_unknown_name_and_a_template_without_answers_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"'llama'.*auto, distill_qwen, qwen, qwen3, qwen3_5"):
        get_loss_mask_generator(chat_tokenizer("anthropic", "chatml"), "llama")
    silent = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(TraceError, match="register a loss mask generator"):
        get_loss_mask_generator(chat_tokenizer("anthropic", silent)).get_loss_mask(CONVERSATION)


CHAT_TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8"), max_size=40),
        st.sampled_from(["<|im_start|>", "<|im_end|>", "\n", "  ", "the quick brown fox", "é", "漢字", "🙂", "\r\n"]),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(params=["small", "anthropic", "deepseek"], scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return small_tokenizer() if request.param == "small" else chat_tokenizer(request.param)


@given(text=CHAT_TEXTS, special=st.booleans())
def test_ids_are_those_of_encode(tokenizer: Any, text: str, special: bool) -> None:
    assert encode_text(tokenizer, text, add_special_tokens=special) == tokenizer.encode(
        text, add_special_tokens=special
    )


def test_truncation_and_split_tokens_of_the_tokenizer_are_respected() -> None:
    tokenizer = copy.deepcopy(small_tokenizer())
    whole = tokenizer.encode("many words are here", add_special_tokens=False)
    tokenizer("many words are here", truncation=True, max_length=2)  # leaves a limit behind
    assert tokenizer.backend_tokenizer.truncation is not None
    assert encode_text(tokenizer, "many words are here") == whole
    tokenizer.split_special_tokens = True
    ids = encode_text(tokenizer, "a<|im_end|>")
    assert tokenizer.eos_token_id not in ids
    assert ids == tokenizer.encode("a<|im_end|>", add_special_tokens=False)


def test_a_tokenizer_that_encodes_by_itself_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = copy.deepcopy(small_tokenizer())
    assert encode_text(tokenizer, "x") != [7]

    def encode(*args: Any, **options: Any) -> list[int]:
        return [7]

    monkeypatch.setattr(tokenizer, "encode", encode)
    assert encode_text(tokenizer, "x") == [7]
    monkeypatch.undo()
    tokenizer.__class__ = type("Sevens", (type(tokenizer),), {"encode": encode})
    assert encode_text(tokenizer, "x") == [7]


PARAMETERS = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "terminal", "description": "Run it.", "parameters": PARAMETERS}}]


@pytest.fixture
def slime_masks() -> Any:
    """slime's module by its path: importing the package would need Ray and SGLang."""
    return _load(slime_package() / "utils" / "mask_utils.py", "slime_mask_utils")


def _load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slime
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("template", ["chatml", "groups_tools", "drops_thinking"])
@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5", "distill_qwen"])
def test_ids_and_masks_are_slimes(slime_masks, kind, template, vocabulary, tools, monkeypatch):
    tokenizer = chat_tokenizer(vocabulary, template)
    if kind == "qwen":  # our test vocabularies hold DeepSeek's markers, which mean a distilled model
        monkeypatch.setattr(tokenizer, "get_added_vocab", dict)
    conversation = CONVERSATION
    if kind == "qwen":  # results in a row are one turn for ours, as for the template, and one turn each for slime's
        pairs = pairwise([{"role": ""}, *CONVERSATION])
        conversation = [message for earlier, message in pairs if not earlier["role"] == message["role"] == "tool"]
    for length in range(2, len(conversation) + 1):
        messages = conversation[:length]
        expected = slime_masks.MultiTurnLossMaskGenerator(tokenizer, kind).get_loss_mask(messages, tools)
        assert get_loss_mask_generator(tokenizer, kind).get_loss_mask(messages, tools) == tuple(expected)


@pytest.mark.slime
def test_steps_marked_as_context_are_slimes(slime_masks: Any) -> None:
    tokenizer = chat_tokenizer("qwen", "drops_thinking")
    messages = [{**message, "step_loss_mask": n % 4 // 2} for n, message in enumerate(CONVERSATION)]
    for kind in ("qwen3", "qwen3_5", "distill_qwen"):
        theirs = slime_masks.MultiTurnLossMaskGenerator(tokenizer, kind)
        ours = get_loss_mask_generator(tokenizer, kind)
        assert ours.get_loss_mask(messages) == tuple(theirs.get_loss_mask(messages))
        mask = ours.get_loss_mask(messages)[1]
        assert ours.get_response_lengths([mask]) == theirs.get_response_lengths([mask])
