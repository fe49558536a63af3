"""The conversation in tokens: kept and added ids, forks and their reasons."""

import copy
import logging
from typing import Any

import pytest

from agl_slime.engine.client.generation import Generation
from agl_slime.errors import ConfigError, PromptError
from agl_slime.tokens import forks
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.template import ChatTemplate, chat_template
from tests.harness.chat_templates import CHATML
from tests.harness.conversations import answer, text_of
from tests.harness.vocabularies import base_tokenizer, chat_tokenizer

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
COUNTED = "First I count. Then three."


def conversation(template: str, vocabulary: str = "anthropic", **options: Any) -> tuple[ChatContext, Any]:
    tokenizer = chat_tokenizer(vocabulary, template)
    return ChatContext(template=ChatTemplate(tokenizer=tokenizer, **options), messages=QUESTION), tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def test_next_prompt_extends_the_context_by_the_templates_text() -> None:
    context, tokenizer = conversation("chatml")
    prompt, generation = answer(context, tokenizer, "Three.")
    with pytest.raises(ConfigError, match="prompt_ids"):
        context.add_answer([1, 2], generation)
    context.add(user("Sure?"))
    added = tokenizer.encode("\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    assert context.prompt_ids() == [*prompt, *generation.output_ids, *added]


def test_ids_that_the_tokenizer_would_not_choose_are_kept() -> None:
    context, tokenizer = conversation("chatml")
    odd = tokenizer.encode("answ", add_special_tokens=False) + tokenizer.encode("er", add_special_tokens=False)
    assert odd != tokenizer.encode("answer", add_special_tokens=False)
    prompt = context.prompt_ids()
    ids = (*odd, tokenizer.eos_token_id)
    generation = Generation(output_ids=ids, log_probs=(-0.1,) * len(ids), text="answer", finish_reason="stop")
    context.add_answer(prompt, generation)
    context.add(user("Sure?"))
    assert context.prompt_ids()[len(prompt) : len(prompt) + 2] == odd
    assert not context.forks


@pytest.mark.parametrize("template", ["chatml", "groups_tools", "drops_thinking"])
def test_a_truncated_answer_is_closed_by_the_template(template: str) -> None:
    context, tokenizer = conversation(template)
    prompt, generation = answer(context, tokenizer, "Three or maybe", finish="length")
    context.add(tool("3"))
    added = text_of(tokenizer, context.prompt_ids()[len(prompt) + len(generation.output_ids) :])
    assert added.startswith(tokenizer.eos_token)
    assert context.open_boundaries == 0


def test_a_sampled_stop_token_or_string_is_part_of_the_conversation() -> None:
    for template, text, options, message, added in (
        # a token that the template does not write; the next role's marker, which is not doubled; a string
        ("groups_tools", "Three.", {"stop": "<|endoftext|>"}, user("Sure?"), "<|endoftext|><|im_end|>\n<|im_start|>"),
        ("role_markers", "Three.", {"stop": "<|user|>"}, user("Sure?"), "<|user|>\nSure?<|assistant|>\n"),
        ("chatml", "{}</call>", {"matched": "</call>"}, tool("ok"), "<|im_end|>\n<|im_start|>tool\nok"),
    ):
        context, tokenizer = conversation(template)
        prompt, _ = answer(context, tokenizer, text, **options)
        assert context.messages[-1]["content"] == text
        context.add(message)
        assert text_of(tokenizer, context.prompt_ids()[len(prompt) :]).startswith(text + added)


def test_results_are_grouped_as_the_template_groups_them() -> None:
    tools = [{"type": "function", "function": {"name": "count"}}]
    context, tokenizer = conversation("groups_tools", tools=tools)
    prompt, _ = answer(context, tokenizer, "<tool_call>a</tool_call><tool_call>b</tool_call>")
    assert '{"type": "function", "function": {"name": "count"}}' in text_of(tokenizer, prompt)
    context.add(tool("1"), tool("2"))
    results = "".join(f"\n<tool_response>\n{n}\n</tool_response>" for n in (1, 2))
    assert f"<|im_start|>user{results}<|im_end|>" in text_of(tokenizer, context.prompt_ids())
    answer(context, tokenizer, "Wait.")
    assert not context.forks
    del context.messages[-1]  # between two results, which are one group without it
    context.add(tool("3"))
    answer(context, tokenizer, "Three.")
    assert context.forks.total() == 1


@pytest.mark.parametrize(
    ("text", "options", "blocks"),
    [
        ("Three.", {}, 0),
        ("\nThree.\n", {}, 0),
        ("<think>\n\n</think>\n\nThree.", {}, 3),
        ("<think>Short.</think>Three.", {}, 0),
        ("Three.", {"template_kwargs": {"enable_thinking": False}}, 4),  # opened with an empty block
    ],
)
def test_white_space_and_empty_blocks_are_no_fork(text: str, options: dict[str, Any], blocks: int) -> None:
    """Qwen3 writes an empty thinking block into the last answer and none into earlier ones: a difference in text only,
    not in the sampled tokens."""
    context, tokenizer = conversation("drops_thinking", **options)
    for n in range(3):
        answer(context, tokenizer, text)
        context.add(tool(str(n)))
    assert text_of(tokenizer, context.prompt_ids()).count("<think>\n\n</think>") == blocks
    assert not context.forks


def test_fork_keeps_the_common_prefix_and_each_class_is_logged_once(caplog, monkeypatch):
    """A template that drops thinking from each answer forks in each turn; the prompt before the dropped answer stays as
    it was."""
    monkeypatch.setattr(forks, "_explained", set())
    with caplog.at_level(logging.INFO, logger="agl_slime.tokens.forks"):
        for _ in range(3):
            context, tokenizer = conversation("reasoner")
            first, _ = answer(context, tokenizer, "count\n</think>\n\nThree.")
            context.add(user("Sure?"))
            second, _ = answer(context, tokenizer, "sure\n</think>\n\nYes.")
    opening = tokenizer.encode("<｜Assistant｜><think>\n", add_special_tokens=False)
    assert second[: len(first) - len(opening)] == first[: -len(opening)]
    assert context.forks == {ForkReason.DROPPED_THINKING: 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "template" in caplog.text


def test_template_that_rewrites_the_beginning_forks_despite_equal_end() -> None:
    """The beginning changes with the number of messages, in a text of the same length."""
    first = "{{- '<|im_start|>system\\n' + ('short' if messages | length < 4 else 'long.') + '<|im_end|>\\n' }}"
    context, tokenizer = conversation(first + CHATML)
    answer(context, tokenizer, "Three.")
    context.add(user("Sure?"))
    prompt, _ = answer(context, tokenizer, "Yes.")
    assert text_of(tokenizer, prompt).startswith("<|im_start|>system\nlong.<|im_end|>")
    assert context.forks == {ForkReason.TEMPLATE: 1}


def long_rollout(context: ChatContext, tokenizer: Any, turns: int) -> None:
    for n in range(turns):
        answer(context, tokenizer, "<think>\nthought\n</think>\n\n" * (n % 3 > 0) + f"call {n}")
        context.add(*[tool(f"result {n}")] * (1 + (n % 5 == 4)))


@pytest.mark.parametrize(("template", "n_forks"), [("forgets_results", 36), ("drops_thinking", 0), ("role_markers", 0)])
def test_rendering_the_ends_gives_the_prompts_of_rendering_the_whole(template: str, n_forks: int) -> None:
    """Of a long conversation the ends are rendered, as far back as the template looks."""
    contexts = []
    for exact in (True, False):
        context, tokenizer = conversation(template)
        context._windows_exact = exact
        long_rollout(context, tokenizer, 40)
        contexts.append(context)
    ends, whole = contexts
    assert ends._windows_exact
    assert ends.forks == whole.forks == ({ForkReason.TEMPLATE: n_forks} if n_forks else {})
    assert ends.token_ids.tolist() == whole.token_ids.tolist()


def test_template_beyond_the_window_is_rendered_whole_once_noticed() -> None:
    """The fourth message disappears once there are more than 50: noticed when the conversation has doubled."""
    start, end = "{{- '<|im_start|>' + message.role", "'<|im_end|>\\n' }}"
    source = CHATML.replace(start, "{%- if not (loop.index0 == 3 and messages | length > 50) %}" + start, 1)
    context, tokenizer = conversation(source.replace(end, end + "{%- endif %}", 1))
    long_rollout(context, tokenizer, 45)
    assert context.forks == {ForkReason.TEMPLATE: 1}
    assert not context._windows_exact
    assert "result 0" not in text_of(tokenizer, context.token_ids)


@pytest.mark.parametrize(
    ("place", "text", "question", "kept_text", "reason"),
    [
        (-1, "Four.", True, "", ForkReason.EDITED_HISTORY),
        (0, "Be long.", True, None, ForkReason.EDITED_HISTORY),
        (-1, "First I count. Wait,", False, "First I count.", ForkReason.EDITED_HISTORY),
        # an answer that goes on, without its end
        (-1, f"{COUNTED} But", False, COUNTED, ForkReason.BRANCH),
    ],
)
def test_edits_fork_and_keep_the_sampled_ids_before_them(place, text, question, kept_text, reason):
    context, tokenizer = conversation("chatml")
    prompt, generation = answer(context, tokenizer, COUNTED)
    context.messages[place]["content"] = text
    if question:
        context.add(user("Sure?"))
    edited, _ = answer(context, tokenizer, " Yes.")
    if kept_text is not None:
        common = len(tokenizer.encode(kept_text, add_special_tokens=False))
        prefix = [*prompt, *generation.output_ids[:common]]
        assert edited[: len(prefix)] == prefix
    assert text in text_of(tokenizer, edited)
    assert context.forks == {reason: 1}


def test_going_back_keeps_the_ids_of_earlier_answers() -> None:
    context, tokenizer = conversation("chatml")
    first, generation = answer(context, tokenizer, "Three.")
    context.add(user("Sure?"))
    answer(context, tokenizer, "Yes.")
    del context.messages[3:]
    context.add(user("Really?"))
    prompt, _ = answer(context, tokenizer, "No.")
    history = [*first, *generation.output_ids]
    assert prompt[: len(history)] == history
    assert context.forks == {ForkReason.BRANCH: 1}


@pytest.mark.parametrize("finish", ["length", "abort"])
def test_truncated_answer_continues_with_its_tokens(finish: Any) -> None:
    context, tokenizer = conversation("chatml")
    empty, _ = answer(context, tokenizer, "", finish="abort")  # before the first token
    prompt, generation = answer(context, tokenizer, "Three or", finish=finish)
    assert (prompt, len(context.messages)) == (empty, 3)
    assert context.prompt_ids() == prompt + list(generation.output_ids)
    answer(context, tokenizer, " four.")
    assert context.messages[-1] == {"role": "assistant", "content": "Three or four."}
    assert not context.forks
    context.add(user("Sure?"))
    assert "assistant\nThree or four.<|im_end|>\n<|im_start|>user\nSure?" in text_of(tokenizer, context.prompt_ids())


def test_a_token_boundary_that_a_merge_might_cross_is_counted() -> None:
    context, tokenizer = conversation("bare", "qwen")
    answer(context, tokenizer, "Thre", finish="length")
    context.messages[-1]["content"] += "e apples"
    continued, _ = answer(context, tokenizer, " left.")
    assert continued[-2:] == tokenizer.encode("e apples", add_special_tokens=False)
    assert context.open_boundaries == 1


def test_without_a_template_text_is_verbatim_and_messages_are_refused() -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    made = (PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(base_tokenizer("anthropic"))) for _ in range(2))
    bare, begins = made
    begins.add_special_tokens({"bos_token": "<begin>"})
    begins._tokenizer.post_processor = TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", begins.convert_tokens_to_ids("<begin>"))]
    )
    for tokenizer in (bare, begins):
        text = "Once upon a time, there was  "
        context = ChatContext(template=chat_template(tokenizer), messages=[{"role": "text", "content": text}])
        prompt, generation = answer(context, tokenizer, " a king", finish="length")
        assert prompt == tokenizer.encode(text)
        context.add({"role": "text", "content": " who"})
        assert text_of(tokenizer, context.prompt_ids()).removeprefix("<begin>") == f"{text} a king who"
        assert context.prompt_ids()[: len(context.token_ids)] == [*prompt, *generation.output_ids]
        context.add(user("Why?"))
        with pytest.raises(PromptError, match=r"no chat template.*--model-path"):
            context.prompt_ids()
    assert prompt[0] == begins.convert_tokens_to_ids("<begin>")
    template = chat_template(bare, template_kwargs={"chat_template": "{{ messages[0].content }}"})
    assert template.render([{"role": "user", "content": "x"}], generation_prompt=False) == "x"
