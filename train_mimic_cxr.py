"""MIMIC-CXR questions + CheXpert: a chest X-ray and a question in, an answer and 14 labels out (guide 1).

    ./launch_distributed_training.sh --config configs/default_config.yaml          # every GPU, settings found by itself
    python train_mimic_cxr.py --config configs/default_config.yaml                 # one GPU, or CPU
    deepspeed --num_gpus=4 train_mimic_cxr.py --config configs/default_config.yaml --use_deepspeed
    torchrun --nproc_per_node=4 train_mimic_cxr.py --config configs/default_config.yaml --use_ddp
    torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=<node0_ip> --master_port=29500 \\
        train_mimic_cxr.py --config configs/default_config.yaml               # node 0 of 2; --node_rank=1 on node 1
    python train_mimic_cxr.py --config configs/default_config.yaml --eval_only --resume_from runs/mimic_cxr/best.pt
    python train_mimic_cxr.py --table xrays.csv               # X-rays of your own, with questions and answers
    python train_mimic_cxr.py --predict xray.png --question "Is there a pleural effusion?"

Data: MIMIC-CXR-JPG 2.1.0 (--mimic_cxr_path) and MIMIC-Ext-CXR-QBA 1.0.0 (--mimic_qa_path) as they are downloaded. The
report-derived scene graph is never an input: the answers come from the same report.
"""

import os
import time
from argparse import BooleanOptionalAction, Namespace
from contextlib import closing
from functools import partial
from pathlib import Path

from old.cli_utils import InputError, Parser, add_common_arguments, number, run_main, whole
from old.question_utils import add_question_flags, split_interval
from tasks.mimic_cxr.flags import add_engine_flags, add_output_flags, add_table_flags, is_given, read_arguments

FORMAT = "mimic_cxr/1"
LOSSES = ["loss", "loss_vqa", "loss_chexpert", "grad_norm", "skipped"]


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument_group("data").add_argument
    grades = ("A++", "A+", "A", "B", "C", "D", "all")
    views = ("frontal", "PA", "AP", "lateral")
    uncertain = ("ignore", "positive", "negative", "soft")
    add("--mimic_cxr_path", default="data/mimic-cxr-jpg", help="MIMIC-CXR-JPG: folder with files/ and three .csv.gz")
    add("--mimic_qa_path", default="data/mimic-ext-cxr-qba", help="MIMIC-Ext-CXR-QBA: folder with metadata/ and qa/")
    add("--index_dir", default="runs/index", help="index of questions (3 GB), shared by all runs and all nodes")
    add("--quality_grade", choices=grades, default="B", help="questions of this grade or better; all: unrated ones too")
    add("--view", choices=views, default="frontal", help="image of a study; frontal: PA, else AP")
    add("--chexpert_uncertain", choices=uncertain, default="ignore", help="label -1 in training; soft: 0.5")
    add("--max_samples", type=whole(0), default=0, help="questions of each split, evenly spaced; 0: all")
    add("--max_missing", type=whole(0), default=0, help="image files that may be missing; more are an error")
    add("--image_size", type=whole(32), default=224, help="side of the square input, pixels; lower it on OOM")
    add("--cache_gb", type=number(0), default=16.0, help="GiB of DISK for decoded images, for all ranks; 0: none")

    add = parser.add_argument_group("model").add_argument
    add("--image_encoder", default="facebook/convnext-base-224", help="Hugging Face folder or hub name")
    add("--text_encoder", default="emilyalsentzer/Bio_ClinicalBERT", help="Hugging Face folder or hub name")
    add("--fusion_layers", type=whole(1), default=2, help="layers in which the question attends to the image")
    add("--dropout", type=number(0, 0.99), default=0.1, help="in the text encoder, the fusion layers and the heads")
    add("--max_question_length", type=whole(4), default=128, help="tokens; longer questions are cut")
    add("--freeze_image", action="store_true", help="do not train the image encoder (saves memory)")
    add("--freeze_text", action="store_true", help="do not train the text encoder (saves memory)")
    recomputation = "recompute activations: less memory, a third slower; left out: when needed"
    add("--gradient_checkpointing", action=BooleanOptionalAction, help=recomputation)
    add("--pretrained_weights", metavar="FILE", help="another run's model.safetensors to start from")

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch_size", type=whole(1), default=16, help="questions PER GPU and forward pass; lower it on OOM")
    add("--epochs", type=whole(1), default=20, help="passes over the training questions")
    add("--learning_rate", type=number(0, above=True), default=1e-4, help="peak; not scaled with the GPUs")
    add("--lr_schedule", choices=("constant", "cosine"), default="cosine", help="after warm-up; cosine ends at 0")
    add("--warmup_steps", type=whole(0), default=500, help="optimizer steps of linear warm-up")
    add("--weight_decay", type=number(0), default=0.01, help="AdamW weight decay")
    add("--chexpert_weight", type=number(0), default=0.3, help="weight of the CheXpert loss beside the answers'")

    add_table_flags(parser)
    add_engine_flags(parser)
    add_output_flags(parser)
    add_question_flags(parser)
    add_common_arguments(parser, {"learning_rate": "lr"})
    return read_arguments(parser, argv)


