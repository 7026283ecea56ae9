"""Mutation tests: check that the tests fail if one line of the code is wrong.

    python tests/mutations.py [FIRST [LAST]]                        # listed mistakes: 15 minutes for all 72
    python tests/mutations.py --random 24 --seed 7 --workers 2      # random mistakes: up to 10 minutes each

Listed mistakes are ones that a maintainer could make in helpers, losses, steps, evaluation and resuming, sampled evenly
from about 300. Each is made in a copy of the project; the test listed with it, or another test in the same file, should
fail. The exit code is 0 if at least 95 % are seen. The helpers' tests must first pass without a mistake.

A random mistake changes one node of the syntax tree; the helpers' files take turns, and a seed always draws the same
mistakes from the same source. The changed file's tests run first, then the tests of examples/minimal.py. Listed
mistakes make the tests look better than they are, random ones worse: some of them change nothing that matters, or only
what a task's own tests check. So read each mistake that was not seen before you count it as a gap.
"""

import argparse
import ast
import contextlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
MISTAKES = r"""
utils/sampler.py tests/test_sampler.py
-generate_state(8, np.uint64)
+generate_state(1, np.uint64)
utils/sampler.py tests/test_sampler.py
-self.first[image] + own[within[part]]
+self.first[image] + own[0 * within[part]]
utils/loop.py tests/test_promise.py::test_default_saves_at_most_once_a_minute
-time.monotonic() - self.saved_at > 60)
+time.monotonic() - self.saved_at > 600)
utils/log.py tests/test_loop.py
-sum(finite) / len(finite) if finite
+sum(finite) / len(self.rows) if finite
utils/log.py tests/test_loop.py
-self.jsonl.truncate(self.bytes)
+pass
utils/checkpoint.py tests/test_checkpoint.py
-return kept.copy_(like, non_blocking=True)
+return like
utils/checkpoint.py tests/test_checkpoint.py
-checkpoint["log"]["bytes"] = 0
+pass
utils/tables.py tests/test_images_and_tables.py
-delimiter = max(",;\t", key=text.partition("\n")[0].count)
+delimiter = max(",\t", key=text.partition("\n")[0].count)
distributed_utils.py tests/test_distributed.py::test_learning_rate_schedule_and_scaling
-return (step + 1) / warmup_steps
+return step / warmup_steps
distributed_utils.py tests/test_distributed.py::test_collectives_on_five_ranks
-value = merge(value, pickle.loads(_receive(rank + bit, tag)))
+value = merge(pickle.loads(_receive(rank + bit, tag)), value)
hardware_utils.py tests/test_hardware.py::test_precision
-half = torch.float16 if precision == "fp16" else torch.bfloat16
+half = torch.bfloat16
utils/hardware_utils.py tests/test_hardware.py
-per_gpu = smallest * accumulation(smallest)
+per_gpu = largest_batch * accumulation(largest_batch)
utils/checkpoint.py tests/test_checkpoint.py
-if checkpoint["format"] != format:
+if not checkpoint["format"]:
utils/tables.py tests/test_images_and_tables.py
-{name.strip().lower(): text.strip()
+{name.strip(): text.strip()
hardware_utils.py tests/test_hardware.py::test_precision
-if wanted == "bf16" and major < 8:
+if wanted == "bf16" and major < 7:
utils/loop.py tests/test_promise.py::test_run_paused_by_max_steps_resumes_to_the_same_log
-sampler.set_position(position.epoch, position.samples)
+sampler.set_position(position.epoch, 0)
utils/loop.py tests/test_promise.py::test_three_processes_give_the_bits_of_one[minimal]
-micro_batch = self.numbers[number] if self.weight else 0
+micro_batch = number if self.weight else 0
utils/loop.py tests/test_loop.py
-if not better or not math.isfinite(value):
+if not better:
train_survival_distributed.py tests/test_survival.py::test_cox_fit_and_loss_match_lifelines
-torch.log1p(-before * (together
+torch.log1p(-0 * before * (together
train_survival_distributed.py tests/test_survival.py::test_events_are_those_of_the_cases_in_the_smart_cache
-sampler.global_batch(position.samples), position.epoch)
+sampler.global_batch(position.samples), 0)
train_survival_distributed.py tests/test_survival.py::test_freeze_epochs_trains_only_the_head
-model.backbone.requires_grad_(not frozen)
+model.requires_grad_(not frozen)
train_survival_distributed.py tests/test_survival.py::test_learning_rate_and_weight_decay_follow_the_guide
-lowest = args.eta_min if run.position.step
+lowest = 0.0 if run.position.step
tasks/survival/report.py tests/test_survival.py::test_prediction_of_a_table
-centred = [parts - (reference["centres"] if reference else 0) for
+centred = [parts - 0 * (reference["centres"] if reference else 0) for
train_survival_distributed.py tests/test_survival.py::test_image_weight_comes_from_unseen_cases
-{"train": rows[fold != left_out]
+{"train": rows
train_survival_distributed.py tests/test_survival.py::test_image_weight_comes_from_unseen_cases
-held_out - held_out.mean()
+held_out
train_survival_distributed.py tests/test_survival.py::test_validation_fold_does_not_leak_into_the_model
-fit_columns(cohort, measured, train)
+fit_columns(cohort, measured, rows)
tasks/survival/data.py tests/test_survival.py::test_smart_cache_loads_each_case_equally_often
-if known[place] != number + 1:
+if known[place] == 0:
tasks/survival/data.py tests/test_promise.py::test_three_processes_give_the_bits_of_one[train_survival_distributed]
-found[first::world_size] = part
+found[first * len(part) : (first + 1) * len(part)] = part
train_survival_distributed.py tests/test_survival.py::test_step_equals_one_pass_over_the_global_batch
-step.backward(loss * (number == 0), events * (number == 0), through=(output, output_gradient))
+step.backward(loss, events, through=(output, output_gradient))
train_mimic_cxr.py tests/test_mimic_cxr.py::test_micro_batch_losses_add_up_to_means_over_the_global_batch
-weights = [weight / max(1.0, count) for weight, count in zip(HEAD_WEIGHT.values(), counts[:-1], strict=True)]
+weights = [weight / max(1.0, sum(counts[:-1])) for weight in HEAD_WEIGHT.values()]
train_mimic_cxr.py tests/test_mimic_cxr.py::test_augmentation
-seeds = [[self.augmentation_seed % 2**63, indices[0].epoch, study] for study in distinct]
+seeds = [[self.augmentation_seed % 2**63, study] for study in distinct]
train_mimic_cxr.py tests/test_mimic_cxr.py::test_best_weights_and_inputs_of_the_final_test
-train = Questions(data, "train", args).columns()
+train = sets[split].columns()
train_mimic_cxr.py tests/test_mimic_cxr.py::test_best_weights_and_inputs_of_the_final_test
-training.record(metrics, headline="val/vqa_accuracy")
+training.record(metrics, headline="val/vqa_accuracy", lower=True)
tasks/mimic_cxr/report.py tests/test_mimic_cxr.py::test_scores_match_pandas_and_scikit_learn
-"accuracy": add_mean(metrics, "vqa_accuracy", right, patients)}}
+"accuracy": add_mean(metrics, "vqa_accuracy", right, results.rows["study"])}}
tasks/mimic_cxr/report.py tests/test_mimic_cxr.py::test_validation_selects_the_penalty_of_logistic_regressions
-svd_solver="covariance_eigh").fit(x[:fitted])
+svd_solver="covariance_eigh").fit(x)
tasks/mimic_cxr/prepare.py tests/test_mimic_cxr.py::test_contents_of_prepared_releases
-rows.append((first + number, HEAD_NUMBER[head], target, kind, asked))
+rows.append((number, HEAD_NUMBER[head], target, kind, asked))
tasks/mimic_cxr/prepare.py tests/test_mimic_cxr.py::test_table_of_labels
-known = [label for label in CHEXPERT if study.get(label) in (0, 1)]
+known = [label for label in CHEXPERT if study.get(label) is not None]
train_prs_med.py tests/test_prs_med.py::test_micro_batch_losses_sum_to_the_global_mean
-seg = mask_loss(logits, batch["mask"]).sum() / samples
+seg = mask_loss(logits, batch["mask"]).mean()
train_prs_med.py tests/test_prs_med.py::test_mask_depends_on_question_not_answer
-"words": pad([[*range(first), *range(last, len(prompt))] for prompt in prompts], -1),
+"words": pad([[*range(first), *range(last, len(prompt) + 1)] for prompt in prompts], -1),
train_prs_med.py tests/test_prs_med.py::test_each_image_is_encoded_once
-("sam", sam_settings))
+("sam", vlm_settings))
train_prs_med.py tests/test_prs_med.py::test_augmented_rows_are_a_function_of_epoch_and_image
-if split == "train" and not args.eval_only:
+if True:
train_prs_med.py tests/test_prs_med.py::test_questions_about_absent_structures
-if row.mask:
+if self.rows[index].mask:
tasks/prs_med/unet.py tests/test_prs_med.py::test_unet_learns_each_structure
-logits = net(pixels)[image_of, channels].float()
+logits = net(pixels)[image_of, 0 * channels].float()
train_prs_med.py tests/test_prs_med.py
-small = square(Image.fromarray(native), self.processor.image_size, Image.Resampling.NEAREST)
+small = Image.fromarray(native).resize((self.processor.image_size,) * 2, Image.Resampling.NEAREST)
tasks/prs_med/annotations.py tests/test_prs_med.py::test_position_follows_the_bounding_box
-if top < height / 2 < bottom and left < width / 2 < right:
+if top <= height / 2 <= bottom and left <= width / 2 <= right:
tasks/prs_med/prepare.py tests/test_prs_med.py::test_volume_slices_are_upright
-(np.moveaxis(array, axis, 0)[:, ::-1, ::-1].transpose(0, 2, 1) for array in (voxels, values))
+(np.moveaxis(array, axis, 0)[:, :, ::-1].transpose(0, 2, 1) for array in (voxels, values))
tasks/prs_med/rivals.py tests/test_prs_med.py::test_baselines_find_each_structure
-known = [read_example(train, index, step) for index in evenly_spaced(groups[key], MOST)]
+known = [read_example(train, index, step) for index in evenly_spaced(range(len(train.rows)), MOST)]
train_accelerate.py tests/test_cascade.py::test_losses_match_closed_form
-return diffusion, alpha_bar * projection_error(clean, batch, cascade.greys).mean(1)
+return diffusion, projection_error(clean, batch, cascade.greys).mean(1)
train_accelerate.py tests/test_cascade.py::test_later_stage_starts_from_the_previous_volume
-start = resize(previous + level[:, None, None, None, None] * noise, size)
+start = resize(linear + level[:, None, None, None, None] * noise, size)
train_accelerate.py tests/test_cascade.py::test_evaluation_is_the_mean_over_patients
-return max(0.005, math.sqrt(float(du.reduce_sum(total)) / len(few)))
+return max(0.005, float(du.reduce_sum(total)) / len(few))
train_accelerate.py tests/test_cascade.py::test_baselines
-prior_rays).argmin(1).tolist()
+prior_rays).argmax(1).tolist()
train_accelerate.py tests/test_cascade.py::test_plateau_halves_the_learning_rate_after_a_resume_too
-factor = plateau["factor"] * du.schedule(
+factor = du.schedule(
train_accelerate.py tests/test_cascade.py::test_run_writes_the_documented_files
-prior, saved.get("stds", [math.sqrt(prior.error)]))
+prior, [math.sqrt(prior.error)] * 2)
tasks/cascade/report.py tests/test_cascade.py::test_table_compares_with_the_strongest_baseline
-strongest = max((row for row in psnr
+strongest = min((row for row in psnr
tasks/cascade/geometry.py tests/test_cascade.py::test_make_consistent_matches_a_dense_solver
-noise.append((max(grey.noise, LEAST_NOISE) / unit) ** 2)
+noise.append(max(grey.noise, LEAST_NOISE) / unit)
tasks/cascade/data.py tests/test_cascade.py::test_augmentation_is_reproducible_and_keeps_projections
-row = number if self.split == "train" and number < PRIOR_PATIENTS else -1
+row = number if number < PRIOR_PATIENTS else -1
train.py tests/test_compressed_ad.py::test_acting_gives_the_logits_of_training
-(is_context[:, None] & (column <= row) | is_query[:, None] & (column < row))
+(is_context[:, None] & (column <= row) | is_query[:, None] & (column <= row))
train.py tests/test_compressed_ad.py::test_ad_forgets_its_oldest_transitions
-self.length, self.cached = self.length - self.forget, 0
+self.length, self.cached = self.length - self.forget, self.model.n_latent + 1
train.py tests/test_compressed_ad.py::test_returns_match_a_step_by_step_simulation
-total = total + reward
+total = torch.maximum(total, reward)
train.py tests/test_compressed_ad.py
-segments = SegmentDataset(histories, train_tasks, args, train=True)
+segments = SegmentDataset(histories, train_tasks + unseen_tasks, args, train=True)
train.py tests/test_compressed_ad.py::test_every_weight_gets_a_gradient
-first = max(1, first)
+first = first
tasks/compressed_ad/report.py tests/test_compressed_ad.py::test_baselines_find_the_best_policy
-new = np.flatnonzero(~self.known[tried])
+new = np.flatnonzero(self.known[tried])
tasks/compressed_ad/data.py tests/test_compressed_ad.py::test_key_to_door_matches_a_random_walk
-with_door = np.where(next_cell == door, next_cell + 2 * cells, next_cell + cells)
+with_door = np.where(next_cell == key, next_cell + 2 * cells, next_cell + cells)
tasks/compressed_ad/data.py tests/test_compressed_ad.py::test_segments_of_every_depth_cover_the_history
-end = first_end + (end_draw * (self.histories.steps + 1 - first_end)).astype(np.int64)
+end = first_end + (end_draw * (self.histories.steps - first_end)).astype(np.int64)
tasks/compressed_ad/data.py tests/test_compressed_ad.py::test_segments_of_every_depth_cover_the_history
-self.segments_per_history = histories.steps // self.n_transit if train
+self.segments_per_history = 1 if train
configs/slurm/train.sbatch tests/test_slurm.py::test_time_limit
-"$script" --resume_from auto "$@"
+"$script" "$@"
configs/slurm/train.sbatch tests/test_slurm.py::test_time_limit
-#SBATCH --signal=TERM@120
+#SBATCH --signal=USR1@120
configs/slurm/train.sbatch tests/test_slurm.py::test_cancelled_job
-((end - $(date +%s) < lead + 180))
+((end > 0))
configs/slurm/train.sbatch tests/test_slurm.py::test_invalid_input
-$code == 143
+$code != 0
configs/slurm/train.sbatch tests/test_slurm.py::test_time_limit
-scontrol requeue "$job" ||
+test "$job" ||
distributed_utils.py tests/test_slurm.py::test_two_nodes_match_one_process
-os.environ["GLOO_SOCKET_IFNAME"] = name
+pass
distributed_utils.py tests/test_slurm.py::test_two_scripts_in_one_job
-(job + 1009 * step)
+(job + 0 * step)
"""


