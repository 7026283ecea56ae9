"""PRS-Med's memory-saving forms on a GPU, against the libraries' own on a CPU."""

import pytest
import torch
from transformers import SamVisionConfig, SamVisionModel

from tasks.prs_med.memory import fold_relative_positions, padding_of, recompute_lora_dropout, use_fixed_order

# relative positions of a 14 x 14 window, for it and for a smaller one
POSITIONS = torch.arange(27 * 8, dtype=torch.float32).reshape(27, 8).sin()
TABLES = [(14, POSITIONS), (7, POSITIONS)]


@pytest.mark.parametrize(("width", "padded"), [(92, 96), (96, 96), (192, 192), (193, 232), (224, 232), (225, 232)])
def test_attention_takes_a_width_that_all_kernels_have(width, padded):
    """A multiple of 8, and none for which a consumer GPU's flash kernel has no gradient."""
    assert width + padding_of(width) == padded


@pytest.mark.parametrize("image_size", [64, 96], ids=["its own size", "positions interpolated"])
def test_folded_attention_equals_the_bias(image_size):
    """Outputs and all gradients of an encoder with global and windowed layers, windows with padding among them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "mlp_dim": 64, "output_channels": 16}
    config = SamVisionConfig(image_size=64, patch_size=8, window_size=3, global_attn_indexes=[1], **sizes)
    model = SamVisionModel(config).double()
    encoder = model.vision_encoder
    for layer in encoder.layers:
        for positions in (layer.attn.rel_pos_h, layer.attn.rel_pos_w):
            torch.nn.init.normal_(positions)
    if image_size != 64:
        encoder.patch_embed.image_size = (image_size, image_size)
        encoder.pos_embed = torch.nn.Parameter(torch.randn(1, image_size // 8, image_size // 8, 32).double())

    images = torch.randn(2, 3, image_size, image_size).double()
    weights = torch.randn(2, 16, image_size // 8, image_size // 8).double()
    results = []
    for folded in (False, True):
        if folded:
            fold_relative_positions(encoder)
        out = encoder(images).last_hidden_state
        gradients = torch.autograd.grad((out * weights).sum(), list(encoder.parameters()))
        results.append([out, *gradients])
    for expected, seen in zip(*results, strict=True):
        torch.testing.assert_close(seen, expected, rtol=1e-9, atol=1e-9)


def test_lora_dropout_computed_again_is_the_same_dropout():
    """Output and gradients of a LoRA layer with dropout are equal to the bit to peft's own, in training and not."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.5, target_modules=["0"], init_lora_weights=False)
    model = inject_adapter_in_model(config, torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Tanh()))
    inputs = torch.randn(8, 32, requires_grad=True)
    trained = [parameter for name, parameter in model.named_parameters() if "lora_" in name]

    results = []
    for recomputed in (False, True):
        if recomputed:
            recompute_lora_dropout(model)
        torch.manual_seed(1)
        out = model.train()(inputs)
        torch.manual_seed(2)
        gradients = torch.autograd.grad(out.square().sum(), [inputs, *trained])
        results.append([out, *gradients, model.eval()(inputs)])
    for expected, seen in zip(*results, strict=True):
        assert torch.equal(seen, expected)
    assert not torch.equal(results[0][0], results[0][-1])


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
        assert torch.equal(layer.attn.get_rel_pos(size, size, positions), own)