if __name__ == "__main__":
    # before the heavy imports: --help and a mistyped flag answer at once
    ARGS = parse_args()

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

# processes, the loop, and what becomes of it on disk
from old import deepspeed_utils
from old.augmentation_utils import change_images, draw_changes
from old.checkpoint_utils import load_checkpoint, load_trained, lock_run_folder, prepare_checkpoint, restore_rng
from old.distributed_utils import Ranks, agree_on_errors, launch_workers, print_main
from old.distributed_utils import schedule, setup_distributed, to_device, world
from old.image_order_utils import order_facts
from old.logging_utils import RunLog, with_bar
from old.loop_utils import Step, TrainingRun, ValidatedProgress, end_epoch, end_step, explain_out_of_memory, finish_run
from old.loop_utils import keep_best, most_passes, next_epoch, optimizer_steps, pad_passes, print_start, resume
from old.loop_utils import safety_flags, say_if_finished, say_where, seed_ranks
from old.memory_utils import BatchSize

# questions and answers
from tasks.mimic_cxr.answers import HEADS, use_categories
from tasks.mimic_cxr.blind import limit_questions
from tasks.mimic_cxr.data import QuestionData, check_split, largest_batch, make_loader, note_trained_labels, open_sets
from tasks.mimic_cxr.evaluation import Evaluation, evaluate_only, judge, judge_further, keep_predictions
from tasks.mimic_cxr.evaluation import keep_validation, log_evaluation, log_validation, name_split, thresholds_of
from tasks.mimic_cxr.heads import describe_training
from tasks.mimic_cxr.metrics import Predictions, batch_predictions, gather_predictions
from tasks.mimic_cxr.prediction import predict
from tasks.mimic_cxr.report import draw_inputs, print_index, print_metrics

# the model, its engine and its settings
from tasks.mimic_cxr.checkpoints import export_run, open_checkpoint
from tasks.mimic_cxr.encoders import load_encoders, load_pretrained
from tasks.mimic_cxr.engines import DeepSpeedEngine, Engine, TorchEngine, fill_batch, prepare_deepspeed
from tasks.mimic_cxr.model import ChestModel, freeze_unused, recompute_activations
from tasks.mimic_cxr.settings import Setup, asked_batch, choose_batch_size, choose_setup, describe_run
from tasks.mimic_cxr.settings import open_questions, out_of_memory_advice, rehearse_model

HEAD_WEIGHT = {"binary": 1.0, "category": 0.5, "region": 0.5, "severity": 0.3}


def build_model(args: Namespace, precision: str, device: torch.device) -> tuple[ChestModel, object]:
    """(model, tokenizer): both encoders loaded, frozen where asked, checkpointing set. Raises InputError."""
    encoders = load_encoders(args.image_encoder, args.text_encoder, args.dropout)
    longest = encoders.longest_question
    if args.max_question_length > longest:
        reason = f"{args.text_encoder} takes {longest}"
        raise InputError(f"--max_question_length {args.max_question_length}: {reason}; lower it")

    # the same new layers on every rank
    if args.categories:
        use_categories(args.categories)
    torch.manual_seed(args.seed)
    model = ChestModel(encoders, precision, args.fusion_layers, args.dropout)
    model.image.requires_grad_(not args.freeze_image)
    model.text.requires_grad_(not args.freeze_text)
    freeze_unused(model, args.image_size, args.image_encoder)
    if args.gradient_checkpointing:
        recompute_activations(model, args.image_encoder, args.text_encoder)
    return model.to(device), encoders.tokenizer