def by_hand(first: int, last: int) -> int:
    """Make the listed mistakes `first` to `last`, counted from 1; return the exit code."""
    lines, seen = MISTAKES.strip().splitlines(), 0
    with copied_project() as copy:
        for number in range(first, last + 1):
            title, before, after = lines[3 * number - 3 : 3 * number]
            path, test = title.split()
            text = (copy / path).read_text()
            assert text.count(before[1:]) == 1, f"{path}: not once in it: {before}"
            (copy / path).write_text(text.replace(before[1:], after[1:]))
            # the listed test, then the rest of its file, except for test_promise.py, which takes minutes
            for some in [test] if "promise" in test else dict.fromkeys((test, test.partition("::")[0])):
                done = subprocess.run([sys.executable, "-m", "pytest", "-qx", some], cwd=copy, capture_output=True)
                if done.returncode:
                    break
            (copy / path).write_text(text)
            seen += done.returncode == 1
            print(
                f"{number} {'seen' if done.returncode == 1 else 'NOT SEEN'} by {some}: {before[1:].strip()}", flush=True
            )
    count = last - first + 1
    print(f"{seen} of {count} seen", flush=True)
    return 0 if seen >= 0.95 * count else 1


@contextlib.contextmanager
def copied_project() -> Iterator[Path]:
    """A copy of the project in a temporary folder. At the end, processes still running in it are killed."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch).resolve() / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "data", "runs", "datasets"))
        try:
            yield copy
        finally:
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if Path(process.cwd()).is_relative_to(copy):
                        process.kill()


# --- random mistakes --------------------------------------------------------------------------------------------------

SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
# helpers whose tests are not in test_<name>.py
TESTS_OF = {
    "distributed_utils": "distributed",
    "engine": "loop",
    "hardware_utils": "hardware",
    "images": "images_and_tables",
    "launch_4gpu": "launchers",
    "log": "loop",
    "tables": "images_and_tables",
    "torchrun": "launchers",
}
HELPERS = {*ROOT.glob("*_utils.py"), *ROOT.glob("utils/*.py")} - {ROOT / "utils/__init__.py"}
ABOUT_MINIMAL = "not train and not deepspeed and not any_engine and not cascade and not accelerate"


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield (node, new source) for each possible change of one node. f-strings stay, because they are messages."""
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    messages = {id(part) for string in strings for part in ast.walk(string)}
    for node in ast.walk(tree):
        if id(node) in messages:
            continue
        match node:
            case ast.Compare(left, ops, others):
                for place, op in enumerate(ops):
                    swapped = [*ops[:place], SWAPPED[type(op)](), *ops[place + 1 :]]
                    yield node, ast.unparse(ast.Compare(left, swapped, others))
            case ast.BinOp(left, ast.Add() | ast.Sub() as op, right):
                yield node, ast.unparse(ast.BinOp(left, SWAPPED[type(op)](), right))
            case ast.BoolOp(op, values):
                yield node, ast.unparse(ast.BoolOp(SWAPPED[type(op)](), values))
            case ast.UnaryOp(ast.Not(), operand):
                yield node, f"({ast.unparse(operand)})"
            case ast.If(test) | ast.IfExp(test) if not isinstance(test, ast.UnaryOp | ast.Compare):
                yield test, f"not ({ast.unparse(test)})"
            case ast.Constant(bool(value)):
                yield node, str(not value)
            case ast.Constant(int(value)):
                yield node, str(value + 1)
            case ast.Name("min" | "max" as name):
                yield node, "max" if name == "min" else "min"
            case ast.Expr(ast.Call()) | ast.Assign([ast.Attribute()]) | ast.AugAssign(ast.Attribute()):
                yield node, "pass"


