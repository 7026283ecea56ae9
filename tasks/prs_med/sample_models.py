"""Tiny checkpoints with random weights, in the formats of LLaVA-Med and SAM."""

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    SamConfig,
    SamMaskDecoderConfig,
    SamModel,
    SamPromptEncoderConfig,
    SamVisionConfig,
)

from old.sample_data_utils import IMAGENET_MEAN, IMAGENET_STD, save_image_processor, save_model

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

# CLIP sees 6 x 6 patches of 12 pixels.
CLIP_SIDE = 72
CLIP_PATCH = 12
CLIP_GRID = CLIP_SIDE // CLIP_PATCH
CLIP_WIDTH = 64


def write_tiny_llava(path: Path, texts: list[str], seed: int) -> None:
    """Write a LLaVA checkpoint: CLIP tower, projector, Llama, and a tokenizer trained on `texts`."""
    tokenizer = train_tokenizer(texts)
    config = LlavaConfig(
        vision_config=clip_config(),
        text_config=llama_config(len(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=CLIP_GRID**2,
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)

    # All weights are random, but positions are told apart as in a trained tower.
    embeddings = model.model.vision_tower.embeddings
    table = embeddings.position_embedding.weight
    table.data[1:] = position_waves()

    # The frozen layers are wide enough that the projector passes the image on and the head can be sure of a word.
    projector = model.model.multi_modal_projector
    projector.linear_1.weight.data *= 2
    projector.linear_2.weight.data *= 2
    model.lm_head.weight.data *= 3

    save_model(model, path)
    tokenizer.save_pretrained(path)
    settings = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": CLIP_SIDE},
        "crop_size": {"height": CLIP_SIDE, "width": CLIP_SIDE},
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }
    save_image_processor(path, settings)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Llama's special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>", "<image>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([*texts, "USER: \nASSISTANT:"], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return tokenizer


def clip_config() -> CLIPVisionConfig:
    """The vision tower: one layer."""
    return CLIPVisionConfig(
        image_size=CLIP_SIDE,
        patch_size=CLIP_PATCH,
        hidden_size=CLIP_WIDTH,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        projection_dim=64,
        initializer_range=0.1,
    )


def llama_config(vocab_size: int) -> LlamaConfig:
    """The language model: four layers."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


def position_waves() -> torch.Tensor:
    """Draw the (patches, width) table of positions: a random mix of smooth waves over the image."""
    side = torch.linspace(-1, 1, CLIP_GRID)
    places = torch.cartesian_prod(side, side)
    frequencies = torch.tensor([1.0, 2.0])
    phase = places[:, :, None] * frequencies * math.pi / 2
    waves = torch.cat([phase.sin(), phase.cos()], 2)
    waves = waves.flatten(1)

    count = waves.shape[1]
    mix = torch.randn(count, CLIP_WIDTH)
    return waves @ mix * (2 / count) ** 0.5


def write_tiny_sam(path: Path, image_size: int, seed: int) -> None:
    """Write a SAM checkpoint: a full SamModel, of which only the vision encoder is used."""
    torch.manual_seed(seed)
    side = max(8, round(image_size / 8) * 8)
    vision_config = SamVisionConfig(
        hidden_size=64,
        output_channels=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=side,
        patch_size=8,
        window_size=4,
        global_attn_indexes=[1],
        mlp_ratio=2.0,
        mlp_dim=128,
        initializer_range=0.02,
        num_pos_feats=16,
    )

    # These two are only there because the format has them.
    prompt_config = SamPromptEncoderConfig(hidden_size=32, image_size=side, patch_size=8, mask_input_channels=4)
    decoder_config = SamMaskDecoderConfig(
        hidden_size=64, mlp_dim=64, num_hidden_layers=1, num_attention_heads=2, iou_head_hidden_dim=16
    )

    # The whole model is saved.
    config = SamConfig(
        vision_config=vision_config, prompt_encoder_config=prompt_config, mask_decoder_config=decoder_config
    )
    model = SamModel(config)
    save_model(model, path)

    settings = {
        "image_processor_type": "SamImageProcessor",
        "size": {"longest_edge": side},
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
    }
    save_image_processor(path, settings)
