"""PRS-Med's memory-saving forms on a GPU, against the libraries' own on a CPU."""

import pytest
import torch
from transformers import SamVisionConfig, SamVisionModel

from tasks.prs_med.memory import fold_relative_positions, padding_of, recompute_lora_dropout, use_fixed_order

# relative positions of a 14 x 14 window, for it and for a smaller one
POSITIONS = torch.arange(27 * 8, dtype=torch.float32).reshape(27, 8).sin()
TABLES = [(14, POSITIONS), (7, POSITIONS)]


WIDTHS = [(92, 96), (96, 96), (192, 192), (193, 232), (224, 232), (225, 232)]


@pytest.mark.parametrize(("width", "padded"), WIDTHS)
def test_attention_takes_a_width_that_all_kernels_have(width, padded):
    """A multiple of 8, and none for which a consumer GPU's flash kernel has no gradient."""
    assert width + padding_of(width) == padded


@pytest.mark.parametrize("image_size", [64, 96], ids=["its own size", "positions interpolated"])
def test_folded_attention_equals_the_bias(image_size):
    """Outputs and all gradients of an encoder with global and windowed layers, windows with padding among them."""
    torch.manual_seed(0)
    config = SamVisionConfig(
        image_size=64,
        patch_size=8,
        window_size=3,
        global_attn_indexes=[1],
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        mlp_dim=64,
        output_channels=16,
    )

    # positions that are not zero
    model = SamVisionModel(config).double()
    encoder = model.vision_encoder
    for layer in encoder.layers:
        for positions in (layer.attn.rel_pos_h, layer.attn.rel_pos_w):
            torch.nn.init.normal_(positions)
    grid = image_size // 8
    if image_size != 64:
        encoder.patch_embed.image_size = (image_size, image_size)
        positions = torch.randn(1, grid, grid, 32).double()
        encoder.pos_embed = torch.nn.Parameter(positions)

    images = torch.randn(2, 3, image_size, image_size).double()
    weights = torch.randn(2, 16, grid, grid).double()
    own = outputs_and_gradients(encoder, images, weights)
    fold_relative_positions(encoder)
    folded = outputs_and_gradients(encoder, images, weights)
    for expected, seen in zip(own, folded, strict=True):
        torch.testing.assert_close(seen, expected, rtol=1e-9, atol=1e-9)


def outputs_and_gradients(
    encoder: torch.nn.Module,
    images: torch.Tensor,
    weights: torch.Tensor,
) -> list[torch.Tensor]:
    """What an encoder gives, and the gradient of each of its parameters."""
    out = encoder(images).last_hidden_state
    loss = (out * weights).sum()
    gradients = torch.autograd.grad(loss, list(encoder.parameters()))
    return [out, *gradients]


def test_lora_dropout_computed_again_is_the_same_dropout():
    """Output and gradients of a LoRA layer with dropout are equal to the bit to peft's own, in training and not."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.5, target_modules=["0"], init_lora_weights=False)
    plain = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Tanh())
    model = inject_adapter_in_model(config, plain)
    inputs = torch.randn(8, 32, requires_grad=True)
    trained = [parameter for name, parameter in model.named_parameters() if "lora_" in name]

    def results() -> list[torch.Tensor]:
        torch.manual_seed(1)
        out = model.train()(inputs)
        torch.manual_seed(2)
        loss = out.square().sum()
        gradients = torch.autograd.grad(loss, [inputs, *trained])
        return [out, *gradients, model.eval()(inputs)]

    own = results()
    recompute_lora_dropout(model)
    for expected, seen in zip(own, results(), strict=True):
        assert torch.equal(seen, expected)

    # there was dropout
    assert not torch.equal(own[0], own[-1])


def test_relative_positions_without_an_index_are_sams():
    """What several CPU threads use, against transformers' own: the same values, also of interpolated positions."""
    from transformers.models.sam.modeling_sam import SamVisionAttention

    config = SamVisionConfig(hidden_size=16, num_attention_heads=2)
    encoder = torch.nn.Module()
    layer = torch.nn.Module()
    layer.attn = SamVisionAttention(config, window_size=14)
    encoder.layers = [layer]

    expected = [layer.attn.get_rel_pos(size, size, positions) for size, positions in TABLES]
    use_fixed_order(encoder)
    for (size, positions), own in zip(TABLES, expected, strict=True):
        ours = layer.attn.get_rel_pos(size, size, positions)
        assert torch.equal(ours, own)