def draw(count: int, seed: int) -> list[tuple[str, int, str]]:
    """Draw `count` mistakes, taking the helpers' files in turn: (path, line, changed source of the file)."""
    chance = random.Random(seed)
    paths = sorted(HELPERS)
    chance.shuffle(paths)
    possible = {path: list(changes(ast.parse(path.read_text()))) for path in paths}
    drawn = []
    for number in range(count):
        path = paths[number % len(paths)]
        node, new = possible[path].pop(chance.randrange(len(possible[path])))
        # a node's column offsets are in bytes
        source = path.read_bytes()
        lines = source.splitlines(keepends=True)
        begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
        changed = (source[:begin] + new.encode() + source[end:]).decode()
        compile(changed, path, "exec")
        drawn.append((str(path.relative_to(ROOT)), node.lineno, changed))
    return drawn


def test_file(path: str | Path) -> str:
    """Path of the test file of a helper's file."""
    stem = Path(path).stem
    return f"tests/test_{TESTS_OF.get(stem, stem)}.py"


def check_unchanged() -> None:
    """Exit if one of the helpers' tests fails without a mistake, because it would seem to see every mistake."""
    with copied_project() as copy:
        command = [sys.executable, "-m", "pytest", "-qx", "-m", "not soak", *sorted(set(map(test_file, HELPERS)))]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"without a mistake: {done.stdout[-2000:]}")


