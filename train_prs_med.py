"""Guide 0, PRS-Med (arXiv 2505.11872): a medical image and a question in, a mask and a sentence saying where it is out.

    python train_prs_med.py --data_root data                              # one GPU, or CPU when there is none
    ./run_multi_gpu_train.sh data 4                                       # 4 GPUs (without GPUs: 4 processes)
    torchrun --nproc_per_node=4 train_prs_med.py --data_root data --batch_size 8 --learning_rate 1e-4 --num_epochs 20
    torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=<node0_ip> --master_port=29500 \\
        train_prs_med.py --data_root data                                 # node 0 of 2; --node_rank=1 on node 1
    python train_prs_med.py --data_root data --eval_only --resume_from checkpoints/best.pt --eval_split test
    python train_prs_med.py --predict scan.png --question "Where is the cyst located in this image?"

Data: <data_root>/annotations/<modality>.csv with image_path,image_name,split,description,position,question,answer,
where image_path is the MASK's path <modality>/<split>_masks/<name>.png and the image lies in <split>_images.
"""

import contextlib
import os
import time
from argparse import BooleanOptionalAction, Namespace
from functools import partial
from pathlib import Path

from old.cli_utils import InputError, Parser, add_common_arguments, number, run_main, whole
from old.question_utils import add_question_flags, split_interval
from tasks.prs_med.flags import add_data_flags, add_output_flags, read_arguments

FORMAT = "prs_med/1"
LOSSES = ["loss", "loss_seg", "loss_txt", "grad_norm", "skipped"]
CURVES = ["val/loss", "val/dice", "val/iou", "val/position_accuracy", "val/position_accuracy_mask"]


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)

    add_data_flags(parser)

    add = parser.add_argument_group("model").add_argument
    add("--vlm_path", help="LLaVA-format folder or hub name; default: found in a folder of --data_root")
    add("--sam_path", help="SAM-format folder or hub name; default: found in a folder of --data_root")
    add("--image_size", type=whole(16), help="side of SAM's input and the masks; default: SAM's own; lower it on OOM")
    add("--lora_rank", type=whole(1), help="rank of the LoRA matrices; default: the checkpoint's, else 16")
    add("--lora_alpha", type=number(0, above=True), help="LoRA scale is alpha / rank; default: as --lora_rank")
    add("--lora_dropout", type=number(0, 0.99), default=0.05, help="dropout before the LoRA matrices")
    text = "recompute activations: less memory, a third slower; left out: if one image needs it"
    add("--gradient_checkpointing", action=BooleanOptionalAction, help=text)

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch_size", type=whole(1), default=8, help="samples PER GPU and forward pass; lower it on OOM")
    add("--learning_rate", type=number(0, above=True), default=1e-4, help="base rate, before --lr_scaling")
    text = "times world size (or --effective_batch_size / --batch_size), its root, or 1"
    add("--lr_scaling", choices=("linear", "sqrt", "none"), default="linear", help=text)
    add("--lr_schedule", choices=("constant", "cosine"), default="constant", help="after warm-up; cosine ends at 0")
    add("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up")
    add("--weight_decay", type=number(0), default=0.01, help="AdamW weight decay")
    add("--num_epochs", type=whole(1), default=20, help="passes over the training rows")
    add("--lambda_seg", type=number(0), default=1.0, help="weight of the mask loss (BCE + Dice)")
    add("--lambda_txt", type=number(0), default=0.5, help="weight of the answer's cross-entropy")

    add_output_flags(parser)
    add_question_flags(parser)
    add_common_arguments(parser, {"learning_rate": "lr"})

    return read_arguments(parser, argv)


if __name__ == "__main__":
    # before the heavy imports: --help and a mistyped flag answer at once
    ARGS = parse_args()

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

# processes, precision and memory
from old.distributed_utils import Ranks, agree_on_errors, launch_workers, print_main
from old.distributed_utils import scale_learning_rate, schedule, setup_distributed, to_device, world
from old.hardware_utils import choose_precision, set_numerics
from old.memory_utils import BatchSize