# --- loss -------------------------------------------------------------------------------------------------------------


def question_losses(
    answers: list[Tensor],
    chexpert: Tensor,
    batch: dict,
) -> tuple[Tensor, Tensor]:
    """(cross-entropy (B,) of each question's own head, binary cross-entropy (B, 14) of each known CheXpert label)."""
    entropy = torch.zeros(len(chexpert), device=chexpert.device)
    for place, logits in enumerate(answers):
        asked = batch["head"] == place
        target = torch.where(asked, batch["target"], 0)
        losses = F.cross_entropy(logits, target, reduction="none")
        entropy = entropy + asked * losses
    bce = F.binary_cross_entropy_with_logits(chexpert, batch["label"], reduction="none")
    return entropy, bce * batch["known"]


def count_targets(step: Step) -> list[float]:
    """[questions of each head..., known CheXpert labels] of this rank's share of a step, on the host."""
    heads = torch.cat([batch["head"] for batch in step.batches])
    counts = torch.bincount(heads, minlength=len(HEADS)).tolist()
    known = 0
    for batch in step.batches:
        known += int(batch["known"].sum())
    return [*counts, known]


def batch_loss(
    model: nn.Module,
    batch: dict,
    counts: list[float],
    chexpert_weight: float,
) -> Tensor:
    """(loss, answers' part, CheXpert part): a micro-batch's share of the means over the global batch.

    counts: as count_targets gives them, of all ranks. Each head's cross-entropy is a mean over ITS questions in the
    global batch, weighted 1/.5/.5/.3; CheXpert's BCE one over the labels that are known. Shares of all ranks and
    micro-batches add up.
    """
    *answers, chexpert = model(batch["image"], batch["ids"], batch["mask"], batch["image_of"])
    entropy, bce = question_losses(answers, chexpert, batch)
    vqa = chexpert.new_zeros(())
    for place, head in enumerate(HEADS):
        asked = batch["head"] == place
        weighted = HEAD_WEIGHT[head] * (entropy * asked).sum()
        vqa = vqa + weighted / max(1.0, counts[place])
    known = max(1.0, counts[-1])
    labels = bce.sum() / known
    loss = vqa + chexpert_weight * labels

    # a non-finite loss must give non-finite gradients, which reach every rank: all skip the step together
    finite = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
    return torch.stack([loss * finite, vqa, labels])


# --- training ---------------------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.AdamW:
    """A fused AdamW over what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)


def make_engine(model: ChestModel, setup: Setup, batch: BatchSize, args: Namespace) -> Engine:
    """The optimizer, and the engine around the model: torch's, or DeepSpeed's where there is a config for it."""
    device = model.mean.device
    if setup.config is None:
        # not for DeepSpeed, which sends weights as flat bytes: they must be in order
        if model.mean.is_cuda:
            model.image.to(memory_format=torch.channels_last)
        optimizer = make_optimizer(model, args)
        return TorchEngine(model, optimizer, device, setup.precision, args.grad_clip)
    config = fill_batch(setup.config, setup.config_path, batch, args.grad_clip, setup.precision)
    optimizer = make_optimizer(model, args)
    return DeepSpeedEngine(model, optimizer, config)


def training_loader(data: QuestionData, batch: BatchSize, args: Namespace) -> DataLoader:
    """This rank's share of the training questions; the last step of an epoch takes what is left."""
    return make_loader(
        data,
        batch.size,
        args.num_workers,
        args.prefetch_factor,
        seed=args.seed,
        accumulation=batch.accumulation,
        effective_batch_size=batch.total,
        drop_last=False,
        questions_per_image=args.questions_per_image,
    )


