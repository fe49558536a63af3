"""A tokenizer with a real image processor, a small LLaVA-NeXT: an image's number of tokens depends on its size. And the
prompts with images as a server with the same processor expands them."""

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
from tests.harness import tokenizers

_CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
)
TEMPLATE = tokenizers.TEMPLATE.replace("{{ m.content }}", _CONTENT)


@lru_cache
def processor(template: str = TEMPLATE) -> Any:
    pytest.importorskip("torch", reason="processors of images need torch")
    pytest.importorskip("PIL", reason="images need Pillow: pip install agl-slime[images]")
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    tokenizer = copy.deepcopy(tokenizers.small_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>"]})
    tokenizer.chat_template = template
    crop, shape = {"height": 28, "width": 28}, {"shortest_edge": 28}
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    pictures = LlavaNextImageProcessor(image_grid_pinpoints=pinpoints, size=shape, crop_size=crop)
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaNextProcessor(image_processor=pictures, tokenizer=tokenizer, chat_template=template, **options)


@lru_cache
def vision_tokenizer(template: str = TEMPLATE) -> Any:
    made = processor(template)
    return VisionTokenizer(made.tokenizer, made)


def picture(seed: int = 0, size: tuple[int, int] = (56, 28), kind: str = "PNG", mode: str = "RGB") -> bytes:
    """An image file with random pixels."""
    from PIL import Image

    noise = random.Random(seed).randbytes(size[0] * size[1] * len(mode))
    file = io.BytesIO()
    Image.frombytes(mode, size, noise).save(file, kind)
    return file.getvalue()


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def expand(ids: list[int], image_data: list[str]) -> list[int]:
    """The prompt as a server expands it: each placeholder as often as the processor counts tokens for its image."""
    from PIL import Image

    made = processor()
    counts = []
    for data in image_data:
        image = Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))).convert("RGB")
        counts.append(made(text=["<image>"], images=[image])["input_ids"][0].count(made.image_token_id))
    assert ids.count(made.image_token_id) == len(counts)
    repeats = iter(counts)
    return [token for token in ids for _ in range(next(repeats) if token == made.image_token_id else 1)]


# A small Qwen2-VL with random weights.
QWEN = TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
_QWEN_TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def save_qwen2_vl(path: Path) -> Path:
    """A checkpoint of 0.3 million parameters with tokenizer and processor."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = copy.deepcopy(tokenizers.small_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": list(_QWEN_TOKENS)})
    tokenizer.pad_token, tokenizer.chat_template = "<|video_pad|>", QWEN
    tokenizer.save_pretrained(path)
    _, start, end, image, video = tokenizer.convert_tokens_to_ids(list(_QWEN_TOKENS))
    pictures = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    pictures |= {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 64, "patch_size": 14, "temporal_patch_size": 2}
    pictures |= {"merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}
    (path / "preprocessor_config.json").write_text(json.dumps(pictures))
    config: dict[str, Any] = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    config |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
    config |= {"rope_theta": 1_000_000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    config |= {"tie_word_embeddings": False, "torch_dtype": "float32", "hidden_act": "silu"}
    config |= {"eos_token_id": tokenizer.eos_token_id, "image_token_id": image, "video_token_id": video}
    config |= {"vision_start_token_id": start, "vision_end_token_id": end, "initializer_range": 0.2}
    eyes = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "in_channels": 3, "in_chans": 3}
    eyes |= {"mlp_ratio": 2, "patch_size": 14, "spatial_patch_size": 14, "spatial_merge_size": 2}
    eyes |= {"temporal_patch_size": 2, "initializer_range": 0.2}  # answers depend on the image
    config["vision_config"] = eyes
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(transformers.AutoConfig.from_pretrained(path)).float()
    with tempfile.TemporaryDirectory() as weights:  # servers read the config above
        model.save_pretrained(weights)
        shutil.copy(Path(weights) / "model.safetensors", path)
    return path