def who_sees(path: str, changed: str, timeout: float = 3600) -> str:
    """Return the first test that fails with this source of the file, or "". A test that never ends counts, too."""
    with copied_project() as copy:
        (copy / path).write_text(changed)
        for words in (
            [test_file(path)],
            ["tests/test_promise.py", "-k", ABOUT_MINIMAL],
        ):
            command = [sys.executable, "-m", "pytest", "-qx", "-m", "not soak", *words]
            try:
                done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=timeout)
            except subprocess.TimeoutExpired:
                return f"{words[0]}, which does not end"
            if done.returncode:
                return re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)[0]
    return ""


def by_chance(count: int, seed: int, workers: int) -> None:
    print(f"{count} mistakes by chance, seed {seed}", flush=True)
    drawn, seen = draw(count, seed), 0
    with ThreadPoolExecutor(workers) as pool:
        tests = pool.map(lambda mistake: who_sees(mistake[0], mistake[2]), drawn)
        for number, ((path, line, changed), test) in enumerate(zip(drawn, tests, strict=True), start=1):
            before, after = ((ROOT / path).read_text().splitlines(), changed.splitlines())
            seen += bool(test)
            print(f"{number} {path}:{line}: {'seen by ' * bool(test)}{test or 'NOT SEEN'}")
            print(f"    - {before[line - 1].strip()}\n    + {after[line - 1].strip()}", flush=True)
    print(f"{seen} of {count} seen: {seen / count:.0%}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", nargs="?", type=int, default=1)
    parser.add_argument("last", nargs="?", type=int, default=72)
    parser.add_argument("--random", metavar="N", type=int, help="draw N mistakes by chance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", metavar="K", type=int, default=1, help="so many at a time")
    args = parser.parse_args()
    check_unchanged()
    if args.random:
        by_chance(args.random, args.seed, args.workers)
    else:
        sys.exit(by_hand(args.first, args.last))
