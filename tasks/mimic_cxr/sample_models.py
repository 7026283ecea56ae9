"""Tiny checkpoints with random weights: a ConvNeXt for 64 x 64 pixels and a BERT for the questions."""

import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, BertTokenizerFast, ConvNextConfig, ConvNextModel

from old.sample_data_utils import IMAGENET_MEAN, IMAGENET_STD, save_image_processor, save_model

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def write_tiny_convnext(path: Path, seed: int) -> None:
    """Write a ConvNeXt checkpoint.

    Layer scale starts at 1: at the usual 1e-6 the blocks do nothing for the first thousands of steps.
    """
    torch.manual_seed(seed)
    config = ConvNextConfig(
        num_channels=3,
        patch_size=4,
        num_stages=3,
        depths=[1, 1, 2],
        hidden_sizes=[24, 48, 96],
        image_size=64,
        layer_scale_init_value=1.0,
    )
    model = ConvNextModel(config)

    # The usual 0.02 suits wide layers; in these narrow ones a block would pass on next to nothing.
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)

    save_model(model, path)
    settings = {
        "image_processor_type": "ConvNextImageProcessor",
        "size": {"shortest_edge": 64},
        "crop_pct": 1.0,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
    }
    save_image_processor(path, settings)


def write_tiny_bert(path: Path, texts: list[str], seed: int) -> None:
    """Write a BERT checkpoint whose WordPiece vocabulary is that of the texts."""
    pieces = Tokenizer(models.WordPiece(vocabulary_of(texts), unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece()
    pieces.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = BertTokenizerFast(tokenizer_object=pieces, model_max_length=128)

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    model = BertModel(config)
    save_model(model, path)
    tokenizer.save_pretrained(path)


def vocabulary_of(texts: list[str]) -> dict[str, int]:
    """Number every word of the texts, and the letters for words never seen.

    It is not trained: that breaks ties differently in each run.
    """
    words = set()
    for text in set(texts):
        words.update(re.findall(r"[a-z0-9]+|[^a-z0-9 ]", text.lower()))

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names += LETTERS
    names += [f"##{letter}" for letter in LETTERS]
    names += sorted(words)
    unique = dict.fromkeys(names)
    return {name: number for number, name in enumerate(unique)}
