"""A small byte-level BPE tokenizer, and chat templates."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML: each message is rendered the same wherever it stands."""

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<tool_call><|im_end|>\n"
    "{% endif %}" + PLAIN
)
"""Tools in the system message, then ChatML."""

DROPS_THINKING = (
    "{% set ns = namespace(last_user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last_user %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's: answers before the last user message lose their thinking; an empty block can open the answer."""

# "a+b": the pairs of tokens that merge, most frequent first
_MERGES = '''
Ġ+Ġ e+n e+r i+n Ċ+ĠĠ k+en o+ken s+t ĊĠĠ+Ġ Ġ+t a+t i+z oken+iz okeniz+er o+r Ġ+i %+} m+p {+% Ġ+%} "+" l+e o+n r+e
a+n Ġ+= a+l r+o Ġ+" Ġ+m t+h d+e a+in e+s p+e r+ain t+okenizer en+d a+c a+r t+e a+st Ġ+s a+b a+g e+d f+or Ġ+P Ġ+p
""+" Ġ"+{% <+| T+okenizer h+e h+at i+m l+at o+c |+> Ġ+b Ġ+n Ġ+an Ġ+end Ġt+e or+t mp+lat mp+ort T+rain s+e Ġ+in
pe+c mplat+e F+ast f+ro i+on y+te Ġ+c Ġi+s Ġi+mport Ġ%}+" re+Train ed+Tokenizer fro+m reTrain+edTokenizer
reTrainedTokenizer+Fast )+, a+d a+s e+l f+i i+th l+i o+d o+o u+t v+oc w+ith {+{ }+} Ġ+}} er+s in+g in+k st+r
at+h Ġi+f ac+k ag+e Ġte+mplate voc+ab I+N e+v i+f l+s l+ar o+t s+er u+lar u+ser Ġ+_ Ġ+o st+ar Ġt+rain Ġt+he
at+ion Ġ%}+{% Ġ%}+<| Ġm+es th+ink ĠP+reTrainedTokenizerFast Ġend+if ad+d fi+le vocab+ular star+t Ġmes+s "+,
.+""" N+on c+hat c+od e+t i+al l+ast
'''


@lru_cache
def small_tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 400 tokens: every text comes back as it was."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [tuple(pair.split("+")) for pair in _MERGES.split()]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    bpe = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


class Rendering:
    """A tokenizer that renders by itself and not by transformers' own ``apply_chat_template``, and counts it."""

    def __init__(self, tokenizer: Any, source: Any = PLAIN, prefix: str = "") -> None:
        self._tokenizer, self._prefix = tokenizer, prefix
        self.chat_template = source
        self.rendered = 0

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        self.rendered += 1
        return self._prefix + self._tokenizer.apply_chat_template(conversation, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class HeldTokenizer:
    """A tokenizer that calls ``hold`` before it encodes a text of at least ``length`` characters."""

    def __init__(self, tokenizer: Any, hold: Callable[[], object], length: int = 8_000) -> None:
        self._tokenizer, self._hold, self._length = tokenizer, hold, length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self._look(text)
        return self._tokenizer(text, *args, **kwargs)

    def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self._look(text)
        return self._tokenizer.encode(text, *args, **kwargs)

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("tokenize", True):
            self._look(str(conversation))
        return self._tokenizer.apply_chat_template(conversation, *args, **kwargs)

    def _look(self, text: Any) -> None:
        if len(text) >= self._length:
            self._hold()
