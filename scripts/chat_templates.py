"""Published chat templates as NAME.jinja in a directory, from packages of PyPI that ship them: llama-cpp-python's
source (100 MB), trl and axolotl.

    python scripts/chat_templates.py DIR

For ``benchmarks/oracle.py``, ``benchmarks/forks.py`` and the tests that AGL_SLIME_CHAT_TEMPLATES turns on. The names
are ``benchmarks/published.py``'s.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

LLAMA_CPP = {
    "qwen2.5": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3": "Qwen-Qwen3-0.6B",
    "qwen3-coder": "Qwen3-Coder",
    "glm-4.6": "GLM-4.6",
    "glm-4.7": "GLM-4.7-Flash",
    "kimi-k2-instruct": "Kimi-K2-Instruct",
    "kimi-k2-thinking": "Kimi-K2-Thinking",
    "deepseek-v3.1": "deepseek-ai-DeepSeek-V3.1",
    "deepseek-v3.2": "deepseek-ai-DeepSeek-V3.2",
    "deepseek-v4": "deepseek-ai-DeepSeek-V4",
    "minimax-m2": "MiniMax-M2",
    "gpt-oss": "openai-gpt-oss-120b",
    "nemotron-nano-v2": "NVIDIA-Nemotron-Nano-v2",
    "llama-3.1": "meta-llama-Llama-3.1-8B-Instruct",
    "llama-3.2": "meta-llama-Llama-3.2-3B-Instruct",
    "llama-3.3": "meta-llama-Llama-3.3-70B-Instruct",
    "gemma-4": "google-gemma-4-31B-it",
    "hunyuan-3": "tencent-Hy3",
    "laguna-xs.2": "poolside-Laguna-XS.2",
    "laguna-xs-2.1": "poolside-Laguna-XS-2.1",
    "laguna-s-2.1": "poolside-Laguna-S-2.1",
    "mistral-nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistral-small-3.2": "Mistral-Small-3.2-24B-Instruct-2506",
    "devstral": "unsloth-mistral-Devstral-Small-2507",
    "lfm2": "LFM2-8B-A1B",
    "lfm2.5-8b": "LFM2.5-8B-A1B",
    "phi-3.5": "microsoft-Phi-3.5-mini-instruct",
    "smollm3": "HuggingFaceTB-SmolLM3-3B",
    "command-r7b": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "granite-3.3": "ibm-granite-granite-3.3-2B-Instruct",
    "granite-4.0": "ibm-granite-granite-4.0",
    "seed-oss": "ByteDance-Seed-OSS",
}
TRL = {
    "qwen3-2507-instruct": "qwen3_instruct_2507",
    "qwen3-vl": "qwen3_vl",
    "qwen3.5": "qwen3_5_think",
    "qwen3.5-nothink": "qwen3_5_nothink",
    "qwen3.6": "qwen3_6",
    "qwen3.8": "qwen3_8",
    "glm-4.5": "glm4moe",
    "deepseek-r1": "deepseekv3",
    "deepseek-r1-distill-qwen": "deepseek_r1_distill",
    "nemotron-3-nano": "nemotron_3_nano",
    "nemotron-3-super": "nemotron_3_super",
    "nemotron-3-ultra": "nemotron_3_ultra",
    "nemotron-3.5": "nemotron_3_5_lightning",
}
AXOLOTL = {"deepseek-v3": "deepseek_v3"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    for package, wanted in (("llama-cpp-python", LLAMA_CPP), ("trl", TRL), ("axolotl", AXOLOTL)):
        shipped = dict(_shipped(package))
        for name, stem in wanted.items():
            if stem in shipped:
                (directory / f"{name}.jinja").write_text(shipped[stem], encoding="utf-8")
            else:
                print(f"{package} ships no {stem}.jinja any more; {name} is left out", file=sys.stderr)
    for name in ("kimi-k2-instruct", "kimi-k2-thinking"):
        file = directory / f"{name}.jinja"
        if file.is_file():
            file.write_text(_with_given_ids(file.read_text(encoding="utf-8")), encoding="utf-8")
    if (file := directory / "kimi-k2-thinking.jinja").is_file():
        source = file.read_text(encoding="utf-8")
        (directory / "kimi-k2.5.jinja").write_text(_opening_thinking(source), encoding="utf-8")
    if (file := directory / "qwen3.jinja").is_file():
        kept = file.read_text(encoding="utf-8").rpartition("{%- if add_generation_prompt %}")[0]
        opened = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
        (directory / "qwen3-2507-thinking.jinja").write_text(kept + opened, encoding="utf-8")
    print(f"{len([*directory.glob('*.jinja')])} templates in {directory}")
    return 0


def _shipped(package: str) -> Iterator[tuple[str, str]]:
    """The templates of a package's newest release: name without ``.jinja``, text."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", directory, package]
        subprocess.run(command, check=True)
        (file,) = Path(directory).iterdir()
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                for name in wheel.namelist():
                    if name.endswith(".jinja"):
                        yield Path(name).stem, wheel.read(name).decode()
        else:
            with tarfile.open(file) as archive:
                for member in archive:
                    if member.name.endswith(".jinja") and (content := archive.extractfile(member)):
                        yield Path(member.name).stem, content.read().decode()


def _with_given_ids(source: str) -> str:
    """Kimi's template with the ids of calls as they are given. llama.cpp's counts them in a list that it appends to,
    which transformers' sandbox refuses."""
    counted, _, rest = source.partition("set formatted_id = ")
    _, _, rest = rest.partition("append(formatted_id) -%}")
    source = f"{counted}set formatted_id = tool_call['id'] -%}}{rest}"
    while "{%- if tool_response_queue.ids -%}" in source:
        before, _, rest = source.partition("{%- if tool_response_queue.ids -%}")
        source = f"{before}{{%- set tool_call_id = message.tool_call_id -%}}{rest.partition('{%- endif -%}')[2]}"
    return source


def _opening_thinking(source: str) -> str:
    """Kimi K2.5's template, which no package ships: K2 Thinking's, with thinking opened before an answer and
    without a system message of its own."""
    before, opening, after = source.rpartition("<|im_assistant|>assistant<|im_middle|>")
    closed = "{%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}"
    before = before.replace(
        "{%- set ns.last_non_tool_call_assistant_msg = idx -%}",
        "{%- set ns.last_non_tool_call_assistant_msg = idx -%}{%- break -%}",
    )
    first, _, rest = before.partition("{%- if messages|length == 0 or")  # a system message of its own
    before = first + rest.partition("{%- endif -%}")[2]
    return f"{before}{opening}{closed}{after}"


if __name__ == "__main__":
    raise SystemExit(main())
