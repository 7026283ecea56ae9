"""train_mimic_cxr.py with image encoders that are no ConvNeXt: vision transformers in Hugging Face's format."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT
from safetensors.torch import load_file

from old.cli_utils import InputError
from tasks.mimic_cxr.encoders import image_statistics, load_encoder, size_options
from tasks.mimic_cxr.model import ChestModel

MIMIC = str(ROOT / "train_mimic_cxr.py")
# a transformer of two layers
SMALL = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def write_encoder(folder: Path, kind: str, **more) -> Path:
    """A tiny image encoder with random weights, as save_pretrained writes it: without a processor's config."""
    make_config = getattr(transformers, f"{kind}Config")
    make_model = getattr(transformers, f"{kind}Model")
    torch.manual_seed(0)
    config = make_config(**SMALL | more)
    make_model(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("engine", ["--use_ddp", pytest.param("--use_deepspeed", marks=pytest.mark.soak)])
def test_a_vision_transformer_is_trained(mimic_cxr_flags, zygote, tmp_path, engine):
    """Two steps at twice its own image size, recomputed, by two processes: what it is made of moves, then it tests."""
    encoder = write_encoder(tmp_path / "vit", "ViT")
    out = tmp_path / "run"
    flags = [*mimic_cxr_flags, "--image_encoder", encoder, "--output_dir", out, engine, "--gradient_checkpointing"]
    flags += "--max_steps 2 --max_samples 32 --batch_size 4 --learning_rate 1e-2 --warmup_steps 0".split()
    done = zygote(MIMIC, *flags, ranks=2)
    assert done.code == 0, done.stderr
    assert json.loads((out / "summary.json").read_text())["test/vqa_accuracy"] >= 0

    # all of its weights are trained, but for the pooler's, which no answer depends on
    before = load_encoder(str(encoder), "image_encoder").state_dict()
    trained = load_file(out / "model_last.safetensors")
    for name, value in before.items():
        if not name.endswith("bias"):
            assert torch.equal(trained[f"image.{name}"], value) == ("pooler" in name), name


def test_patches_of_another_size_have_positions_of_their_own(tmp_path):
    """At its own size a transformer is called as ever; at twice that, each patch has a position."""
    encoder = load_encoder(str(write_encoder(tmp_path / "vit", "ViT")), "image_encoder")
    assert size_options(encoder, 32) == {}
    options = size_options(encoder, 64)
    tokens = encoder(pixel_values=torch.zeros(1, 3, 64, 64), **options).last_hidden_state
    assert tokens.shape == (1, 1 + 8 * 8, 32)
    # of an image of one grey the places are all there is to tell patches apart
    assert len(tokens[0].unique(dim=0)) == 65


def make_model(encoder: Path, flags: list[str], *more: str) -> ChestModel:
    import train_mimic_cxr as script

    args = script.parse_args([*flags, "--image_encoder", str(encoder), "--dropout", "0", *more])
    return script.build_model(args, "no", torch.device("cpu"))[0].eval()


@pytest.mark.parametrize("kind", ["Dinov2", "SiglipVision", "CLIPVision", "ViTMAE", "DeiT", "Beit"])
def test_other_transformers(mimic_cxr_flags, tmp_path, kind):
    """Each tells two images apart, and gives the same for the same image."""
    model = make_model(write_encoder(tmp_path / "encoder", kind), mimic_cxr_flags)
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (2, 1, 64, 64), dtype=torch.uint8, generator=generator)
    with torch.no_grad():
        first = model.image_tokens(image)
        second = model.image_tokens(image)
    assert first.shape[1] >= 64
    assert torch.allclose(first.mean(1), second.mean(1), atol=1e-5)
    assert not torch.allclose(first[0].mean(0), first[1].mean(0), atol=1e-4)


IMAGENET = [0.485, 0.456, 0.406]
HALF = [0.5, 0.5, 0.5]
PROCESSORS = [
    (None, IMAGENET),
    (None, [0.449]),
    ({"size": 224}, IMAGENET),
    ({"image_mean": HALF, "image_std": HALF}, HALF),
    # one grey channel, by a number or a list
    ({"image_mean": 0.53, "image_std": 0.25}, [0.53]),
    ({"image_mean": [0.53], "image_std": [0.25]}, [0.53, 0.53, 0.53]),
    # nothing is subtracted
    ({"do_normalize": False, "image_mean": HALF, "image_std": HALF}, [0.0, 0.0, 0.0]),
]


@pytest.mark.parametrize(("settings", "expected"), PROCESSORS)
def test_what_pixels_are_normalised_by(tmp_path, settings, expected):
    """By a processor's config, by ImageNet's statistics where there is none, as many as the encoder has channels."""
    channels = len(expected)
    encoder = write_encoder(tmp_path / "vit", "ViT", num_channels=channels)
    if settings is not None:
        (encoder / "preprocessor_config.json").write_text(json.dumps(settings))
    mean, std = image_statistics(str(encoder), channels)
    assert mean == pytest.approx(expected)
    assert len(std) == channels
    assert min(std) > 0


def test_an_encoder_of_grey_images(mimic_cxr_flags, tmp_path):
    model = make_model(write_encoder(tmp_path / "vit", "ViT", num_channels=1), mimic_cxr_flags)
    with torch.no_grad():
        assert model.image_tokens(torch.zeros(1, 1, 64, 64, dtype=torch.uint8)).shape[:2] == (1, 65)


def test_a_size_that_an_encoder_does_not_take(mimic_cxr_flags, tmp_path):
    """Patches larger than the image."""
    encoder = write_encoder(tmp_path / "vit", "ViT", image_size=128, patch_size=128)
    with pytest.raises(InputError, match=r"vit: does not take pictures of 3 x 64 x 64; see --image_size"):
        make_model(encoder, mimic_cxr_flags)
