"""--shard_base: each process holds its share of the VLM's frozen weights, and the others' only while it computes.

LoRA, SAM's encoder and the decoder are whole on each process, by DDP as ever, so checkpoints are the same. A layer is
gathered from all processes at each of its passes. Hence all make equally many, also of an evaluation.
"""

import warnings
from collections.abc import Iterable, Iterator

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from old.distributed_utils import print_main
from old.loop_utils import most_passes
from tasks.prs_med.model import PRSMed


def shard_base(model: PRSMed) -> None:
    """All ranks: share out the frozen weights of the VLM's layers, tables and projector; the rest stays whole."""
    model.sharded = True
    before = held_bytes(model)
    vlm = model.vlm
    units = [vlm.get_input_embeddings(), vlm.lm_head, vlm.model.multi_modal_projector]
    for module in vlm.modules():
        # transformers recognises its models by their class, which is another after this: so it is done to layers
        if isinstance(module, nn.ModuleList):
            units += module
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    for unit in units:
        fully_shard(unit, ignored_params=trained)

    # they have one root, so that on a GPU they share the memory that layers are gathered in
    gathered = {parameter for unit in units for parameter in unit.parameters()}
    whole = {parameter for parameter in model.parameters() if parameter not in gathered}
    fully_shard(model, ignored_params=trained | whole)
    # nothing is done in place to what the model returns
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    print_main(f"--shard_base: parameters of {held_bytes(model) / 1e6:.1f} MB a process instead of {before / 1e6:.1f}")


def held_bytes(model: nn.Module) -> int:
    """How many bytes of its parameters this process holds."""
    total = 0
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        total += local.nbytes
    return total


def equal_passes(batches: Iterable[dict], loader: DataLoader, model: PRSMed) -> Iterator[dict]:
    """The batches of an evaluation, which a loader gives; those of a sharded model are equally many on each rank.

    A spare one has no index, so that none of its rows counts.
    """
    passes = 0
    batch = None
    for batch in batches:
        passes += 1
        yield batch
    if not model.sharded:
        return

    data = loader.dataset
    batch = batch or data.reader.collate([data[0]])
    for _ in range(most_passes(len(data), loader.batch_sampler.batch_size) - passes):
        yield batch | {"index": []}