def train_one_epoch(
    engine: Engine,
    loader: DataLoader,
    training: TrainingRun,
    args: Namespace,
) -> None:
    """Train from the run's position to the end of the epoch, of the run, or to a stop signal.

    Between log lines nothing is read back from the GPU. Raises InputError on all ranks for an unusable image of any.
    """
    engine.model.train()
    _, world_size = world()
    progress = training.progress
    batch_size = loader.batch_sampler.batch_size
    for step in optimizer_steps(loader, training, count=count_targets):
        factor = schedule(progress.step, training.planned_steps, args.warmup_steps, args.lr_schedule)
        lr = args.learning_rate * factor

        # ZeRO exchanges in each pass, so every rank makes equally many: what is spare counts nothing
        weights = pad_passes(step, batch_size)

        # forward and backward: each micro-batch gives its share of the mean over the global batch
        losses = torch.zeros(3, device=engine.device)
        for (batch, last), weight in zip(step.micro_batches(), weights, strict=True):
            batch = to_device(batch, engine.device)
            if args.augmentation:
                changes = draw_changes(args.seed, progress.epoch, batch["keys"])
                batch["image"] = change_images(batch["image"], changes)
            with training.log.count_flops(step.samples), engine.micro_batch(last):
                parts = batch_loss(engine.model, batch, step.totals, args.chexpert_weight)
                parts = parts * weight
                # both engines average over the ranks; these are shares of a sum, so undo the division
                engine.backward(parts[0] * world_size)
            losses += parts.detach()

        # update the weights; a non-finite gradient skips the step on all ranks together
        grad_norm = engine.update(lr)
        end_step(training, step, losses, grad_norm, lr)


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def answer_questions(
    model: nn.Module,
    data: QuestionData,
    batch_size: int,
    args: Namespace,
) -> Predictions:
    """All ranks: answer every question of a split once; a row for each. Raises InputError on all ranks."""
    model.eval()
    loader = make_loader(data, batch_size, args.num_workers, args.prefetch_factor, train=False)

    # ZeRO-3 gathers weights in each pass, so every rank makes equally many
    passes = most_passes(len(data), loader.batch_sampler.batch_size)
    batches = iter(loader)
    local = []
    error = ""
    for _ in with_bar(range(passes), data.split):
        batch = next(batches, None)
        has_share = batch is not None
        if not has_share:
            batch = data.collate([data[0]])
        error = error or batch["error"]

        batch = to_device(batch, model.mean.device)
        *answers, chexpert = model(batch["image"], batch["ids"], batch["mask"], batch["image_of"])
        if has_share:
            entropy, bce = question_losses(answers, chexpert, batch)
            local.append(batch_predictions(batch, answers, chexpert, entropy, bce))
    with agree_on_errors():
        if error:
            raise InputError(error)
    return gather_predictions(local)


def evaluate(
    model: nn.Module,
    data: QuestionData,
    batch_size: int,
    args: Namespace,
) -> Evaluation:
    """All ranks: answer every question of a split, and judge the answers. Raises InputError on all ranks."""
    predictions = answer_questions(model, data, batch_size, args)
    return judge(data, predictions, HEAD_WEIGHT, args.chexpert_weight)


def test_split(
    model: nn.Module,
    sets: dict[str, QuestionData],
    split: str,
    thresholds: dict[str, float],
    batch_size: int,
    args: Namespace,
) -> Evaluation:
    """evaluate(), with decisions at these thresholds, and what is right without the image or the question."""
    result = evaluate(model, sets[split], batch_size, args)
    answer = None
    if args.blind_scores:
        answer = partial(answer_questions, model, batch_size=batch_size, args=args)
    return judge_further(result, sets[split], sets["train"], thresholds, answer, args.seed)


# --- the run ----------------------------------------------------------------------------------------------------------


def trial_step(model: ChestModel, size: int, args: Namespace) -> None:
    """Forward and backward pass of a micro-batch of the longest questions; the gradients stay in the model."""
    batch = largest_batch(size, args.image_size, args.max_question_length)
    batch = to_device(batch, model.mean.device)
    counts = [size] * (len(HEADS) + 1)
    losses = batch_loss(model.train(), batch, counts, args.chexpert_weight)
    losses[0].backward()


def checkpoint_contents(engine: Engine, batch: BatchSize, precision: str, this_run: dict, asked: dict) -> dict:
    """All ranks: what a checkpoint holds beside position, log and random state; the same from every engine.

    this_run: what may not differ where the run is resumed. asked: see describe_training.
    """
    return {
        "format": FORMAT,
        "model": deepspeed_utils.full_weights(engine.module),
        "optimizer": deepspeed_utils.full_optimizer_state(engine.module, engine.optimizer),
        "scaler": engine.scaler_state(),
        "run": this_run,
        "precision": precision,
        "split": batch.record(),
        "training": asked,
    }