# the loop, its log and its checkpoints
from old.batch_utils import keep_effective_batch
from old.image_order_utils import order_facts
from old.checkpoint_utils import export_weights, load_checkpoint, load_trained, lock_run_folder
from old.checkpoint_utils import prepare_checkpoint, trained_state
from old.logging_utils import RunLog, with_bar
from old.loop_utils import (
    LossScaler,
    Step,
    TrainingRun,
    ValidatedProgress,
    agree_on_precision,
    clip_and_step,
    pad_passes,
)
from old.loop_utils import (
    end_epoch,
    end_step,
    explain_out_of_memory,
    finish_run,
    keep_best,
    next_epoch,
    optimizer_steps,
)
from old.loop_utils import print_start, restore_training, resume, safety_flags, say_if_finished, say_where, seed_ranks
from old.loop_utils import sync_gradients

# images, questions and results
from old.predict_utils import list_questions
from tasks.prs_med.augmentation import augment
from tasks.prs_med.blind import look_away
from tasks.prs_med.data import Patients, PositionData, evaluation_loader, evaluation_loaders, limit_rows, make_datasets
from tasks.prs_med.data import read_annotations, swap_questions, training_loader
from tasks.prs_med.data_check import read_rows
from tasks.prs_med.evaluation import gather_examples, gather_scores, log_results, mean_metrics
from tasks.prs_med.metrics import add_up_rows, score_batch
from tasks.prs_med.prediction import predict
from tasks.prs_med.report import Results, describe_run, draw_inputs, draw_predictions, print_metrics
from tasks.prs_med.report import take_examples, write_cases, write_evaluation

# the model, and what a step of it takes
from tasks.prs_med.fitting import choose_batch_size, out_of_memory_advice, rehearse_model
from tasks.prs_med.memory import fold_relative_positions, recompute_activations, recompute_lora_dropout, use_fixed_order
from tasks.prs_med.model import PRSMed
from tasks.prs_med.pretrained import Architecture, add_lora, check_base, check_same_base, choose_architecture, find_sam
from tasks.prs_med.pretrained import find_vlm, fingerprint, load_reader, load_sam, load_vlm, wrap_model
from tasks.prs_med.sharding import equal_passes

# --- model ------------------------------------------------------------------------------------------------------------


def build_model(
    args: Namespace,
    precision: str,
    device: torch.device,
    checkpoint: dict | None = None,
) -> PRSMed:
    """Load both encoders, add LoRA to the language model, freeze the rest of the VLM. Raises InputError.

    The flags that were left out take the values that are found, for args.yaml and the banner.
    """
    root = Path(args.data_root)
    base = checkpoint["base"] if checkpoint else None
    asked = Architecture(args.lora_rank, args.lora_alpha, args.image_size)
    architecture = choose_architecture(asked, base)
    vlm_source = find_vlm(root, args.vlm_path)
    sam_source = find_sam(root, args.sam_path)
    args.vlm_path = vlm_source.path
    args.sam_path = sam_source.path
    vars(args).update(architecture._asdict())

    # the pretrained parts
    vlm = load_vlm(vlm_source, precision, device)
    sam = load_sam(sam_source, args.image_size)
    image_size, _ = sam.patch_embed.image_size
    reader = load_reader(args.vlm_path, args.sam_path, vlm, image_size)

    # what is trained anew: the same LoRA and decoder on every rank
    torch.manual_seed(args.seed)
    vlm = add_lora(vlm, args.lora_rank, args.lora_alpha, args.lora_dropout)
    model = PRSMed(vlm, sam, reader, precision)
    model.to(device)

    # the forms that need less memory on a GPU, or that add up in one order on a CPU
    if device.type == "cuda":
        fold_relative_positions(sam)
        recompute_lora_dropout(vlm)
        model.sam.to(memory_format=torch.channels_last)
        model.decoder.to(memory_format=torch.channels_last)
    elif torch.get_num_threads() > 1:
        use_fixed_order(sam)
    if args.gradient_checkpointing:
        recompute_activations(model)

    # a checkpoint names what it was trained on
    model.base = {"name": Path(args.vlm_path).name, "fingerprint": fingerprint(model)}
    model.base |= architecture._replace(image_size=image_size)._asdict()
    return model


def load_weights(model: PRSMed, checkpoint: dict) -> None:
    """Put a checkpoint's weights into the model. Raises InputError for another model or another frozen base."""
    check_base(checkpoint["base"], model.base["fingerprint"])
    load_trained(model, checkpoint["model"])


