"""A tiny Idefics3 and a tiny PaddleOCR-VL, whose positions are M-RoPE's, with random weights over a tiny Llama's, and
pictures to show them. Nothing is downloaded.

Their language model is the one of `build_tiny_llama` with more rows, so that a text draft model of that one has no row
for the token that stands for a part of a picture.
"""

from __future__ import annotations

import base64
import io
import json
import zlib
from pathlib import Path

import torch

IMAGE_TOKEN_ID = 280
"""Beyond the drafter's vocabulary, as is what stands around it."""

VOCAB_SIZE = 288
SIDE = 64
"""Pixels that pictures are scaled to."""

PATCH, SCALE = 16, 2
NUM_PICTURE_TOKENS = (SIDE // PATCH // SCALE) ** 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def build_tiny_idefics(path: Path, of: Path) -> Path:
    """Write the checkpoint, unless it is already there. of: a checkpoint of `build_tiny_llama`."""
    from transformers import AutoModelForCausalLM, Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    if (path / "config.json").exists():
        return path
    text = AutoModelForCausalLM.from_pretrained(of, dtype=torch.float32)
    text.resize_token_embeddings(VOCAB_SIZE, mean_resizing=False)
    text.lm_head.weight.data[127:] = 0.0
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text.config,
        image_token_id=IMAGE_TOKEN_ID,
        scale_factor=SCALE,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ("vision" in name or "connector" in name) and parameter.dim() >= 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    model.model.text_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(path)
    tokenizer = _tokenizer(of, ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"])
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    processor = Idefics3Processor(images, tokenizer, image_seq_len=NUM_PICTURE_TOKENS, chat_template=CHAT_TEMPLATE)
    processor.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def build_tiny_paddle(path: Path, of: Path) -> Path:
    """Likewise. Each part of a picture has a position of its own in height and width, and what follows a picture is
    counted on from the larger of its sides: not from its number of tokens."""
    from transformers import (
        AutoModelForCausalLM,
        PaddleOCRVLConfig,
        PaddleOCRVLForConditionalGeneration,
        PaddleOCRVLProcessor,
    )
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    if (path / "config.json").exists():
        return path
    text = AutoModelForCausalLM.from_pretrained(of, dtype=torch.float32)
    text.resize_token_embeddings(VOCAB_SIZE, mean_resizing=False)
    text.lm_head.weight.data[127:] = 0.0
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = PaddleOCRVLConfig(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH // SCALE,
            "spatial_merge_size": SCALE,
        },
        text_config={
            **{name: getattr(text.config, name) for name in same},
            "vocab_size": VOCAB_SIZE,
            "head_dim": 32,
            "max_position_embeddings": text.config.max_position_embeddings,
            "rms_norm_eps": text.config.rms_norm_eps,
            "bos_token_id": None,
            "eos_token_id": text.config.eos_token_id,
            "pad_token_id": text.config.pad_token_id,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        image_token_id=IMAGE_TOKEN_ID,
        vision_start_token_id=IMAGE_TOKEN_ID + 1,
        vision_end_token_id=IMAGE_TOKEN_ID + 2,
        video_token_id=IMAGE_TOKEN_ID + 3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = PaddleOCRVLForConditionalGeneration(config).float()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ("visual" in name or "projector" in name) and parameter.dim() >= 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(path)
    marks = ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"]
    tokenizer = _tokenizer(of, marks)
    tokenizer.image_token, tokenizer.image_token_id = marks[0], IMAGE_TOKEN_ID
    images = PaddleOCRVLImageProcessorPil(
        patch_size=PATCH // SCALE,
        merge_size=SCALE,
        size={"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (8 * PATCH) ** 2},
    )
    PaddleOCRVLProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(path)
    tokenizer.save_pretrained(path)
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "image_token": marks[0]}))
    return path


def _tokenizer(of: Path, marks: list[str]):  # type: ignore[no-untyped-def]
    """marks: added tokens, of which the first stands for a part of a picture."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(of)
    # Ids are given in order: the ones before it stand for nothing.
    spare = [f"<spare{number}>" for number in range(len(tokenizer), IMAGE_TOKEN_ID)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*spare, *marks]})
    assert tokenizer.convert_tokens_to_ids(marks[0]) == IMAGE_TOKEN_ID
    return tokenizer


def picture(seed: int = 0, width: int = SIDE, height: int = SIDE, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Return a picture of random coloured squares."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    squares = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8).numpy()
    image = Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST).convert(mode)
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Make a PNG that says it is so large, and holds next to nothing."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    head = chunk(b"IHDR", width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