def run(args: Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun = time.time()
    run_folder = Path(args.output_dir)
    if args.predict:
        return predict(build_model, FORMAT, args, ranks)
    setup = choose_setup(args, ranks)
    index = open_questions(args)

    # the split that is used must have questions
    with agree_on_errors():
        check_split(index, args.eval_split if args.eval_only else "train", args.mimic_cxr_path, args.mimic_qa_path)
    if ranks.is_main:
        print_index(index.facts)

    # the run folder is ours from here on, where this is a training
    lock = None
    if not args.eval_only:
        may_exist = bool(args.resume_from) or args.overwrite
        lock = lock_run_folder(run_folder, may_exist, overwrite=args.overwrite)
    checkpoint = open_checkpoint(run_folder, args.resume_from, args.eval_only, FORMAT)
    with agree_on_errors():
        model, tokenizer = build_model(args, setup.precision, ranks.device)
        if checkpoint:
            load_trained(model, checkpoint["model"])
        elif args.pretrained_weights:
            load_pretrained(model, args.pretrained_weights)

        # the questions of each split
        sets = open_sets(
            index,
            args.mimic_cxr_path,
            tokenizer,
            args.image_size,
            args.cache_gb,
            args.max_question_length,
            args.chexpert_uncertain,
            args.max_samples,
        )
        note_trained_labels(sets, checkpoint)
        limit_questions(sets, args.eval_max_samples, args.seed)

    # evaluate, or train
    if args.eval_only:
        test = partial(test_split, model, sets, args.eval_split, batch_size=args.batch_size, args=args)
        data = sets[args.eval_split]
        evaluate_only(test, data, run_folder, args.resume_from, checkpoint["step"], args.save_predictions)
        return 0
    if ranks.launcher == "python" and torch.cuda.device_count() > 1:
        print_main(f"{torch.cuda.device_count()} GPUs are here and one is used: --world_size, or the launcher")
    code = fit(model, sets, checkpoint, setup, args, ranks)
    print_main(f"{time.time() - begun:.0f} seconds in all")
    del lock
    return code


def facts_of_run(loader: DataLoader, args: Namespace) -> dict:
    """What may not differ where a run is resumed."""
    sampler = loader.batch_sampler
    facts = {"training_questions": len(loader.dataset), "effective_batch_size": sampler.effective_batch_size}
    facts |= order_facts(sampler, args.questions_per_image)
    facts["augmentation"] = args.augmentation
    if args.table:
        facts["categories"] = "; ".join(args.categories)
    return facts


def fit(model: ChestModel, sets: dict, checkpoint: dict | None, setup: Setup, args: Namespace, ranks: Ranks) -> int:
    """Train, validate each epoch, keep checkpoints, test the best; returns the exit code."""
    begun = time.time()
    run_folder = Path(args.output_dir)
    batch = choose_batch_size(partial(trial_step, model, args=args), model, setup.config, checkpoint, args)
    loader = training_loader(sets["train"], batch, args)
    effective_batch_size = loader.batch_sampler.effective_batch_size
    planned_steps = args.epochs * loader.batch_sampler.steps_per_epoch()
    last_step = min(args.max_steps or planned_steps, planned_steps)

    # what a checkpoint tells of the run and its questions
    this_run = facts_of_run(loader, args)
    with agree_on_errors():
        asked = describe_training(sets["train"])

    # begin, or go on where the checkpoint stands
    progress = ValidatedProgress()
    seed_ranks(args.seed)
    if checkpoint:
        resume(progress, checkpoint, this_run, run_folder)
    if args.compile:
        model.compile()
    engine = make_engine(model, setup, batch, args)
    if checkpoint:
        engine.restore(checkpoint)
        restore_rng(checkpoint["rng"])

    log = RunLog(run_folder, ranks, LOSSES, last_step, args.log_every, setup.precision, args.compile)
    log.open(args, checkpoint)

    # where it stands and ends, and what is kept when
    training = TrainingRun(
        run_folder=run_folder,
        progress=progress,
        last_step=last_step,
        planned_steps=planned_steps,
        effective_batch_size=effective_batch_size,
        precision=setup.precision,
        log=log,
        contents=partial(checkpoint_contents, engine, batch, setup.precision, this_run, asked),
        model=model,
        **safety_flags(args),
    )
    training.eval_epochs, training.eval_steps = split_interval(args.eval_every)

    # train, and test what was best
    prepare_checkpoint(model)
    print_start("MIMIC-CXR", ranks, training, describe_run(model, sets, batch, setup, training, args))
    advice = partial(out_of_memory_advice, batch.size, batch.accumulation_flag, args.auto_batch, ranks.device)
    with training, closing(log), closing(engine), explain_out_of_memory(advice):
        code, sizes = train(engine, loader, training, sets, args)
        if code:
            return code
        best_step = test_best(model, sets, training, sizes, batch.size, args)
        finish_run(training, begun, {"best_step": best_step} | (progress.best_metrics or {}))
        export_run(run_folder, "best.pt" if len(sets["val"]) else "last.pt", FORMAT)
        say_where(run_folder)
    return 0


def train(
    engine: Engine,
    loader: DataLoader,
    training: TrainingRun,
    sets: dict[str, QuestionData],
    args: Namespace,
) -> tuple[int, dict[str, int]]:
    """All epochs, with the validations; (exit code of a stop signal or 0, group_sizes of the last validation)."""
    progress = training.progress
    sizes: dict[str, int] = {}
    say_if_finished(training, "--epochs")
    if progress.step == 0:
        seed = args.seed if args.augmentation else None
        training.log.figures(lambda: {"inputs": draw_inputs(sets["train"], seed)}, 0)

    # a checkpoint that is resumed may be followed by an evaluation
    evaluates_first = training.pauses()
    while True:
        if not evaluates_first:
            train_one_epoch(engine, loader, training, args)
        evaluates_first = False
        if code := end_epoch(training):
            return code, sizes

        epoch_complete = progress.samples >= loader.batch_sampler.used
        planned = training.plans_evaluation(epoch_complete)
        ends = progress.step >= training.last_step
        if len(sets["val"]) and (planned or ends):
            batch_size = loader.batch_sampler.batch_size
            result = evaluate(engine.module, sets["val"], batch_size, args)
            sizes = result.sizes
            log_validation(sets["val"], result, training)

            # the best is that of the highest accuracy
            if keep_best(training, result.metrics["val/vqa_accuracy"], planned):
                keep_validation(sets["val"], result, training, args.save_predictions)
        if (epoch_complete or ends) and not next_epoch(training):
            return 0, sizes


def test_best(
    model: nn.Module,
    sets: dict[str, QuestionData],
    training: TrainingRun,
    sizes: dict[str, int],
    batch_size: int,
    args: Namespace,
) -> int:
    """Load best.pt and print its metrics of the validation (of these sizes) and of the test; returns its step."""
    best_step = training.progress.step
    name = "the last weights (there are no validation questions)"
    if len(sets["val"]):
        best = load_checkpoint(str(training.run_folder / "best.pt"), training.run_folder, FORMAT)
        deepspeed_utils.put_weights(model, best["model"])
        best_step = best["step"]
        name = "best.pt"
    for data in (sets["val"], sets["test"]):
        if not len(data):
            continue
        # best.pt was validated and logged when it was chosen, but not by an earlier version
        metrics = training.progress.best_metrics if data.split == "val" else None
        if metrics is None:
            thresholds = thresholds_of(training.progress.best_metrics, bool(len(sets["val"])))
            result = test_split(model, sets, data.split, thresholds, batch_size, args)
            metrics = result.metrics
            sizes = result.sizes
            # the row stands at the last step, but its weights may be older
            metrics["best_step"] = best_step
            log_evaluation(data, result, training)
            if args.save_predictions:
                keep_predictions(training.run_folder, data, result, thresholds)
        if world()[0] == 0:
            print_metrics(name_split(data, name), metrics, sizes)
    return best_step


def main(args: Namespace) -> int:
    if args.rehearse:
        rehearse_model(build_model, make_engine, trial_step, args)
    launch_workers(args.world_size or 1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with setup_distributed(timeout=args.dist_timeout) as ranks:
        if not args.eval_only and (args.use_deepspeed or is_given(args, "deepspeed_config")):
            prepare_deepspeed(ranks)

        # --auto_optimize sets the batch on the way
        def advice() -> str:
            asked = asked_batch(args)
            return out_of_memory_advice(asked.size, asked.accumulation_flag, args.auto_batch, ranks.device)

        with explain_out_of_memory(advice):
            return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
