"""A tokenizer with a real processor of images, LLaVA-NeXT's in small: the tokens that an image takes depend on its
size. And how a server that has the same processor reads prompts with images."""

from __future__ import annotations

import base64
import copy
import io
import json
import random
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from agl_slime.tokens.vision import VisionTokenizer
from tests.harness.tokenizers import small_tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<tool_call><|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@lru_cache
def processor(template: str = TEMPLATE) -> Any:
    pytest.importorskip("torch", reason="processors of images need torch")
    pytest.importorskip("PIL", reason="images need Pillow: pip install agl-slime[images]")
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>"]})
    tokenizer.chat_template = template
    crop, shape = {"height": 28, "width": 28}, {"shortest_edge": 28}
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    pictures = LlavaNextImageProcessor(image_grid_pinpoints=pinpoints, size=shape, crop_size=crop)
    how = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaNextProcessor(image_processor=pictures, tokenizer=tokenizer, chat_template=template, **how)


@lru_cache
def vision_tokenizer(template: str = TEMPLATE) -> Any:
    made = processor(template)
    return VisionTokenizer(made.tokenizer, made)


def picture(seed: int = 0, size: tuple[int, int] = (56, 28), kind: str = "PNG", mode: str = "RGB") -> bytes:
    """A file with made-up pixels."""
    from PIL import Image

    noise = random.Random(seed).randbytes(size[0] * size[1] * len(mode))
    file = io.BytesIO()
    Image.frombytes(mode, size, noise).save(file, kind)
    return file.getvalue()


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def expand(ids: list[int], image_data: list[str]) -> list[int]:
    """The prompt as a server counts it: of each placeholder as many as its own processor says for the image."""
    from PIL import Image

    made = processor()
    counts = []
    for data in image_data:
        shown = Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))).convert("RGB")
        counts.append(made(text=["<image>"], images=[shown])["input_ids"][0].count(made.image_token_id))
    found = [at for at, token in enumerate(ids) if token == made.image_token_id]
    assert len(found) == len(counts), f"{len(found)} placeholders for {len(counts)} images"
    left = iter(counts)
    return [token for each in ids for token in ([each] * next(left) if each == made.image_token_id else [each])]


# Qwen2-VL in small: a template and a model as its own, made from a config, with random weights.
QWEN = TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
_QWEN_TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def save_qwen2_vl(path: Path) -> Path:
    """A checkpoint of 0.3 million parameters with tokenizer and processor."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": list(_QWEN_TOKENS)})
    tokenizer.pad_token, tokenizer.chat_template = "<|video_pad|>", QWEN
    tokenizer.save_pretrained(path)
    _, start, end, image, video = tokenizer.convert_tokens_to_ids(list(_QWEN_TOKENS))
    pictures = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": 28 * 28,
        "max_pixels": 28 * 28 * 64,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(pictures))
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "initializer_range": 0.2,  # answers depend on what is seen
        "eos_token_id": tokenizer.eos_token_id,
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "vision_config": {
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 64,
            "num_heads": 4,
            "in_channels": 3,
            "in_chans": 3,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "initializer_range": 0.2,
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(transformers.AutoConfig.from_pretrained(path)).float()
    with tempfile.TemporaryDirectory() as weights:  # servers read the config as it is written here
        model.save_pretrained(weights)
        shutil.copy(Path(weights) / "model.safetensors", path)
    return path
