"""The tiny policy: determinism, replacement, the shipped checkpoint, its tokenizer and its chat template."""

import asyncio
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason='the tiny policy needs torch: pip install "agl-slime[local]"')
load = pytest.importorskip("safetensors.torch").load

from agl_slime import SGLangLitAgent  # noqa: E402
from agl_slime.cli.demo import LOOKUP_POLICY, LookupDemonstrations, ReverseDemonstrations  # noqa: E402
from agl_slime.errors import ConfigError, TrainerError  # noqa: E402
from agl_slime.tools.demo_policy.tokenizer import DEFAULT_SOURCES, make_tokenizer, train_tokenizer  # noqa: E402
from agl_slime.tools.demo_policy.warmup import SPEC_FILE, PolicySettings, make_policy, spec_of  # noqa: E402
from agl_slime.tools.warm_up.recorded import read_conversations  # noqa: E402

QUICK = PolicySettings(target=0.0, probe_every=1, imperfect_steps=1, batch_size=2, probe_size=2)
"""One step of each phase, for tests that do not depend on its result."""


def test_the_same_seed_gives_the_same_policy_and_another_seed_replaces_it(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()

    def weights(name: str, seed: int) -> bytes:
        return (make_policy(tmp_path / name, seed=seed, settings=QUICK) / "model.safetensors").read_bytes()

    first = weights("a", 1)
    assert bool((torch.random.get_rng_state() == state).all())
    assert weights("b", 1) == first
    assert weights("a", 2) != first
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_a_policy_that_cannot_be_made_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no tiny policy"):
        make_policy(tmp_path, settings=QUICK)
    slow = PolicySettings(max_steps=2, probe_every=1, batch_size=2, probe_size=4)
    with pytest.raises(TrainerError, match="the warm-up's probe is at"):
        make_policy(tmp_path / "p", settings=slow)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_shipped_policy_is_of_todays_demonstrations_and_needs_no_torch() -> None:
    """Fails when the demonstrations or settings have changed: run agl-slime demo-policy."""
    program = "import sys; from agl_slime.cli.demo import LOOKUP_POLICY; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
    files = {path.name: path.read_bytes() for path in LOOKUP_POLICY.iterdir()}
    assert json.loads(files[SPEC_FILE])["spec"] == spec_of(0, LookupDemonstrations(), PolicySettings())
    assert sum(map(len, files.values())) < 600_000
    # transformers 4 reads another field than transformers 5
    config = json.loads(files["config.json"])
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1000.0


@pytest.mark.slow
def test_the_script_gives_the_shipped_policy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agl_slime", "demo-policy", str(tmp_path / "p")]
    subprocess.run(command, timeout=300, check=True)
    directories = (tmp_path / "p", LOOKUP_POLICY)
    made, shipped = (json.loads((directory / SPEC_FILE).read_text()) for directory in directories)
    assert made["spec"] == shipped["spec"]
    assert made["warmup"]["clean_probe"] >= 0.9
    if made["made_with"] == shipped["made_with"]:  # sums round differently elsewhere
        files = [{path.name: path.read_bytes() for path in directory.iterdir()} for directory in directories]
        weights = [load(contents.pop("model.safetensors")) for contents in files]
        assert files[0] == files[1]
        assert weights[0].keys() == weights[1].keys()
        for name, tensor in weights[0].items():  # processors of one capability round differently, too, by 4e-5
            torch.testing.assert_close(tensor, weights[1][name], atol=5e-4, rtol=0.0)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(LookupDemonstrations())


def test_markers_are_one_token_and_tool_markers_stay_in_the_text(tokenizer: Any) -> None:
    for marker in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(marker)) == 1
    call = tokenizer.encode("<tool_call>x</tool_call><|im_end|>")
    assert tokenizer.decode(call, skip_special_tokens=True) == "<tool_call>x</tool_call>"
    assert (len(tokenizer), tokenizer.eos_token) == (460, "<|im_end|>")
    assert make_tokenizer(LookupDemonstrations()).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="vocab_size is 460"):
        train_tokenizer(["one", "two"], vocab_size=460)


def test_the_template_only_appends(tokenizer: Any) -> None:
    """The rendering of a conversation is a prefix of the rendering of any continuation."""
    for source in DEFAULT_SOURCES:
        for conversation in source.demonstrations(random.Random(1), 20, quality="imperfect"):
            lengths = range(1, len(conversation) + 1)
            rendered = [tokenizer.apply_chat_template(conversation[:n], tokenize=False) for n in lengths]
            for shorter, longer in itertools.pairwise(rendered):
                assert longer.startswith(shorter)


def test_tools_and_calls_are_rendered_as_the_model_writes_them(tokenizer: Any) -> None:
    source = LookupDemonstrations()
    prompt = source.prompt({"key": "kqz"})

    def rendered(**answer: Any) -> str:
        return tokenizer.apply_chat_template([*prompt, {"role": "assistant", **answer}], tokenize=False)

    for arguments in ({"key": "kqz"}, '{"key": "kqz"}'):
        call = {"type": "function", "function": {"name": "lookup", "arguments": arguments}}
        assert rendered(content="", tool_calls=[call]) == rendered(content=source.tool_call("kqz"))

    roles = {"system": "Be brief.", "user": "hi"}
    messages = [{"role": role, "content": content} for role, content in roles.items()]
    messages += [{"role": "tool", "content": content} for content in "ab"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text == (
        '<|im_start|>system\nBe brief.\n<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\n<tool_response>a</tool_response>"
        "<tool_response>b</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("source", "n_turns"), [(LookupDemonstrations(), 2), (ReverseDemonstrations(), 1)])
def test_conversation_is_encoded_as_rendered_with_each_turn_marked(source: Any, n_turns: int, tokenizer: Any) -> None:
    rows = [{"messages": messages} for messages in source.demonstrations(random.Random(2), 10, quality="clean")]
    read = asyncio.run(read_conversations(rows, agent=SGLangLitAgent(tokenizer=tokenizer), model=""))
    for row, (sample,) in zip(rows, read, strict=True):
        assert tokenizer.decode(sample.tokens) + "\n" == tokenizer.apply_chat_template(row["messages"], tokenize=False)
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        response, spans = sample.tokens[-sample.response_length :], sample.metadata["turn_spans"]
        assert [tokenizer.decode(response[start:end]) for start, end in spans] == [f"{a}<|im_end|>" for a in answers]
        assert sum(sample.loss_mask or ()) == sum(end - start for start, end in spans)
        assert len(answers) == n_turns