# --- loss -------------------------------------------------------------------------------------------------------------


def mask_loss(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """BCE + Dice loss of each sample: (B, H, W) logits and bool masks -> (B,)."""
    target = masks.float()
    probability = logits.sigmoid()
    bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    bce = bce.mean((1, 2))
    overlap = probability * target
    overlap = overlap.sum((1, 2))
    areas = probability.sum((1, 2)) + target.sum((1, 2))
    return bce + 1 - (2 * overlap + 1) / (areas + 1)


def batch_loss(
    model: nn.Module,
    batch: dict,
    samples: int,
    tokens: float,
    args: Namespace,
) -> torch.Tensor:
    """(loss, mask part, text part): a micro-batch's share of the means over the global batch.

    samples, tokens: images and answer tokens of the global batch.
    """
    logits, text_loss = model(batch)
    seg = mask_loss(logits, batch["mask"])
    seg = seg.sum() / samples
    txt = text_loss.sum() / tokens
    loss = args.lambda_seg * seg + args.lambda_txt * txt

    # a non-finite loss must give non-finite gradients, which DDP carries to every rank: all skip the step together
    finite = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
    return torch.stack([loss * finite, seg, txt])


# --- training ---------------------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.AdamW:
    """Fused AdamW over what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)


def count_answer_tokens(step: Step) -> list[float]:
    """Tokens of the answers in this rank's share of a step."""
    tokens = 0
    for batch in step.batches:
        given = batch["answer"] >= 0
        tokens += int(given.sum())
    return [float(tokens)]


def train_one_epoch(
    model: nn.Module,
    loader: DataLoader,
    optimizer: torch.optim.AdamW,
    scaler: LossScaler,
    training: TrainingRun,
    args: Namespace,
) -> None:
    """Train from the run's position to the end of the epoch, of the run, or to a stop signal.

    model: PRSMed, or DDP around it. Between log lines nothing is read back from the GPU. Raises InputError on all ranks
    for an unusable image of any.
    """
    model.train()
    device = next(model.parameters()).device
    _, world_size = world()
    base_lr = scale_learning_rate(args.learning_rate, training.batch_scale, args.lr_scaling)
    progress = training.progress
    for step in optimizer_steps(loader, training, count=count_answer_tokens):
        factor = schedule(progress.step, training.planned_steps, args.warmup_steps, args.lr_schedule)
        lr = base_lr * factor

        # forward and backward: each micro-batch gives its share of the mean over the global batch
        losses = torch.zeros(3, device=device)
        weights = pad_passes(step, loader.batch_sampler.batch_size, args.shard_base)
        for (batch, last), weight in zip(step.micro_batches(), weights, strict=True):
            batch = to_device(batch, device)
            if args.augmentation:
                batch = augment(batch, args.seed, progress.epoch)
            with training.log.count_flops(step.samples), sync_gradients(model, now=last):
                parts = batch_loss(model, batch, step.samples, step.totals[0], args)
                parts = parts * weight
                # DDP averages over the ranks; these are shares of a sum, so undo the division
                scaler.scale(parts[0] * world_size).backward()
            losses += parts.detach()

        # update the weights; a non-finite gradient skips the step on all ranks together
        grad_norm = clip_and_step(optimizer, scaler, args.grad_clip, lr)
        end_step(training, step, losses, grad_norm, lr)


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: PRSMed, loader: DataLoader, split: str, args: Namespace) -> Results:
    """Metrics of a split, the same on every rank and for any number of ranks.

    dice, iou, hd95: means over rows at image_size, also per modality. position_accuracy: the GENERATED answer names the
    position computed from the true mask; position_accuracy_mask: the predicted mask lies there. loss, loss_seg,
    loss_txt: as in training, over the whole split. text_loss: another name of loss_txt.
    """
    model.eval()
    data = loader.dataset
    scores = []
    examples = {}
    error = ""
    for batch in equal_passes(with_bar(loader, split), loader, model):
        error = error or batch["error"]
        batch = to_device(batch, model.device)
        logits, text_loss = model(batch)
        answers = None if args.no_generate else model.answer(batch, args.max_new_tokens)

        # what is added up over pixels and tokens comes to the host in one transfer
        predicted = logits > 0
        sums = add_up_rows(predicted, batch, mask_loss(logits, batch["mask"]), text_loss)
        masks = predicted.cpu().numpy()
        batch_scores = score_batch(batch, sums, masks, answers)
        scores += batch_scores
        examples |= take_examples(data.rows, batch, masks, batch_scores)

    scores = gather_scores(scores, error)
    metrics = mean_metrics(scores, data, split, args.lambda_seg, args.lambda_txt)
    return Results(metrics, gather_examples(examples), scores)


