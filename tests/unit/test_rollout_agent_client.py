"""What an agent's client knows of the model before it asks the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.errors import OutOfVocabularyError
from agl_slime.sglang.payloads import SamplingParams
from agl_slime.support.agl import LLM
from tests.trace_tokenizers import small_tokenizer

TOKENIZER: Any = small_tokenizer()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"vocab_size": 300}', 300),
        ('{"text_config": {"vocab_size": 41}}', 41),
        ('{"model_type": "qwen3"}', None),
        ("not json", None),
        ("[]", None),
        (None, None),
    ],
)
def test_the_vocabulary_is_read_from_the_checkpoint_of_this_machine(
    config: str | None, expected: int | None, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    client = SGLangLitAgent()._client_for(LLM(endpoint="http://127.0.0.1:9", model=str(tmp_path)), TOKENIZER)
    assert client.vocab_size == expected


async def test_an_id_outside_of_it_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    client = SGLangLitAgent()._client_for(LLM(endpoint="http://127.0.0.1:9", model=str(tmp_path)), TOKENIZER)
    async with client:
        with pytest.raises(OutOfVocabularyError, match="outside the model's vocabulary of 300 ids"):
            await client.generate([1, 300], SamplingParams(max_new_tokens=1))