def test_best(model: PRSMed, loaders: dict, training: TrainingRun, args: Namespace) -> None:
    """Print the metrics of best.pt; where nothing was validated, the test's of the last weights."""
    progress = training.progress
    run_folder = training.run_folder
    title = "test, the last weights (there are no validation rows)"
    if "val" in loaders:
        title = "test, best.pt"
        best = load_checkpoint(str(run_folder / "best.pt"), run_folder, FORMAT)
        load_weights(model, best)
        # it was evaluated and logged when it was chosen; a checkpoint of an older script does not tell
        if progress.best_metrics is None:
            results = evaluate(model, loaders["val"], "val", args)
            log_results(results, "val", training)
            progress.best_metrics = results.metrics
        print_metrics("val, best.pt", progress.best_metrics)
    if "test" in loaders:
        loader = loaders["test"]
        results = evaluate(model, loader, "test", args)
        print_metrics(title, results.metrics)
        if args.blind_scores:
            evaluate_test = partial(evaluate, model, split="test", args=args)
            rows = loaders["train"].dataset.rows
            results.metrics.update(look_away(evaluate_test, loader, results, rows, "test", args.seed))
        log_results(results, "test", training)
        write_cases(run_folder / "test_cases.csv", loader.dataset.rows, results.scores)


def evaluate_only(
    model: PRSMed,
    sets: dict[str, PositionData],
    step: int,
    args: Namespace,
) -> None:
    """--eval_only: the metrics of one split, printed and written to eval_<split>[_shuffled].json, with their figure."""
    name = args.eval_split
    data = sets[name]
    facts = {"step": step}
    if args.shuffle_questions:
        name = f"{name}_shuffled"
        data.rows, changed = swap_questions(data.rows)
        facts |= {"rows": len(data), "rows_with_another_question": changed}
        print_main(f"{changed} of {len(data)} rows ask another question about their image")
    data = limit_rows(data, args.eval_max_samples, args.seed)
    loader = evaluation_loader(data, args.batch_size, args.num_workers)
    results = evaluate(model, loader, args.eval_split, args)
    print_metrics(name, results.metrics)
    if args.blind_scores and not args.shuffle_questions:
        evaluate_split = partial(evaluate, model, split=args.eval_split, args=args)
        facts |= look_away(evaluate_split, loader, results, sets["train"].rows, args.eval_split, args.seed)
    write_evaluation(Path(args.checkpoint_dir), name, results.metrics | facts, results, data.rows)


# --- the run ----------------------------------------------------------------------------------------------------------


def asked_batch(args: Namespace, checkpoint: dict | None = None) -> BatchSize:
    """The batch of the flags, or of the run that is resumed."""
    base = keep_effective_batch(vars(args), args.source, checkpoint)
    recomputed = bool(args.gradient_checkpointing)
    batch = BatchSize(args.batch_size, args.gradient_accumulation_steps, args.source["batch_size"], recomputed)
    return batch.of_effective_batch(args.effective_batch_size, base)


def trial_step(model: PRSMed, batch: dict, args: Namespace) -> None:
    """Forward and backward pass of one micro-batch of its size in memory; the gradients stay in the model."""
    batch = to_device(batch, model.device)
    samples = len(batch["index"])
    tokens = batch["answer"].numel()
    losses = batch_loss(model.train(), batch, samples, tokens, args)
    losses[0].backward()


def rehearse(args: Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step, of the longest rows where the annotations are there."""
    root = Path(args.data_root)
    rows = []
    if (root / "annotations").is_dir():
        rows = read_annotations(root, args.annotations, args.skip_bad_rows)

    def build(device: torch.device) -> PRSMed:
        precision, _ = choose_precision(args.mixed_precision, device)
        set_numerics(device, precision, "", args.deterministic)
        with device:
            return build_model(args, precision, device)

    optimizer = partial(make_optimizer, args=args)
    trial = partial(trial_step, args=args)
    rehearse_model(build, optimizer, trial, rows, asked_batch(args), args.world_size, args.gpu_memory)


def run(args: Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun = time.time()
    run_folder = Path(args.checkpoint_dir)
    precision, reason = agree_on_precision(partial(choose_precision, args.mixed_precision, ranks.device))
    reason = set_numerics(ranks.device, precision, reason, args.deterministic)

    # what is wrong with the data is said before anything is written
    rows = []
    asked = list_questions(args.predict, args.question)
    if not args.predict:
        root = Path(args.data_root)
        needed_split = args.eval_split if args.eval_only else "train"
        check = not args.skip_data_check
        patients = Patients(args.patient_column, args.patient_pattern)
        limit = args.max_contradictions
        rows = read_rows(root, args.annotations, args.skip_bad_rows, needed_split, check, ranks, patients, limit)

    # a training has the run folder to itself from here on
    apply_only = bool(args.eval_only or args.predict)
    lock = None
    resume_from = args.resume_from
    if apply_only:
        resume_from = resume_from or str(run_folder / "best.pt")
    else:
        may_exist = bool(args.resume_from) or args.overwrite
        lock = lock_run_folder(run_folder, may_exist, overwrite=args.overwrite)
    checkpoint = load_checkpoint(resume_from, run_folder, FORMAT, resume=not apply_only)
    if apply_only and checkpoint is None:
        raise InputError(f"{run_folder}: no checkpoint to use; give one with --resume_from")

    # the model, the same on all ranks
    with agree_on_errors():
        model = build_model(args, precision, ranks.device, checkpoint)
    check_same_base(model.base["fingerprint"])
    with agree_on_errors():
        if checkpoint:
            load_weights(model, checkpoint)

    if args.predict:
        return predict(model, asked, args.batch_size, args.max_new_tokens, run_folder)
    sets = make_datasets(rows, model.reader, args.cache_gb, args.augmentation)
    if args.eval_only:
        evaluate_only(model, sets, checkpoint["step"], args)
        return 0
    code = fit(model, sets, checkpoint, reason, args, ranks)
    print_main(f"{time.time() - begun:.0f} seconds in all")
    del lock
    return code


def facts_of_run(loader: DataLoader, args: Namespace) -> dict:
    """What may not differ where a run is resumed."""
    sampler = loader.batch_sampler
    facts = {
        "training_rows": len(loader.dataset),
        "effective_batch_size": sampler.effective_batch_size,
    }
    facts |= order_facts(sampler, args.questions_per_image)
    facts |= loader.dataset.augmentation_facts()
    return facts


def fit(model: PRSMed, sets: dict, checkpoint: dict | None, reason: str, args: Namespace, ranks: Ranks) -> int:
    """Train, validate each epoch, keep checkpoints, test the best; returns the exit code."""
    begun = time.time()
    run_folder = Path(args.checkpoint_dir)
    trial = partial(trial_step, args=args)
    asked = asked_batch(args, checkpoint)
    batch = choose_batch_size(
        model, sets["train"], trial, asked, args.auto_batch, args.gradient_checkpointing, checkpoint
    )
    loaders = {"train": training_loader(sets["train"], batch, args.seed, args.num_workers, args.questions_per_image)}
    loaders |= evaluation_loaders(sets, batch.size, args.eval_max_samples, args.seed, args.num_workers)

    # what is trained, by how many steps, and what is logged
    sampler = loaders["train"].batch_sampler
    planned_steps = args.num_epochs * sampler.steps_per_epoch()
    last_step = min(args.max_steps or planned_steps, planned_steps)
    optimizer = make_optimizer(model, args)
    scaler = LossScaler(ranks.device, model.precision)
    log = RunLog(run_folder, ranks, LOSSES, last_step, args.log_every, model.precision, args.compile)
    log.curves = CURVES
    this_run = facts_of_run(loaders["train"], args)

    # where it stands, and what a checkpoint of it holds
    training = TrainingRun(
        run_folder=run_folder,
        progress=ValidatedProgress(),
        last_step=last_step,
        planned_steps=planned_steps,
        effective_batch_size=sampler.effective_batch_size,
        precision=model.precision,
        log=log,
        contents=partial(checkpoint_contents, model, optimizer, scaler, batch, this_run, args),
        model=model,
        **safety_flags(args),
    )
    training.batch_scale = batch.scale
    training.eval_epochs, training.eval_steps = split_interval(args.eval_every)

    # begin, or resume where the checkpoint stands
    seed_ranks(args.seed)
    if checkpoint:
        resume(training.progress, checkpoint, this_run, run_folder)
        restore_training(checkpoint, optimizer, scaler, args.weight_decay)
    log.open(args, checkpoint)
    prepare_checkpoint(model)
    print_start("PRS-Med", ranks, training, describe_run(model, sets, batch, reason, args))
    if args.compile:
        model.compile()

    advice = partial(out_of_memory_advice, batch.size, batch.accumulation_flag, args.auto_batch, ranks.device)
    with training, contextlib.closing(log), explain_out_of_memory(advice):
        code = train(model, wrap_model(model, ranks, args.shard_base), loaders, optimizer, scaler, training, args)
        if code:
            return code
        finish_run(training, begun, training.progress.best_metrics if "val" in loaders else {})
        export_weights(trained_state(model, args.save_full_state), run_folder / "model.safetensors")
        say_where(run_folder)
    return 0


def checkpoint_contents(
    model: PRSMed,
    optimizer: torch.optim.AdamW,
    scaler: LossScaler,
    batch: BatchSize,
    this_run: dict,
    args: Namespace,
) -> dict:
    """What a checkpoint holds beside position, log and random state. this_run: what a resumed run must share."""
    return {
        "format": FORMAT,
        "base": model.base,
        "model": trained_state(model, args.save_full_state),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "run": this_run,
        "precision": model.precision,
        "split": batch.record(),
    }


def train(
    model: PRSMed,
    wrapped: nn.Module,
    loaders: dict[str, DataLoader],
    optimizer: torch.optim.AdamW,
    scaler: LossScaler,
    training: TrainingRun,
    args: Namespace,
) -> int:
    """All epochs, each with its validation, then the test of best.pt; returns a stop signal's exit code, else 0."""
    progress = training.progress
    log = training.log
    best_examples = []
    say_if_finished(training, "--num_epochs")
    if progress.step == 0:
        data_sets = [loader.dataset for loader in loaders.values()]
        log.figures(lambda: {"inputs": draw_inputs(data_sets, args.seed)}, 0)
    # a checkpoint of a step with an evaluation is older than that
    waiting = training.pauses() and progress.samples > 0
    while True:
        if not waiting:
            train_one_epoch(wrapped, loaders["train"], optimizer, scaler, training, args)
        waiting = False
        code = end_epoch(training)
        if code:
            return code

        # the validation, where it is due and at the end; best.pt is the checkpoint of the highest Dice
        epoch_complete = progress.samples >= loaders["train"].batch_sampler.used
        planned = training.plans_evaluation(epoch_complete)
        at_end = progress.step >= training.last_step
        if "val" in loaders and (planned or at_end):
            results = evaluate(model, loaders["val"], "val", args)
            log_results(results, "val", training)
            loss = results.metrics["val/loss"]
            dice = results.metrics["val/dice"]
            print_main(f"epoch {progress.epoch + 1}: val loss {loss:.4f}, dice {dice:.4f}")
            if keep_best(training, dice, planned):
                progress.best_metrics = results.metrics
                best_examples = results.examples
        if at_end or (epoch_complete and not next_epoch(training)):
            break

    test_best(model, loaders, training, args)
    if best_examples:
        log.figures(lambda: {"val_predictions": draw_predictions(best_examples)}, progress.step)
    return 0


def main(args: Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    launch_workers(args.world_size or 1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with setup_distributed(timeout=args.dist_timeout) as ranks:
        asked = asked_batch(args)
        advice = partial(out_of_memory_advice, asked.size, asked.accumulation_flag, args.auto_batch, ranks.device)
        with explain_out_of_memory(advice):
            return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
