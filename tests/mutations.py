"""Do the tests see a mistake of one line?

    python tests/mutations.py [FIRST [LAST]]                        # mistakes by hand: fifteen minutes for all 72
    python tests/mutations.py --random 24 --seed 7 --workers 2      # mistakes by chance: up to ten minutes for each

By hand: mistakes that a maintainer could make in foundation, losses, steps, evaluation and resume, drawn evenly from
some three hundred. Each is made in a copy of the project, and should turn the test beside its file's name red, or
another of that file. Exit code 0 if at least 95 % do. First the helpers' tests must pass as they are.

By chance: changes of one node of the syntax tree, drawn from the helpers' files in turn; the same seed draws the same
ones from the same source. The tests of the changed file come first, then those that run examples/minimal.py. The
hand-picked mistakes flatter the tests and these do the opposite: some of them change nothing that matters, or something
that only the tasks' own tests would see. So read each one that was not seen before you count it as a gap.
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
utils/loop.py tests/test_promise.py::test_without_save_every_a_checkpoint_a_minute
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
distributed_utils.py tests/test_distributed.py::test_schedule
-return (step + 1) / warmup_steps
+return step / warmup_steps
distributed_utils.py tests/test_distributed.py::test_what_ranks_tell_each_other
-value = merge(value, pickle.loads(_receive(rank + bit, tag)))
+value = merge(pickle.loads(_receive(rank + bit, tag)), value)
hardware_utils.py tests/test_hardware.py::test_precision
-half = torch.float16 if precision == "fp16" else torch.bfloat16
+half = torch.bfloat16
utils/hardware_utils.py tests/test_hardware.py
-share = smallest * accumulation(smallest)
+share = largest * accumulation(largest)
utils/checkpoint.py tests/test_checkpoint.py
-if checkpoint["format"] != format:
+if not checkpoint["format"]:
utils/tables.py tests/test_images_and_tables.py
-{name.strip().lower(): text.strip()
+{name.strip(): text.strip()
hardware_utils.py tests/test_hardware.py::test_precision
-if wanted == "bf16" and major < 8:
+if wanted == "bf16" and major < 7:
utils/loop.py tests/test_promise.py::test_pause_by_max_steps
-sampler.set_position(position.epoch, position.samples)
+sampler.set_position(position.epoch, 0)
utils/loop.py tests/test_promise.py::test_three_processes_are_one[minimal]
-micro_batch = self.numbers[number] if self.weight else 0
+micro_batch = number if self.weight else 0
utils/loop.py tests/test_loop.py
-if not better or not math.isfinite(value):
+if not better:
train_survival_distributed.py tests/test_survival.py::test_cox_models_and_their_loss_are_those_of_lifelines
-torch.log1p(-before * (together
+torch.log1p(-0 * before * (together
train_survival_distributed.py tests/test_survival.py::test_outcomes_are_those_of_the_cases_in_the_smart_cache
-sampler.global_batch(position.samples), position.epoch)
+sampler.global_batch(position.samples), 0)
train_survival_distributed.py tests/test_survival.py::test_only_the_head_learns_at_first
-model.backbone.requires_grad_(not frozen)
+model.requires_grad_(not frozen)
train_survival_distributed.py tests/test_survival.py::test_learning_rate_and_weight_decay_are_the_guides
-lowest = args.eta_min if run.position.step
+lowest = 0.0 if run.position.step
tasks/survival/report.py tests/test_survival.py::test_another_hospital
-centred = [parts - (reference["centres"] if reference else 0) for
+centred = [parts - 0 * (reference["centres"] if reference else 0) for
train_survival_distributed.py tests/test_survival.py::test_the_image_counts_what_it_says_of_cases_it_was_not_trained_on
-{"all": rows[fold != left_out]
+{"all": rows
train_survival_distributed.py tests/test_survival.py::test_the_image_counts_what_it_says_of_cases_it_was_not_trained_on
-held_out - held_out.mean()
+held_out
train_survival_distributed.py tests/test_survival.py::test_nothing_of_the_validation_fold_reaches_the_model
-fit_columns(cohort, measured, train)
+fit_columns(cohort, measured, rows)
tasks/survival/data.py tests/test_survival.py::test_each_epoch_has_its_part_and_all_cases_come_equally_often
-if known[place] != number + 1:
+if known[place] == 0:
tasks/survival/data.py tests/test_promise.py::test_three_processes_are_one[train_survival_distributed]
-found[first::world_size] = part
+found[first * len(part) : (first + 1) * len(part)] = part
train_survival_distributed.py tests/test_survival.py::test_a_step_is_one_pass_over_all_its_cases
-step.backward(loss * (number == 0), events * (number == 0), through=(output, part))
+step.backward(loss, events, through=(output, part))
train_mimic_cxr.py tests/test_mimic_cxr.py::test_leaves_add_up_to_means_over_the_global_batch
-weights = [weight / max(1.0, count) for weight, count in zip(HEAD_WEIGHT.values(), counts[:-1], strict=True)]
+weights = [weight / max(1.0, sum(counts[:-1])) for weight in HEAD_WEIGHT.values()]
train_mimic_cxr.py tests/test_mimic_cxr.py::test_augmentation
-seeds = [[self.augmented_by % 2**63, indices[0].epoch, study] for study in different]
+seeds = [[self.augmented_by % 2**63, study] for study in different]
train_mimic_cxr.py tests/test_mimic_cxr.py::test_the_steps_and_what_the_test_knows
-asked = {name: Questions(data, "train", args).column(name) for name in report.COLUMNS}
+asked = {name: sets[split].column(name) for name in report.COLUMNS}
train_mimic_cxr.py tests/test_mimic_cxr.py::test_the_steps_and_what_the_test_knows
-training.record(metrics, headline="val/vqa_accuracy")
+training.record(metrics, headline="val/vqa_accuracy", lower=True)
tasks/mimic_cxr/report.py tests/test_mimic_cxr.py::test_the_table_by_other_means
-"accuracy": enter_mean(metrics, key, own.right, own.case)}}
+"accuracy": enter_mean(metrics, key, own.right, own.rows["study"])}}
tasks/mimic_cxr/report.py tests/test_mimic_cxr.py::test_the_validation_chooses_the_penalties_of_a_rival
-svd_solver="covariance_eigh").fit(x[:fitted])
+svd_solver="covariance_eigh").fit(x)
tasks/mimic_cxr/prepare.py tests/test_mimic_cxr.py::test_what_is_taken_from_the_releases
-rows.append((first + number, HEAD_NUMBER[head], target, kind, asked))
+rows.append((number, HEAD_NUMBER[head], target, kind, asked))
tasks/mimic_cxr/prepare.py tests/test_mimic_cxr.py::test_a_table_of_labels
-known = [label for label in CHEXPERT if study.get(label) in (0, 1)]
+known = [label for label in CHEXPERT if study.get(label) is not None]
train_prs_med.py tests/test_prs_med.py::test_leaves_add_up_to_means_over_the_global_batch
-seg = mask_loss(logits, batch["mask"]).sum() / samples
+seg = mask_loss(logits, batch["mask"]).mean()
train_prs_med.py tests/test_prs_med.py::test_the_mask_knows_the_question_and_nothing_of_the_answer
-"words": pad([[*range(first), *range(last, len(prompt))] for prompt in prompts], -1),
+"words": pad([[*range(first), *range(last, len(prompt) + 1)] for prompt in prompts], -1),
train_prs_med.py tests/test_prs_med.py::test_an_image_is_encoded_once
-("sam", sam_settings))
+("sam", vlm_settings))
train_prs_med.py tests/test_prs_med.py::test_augmented_rows_are_a_function_of_epoch_and_image
-if split == "train" and not args.eval_only:
+if True:
train_prs_med.py tests/test_prs_med.py::test_questions_about_what_only_other_modalities_show
-if row.mask:
+if self.rows[index].mask:
tasks/prs_med/unet.py tests/test_prs_med.py::test_a_unet_learns_each_structure_of_an_image
-logits = net(pixels)[image_of, channels].float()
+logits = net(pixels)[image_of, 0 * channels].float()
train_prs_med.py tests/test_prs_med.py
-small = images.square(Image.fromarray(native), self.reader.image_size, Image.Resampling.NEAREST)
+small = Image.fromarray(native).resize((self.reader.image_size,) * 2, Image.Resampling.NEAREST)
tasks/prs_med/annotations.py tests/test_prs_med.py::test_positions_by_the_bounding_box
-if top < height / 2 < bottom and left < width / 2 < right:
+if top <= height / 2 <= bottom and left <= width / 2 <= right:
tasks/prs_med/prepare.py tests/test_prs_med.py::test_a_volume_is_cut_and_seen_from_below
-(np.moveaxis(array, axis, 0)[:, ::-1, ::-1].transpose(0, 2, 1) for array in (voxels, values))
+(np.moveaxis(array, axis, 0)[:, :, ::-1].transpose(0, 2, 1) for array in (voxels, values))
tasks/prs_med/rivals.py tests/test_prs_med.py::test_rivals_find_what_they_can
-known = [read_example(train, index, step) for index in evenly_spaced(groups[key], MOST)]
+known = [read_example(train, index, step) for index in evenly_spaced(range(len(train.rows)), MOST)]
train_accelerate.py tests/test_cascade.py::test_losses_are_those_of_the_clean_volume
-return diffusion, alpha_bar * projection_error(clean, batch, cascade.greys).mean(1)
+return diffusion, projection_error(clean, batch, cascade.greys).mean(1)
train_accelerate.py tests/test_cascade.py::test_a_later_stage_starts_from_the_volume_before
-start = resize(previous + level[:, None, None, None, None] * grain, size)
+start = resize(linear + level[:, None, None, None, None] * grain, size)
train_accelerate.py tests/test_cascade.py::test_evaluations_are_means_over_patients
-return max(0.005, math.sqrt(float(du.reduce_sum(total)) / len(few)))
+return max(0.005, float(du.reduce_sum(total)) / len(few))
train_accelerate.py tests/test_cascade.py::test_rivals_of_the_table
-known).argmin(1).tolist()
+known).argmax(1).tolist()
train_accelerate.py tests/test_cascade.py::test_a_plateau_halves_the_learning_rate_also_across_a_resume
-factor = plateau.state["factor"] * du.schedule(
+factor = du.schedule(
train_accelerate.py tests/test_cascade.py::test_a_run_leaves_what_the_page_says
-prior, saved.get("stds", [math.sqrt(prior.error)]))
+prior, [math.sqrt(prior.error)] * 2)
tasks/cascade/report.py tests/test_cascade.py::test_table_names_rivals_and_compares_with_the_strongest
-strongest = max((row for row in psnr
+strongest = min((row for row in psnr
tasks/cascade/geometry.py tests/test_cascade.py::test_agreement_is_the_best_linear_correction
-noise.append((max(grey.noise, LEAST_NOISE) / unit) ** 2)
+noise.append(max(grey.noise, LEAST_NOISE) / unit)
tasks/cascade/data.py tests/test_cascade.py::test_training_patients_are_moved_and_drawn_by_seed_epoch_and_patient
-row = number if self.split == "train" and number < KNOWN else -1
+row = number if number < KNOWN else -1
train.py tests/test_compressed_ad.py::test_training_and_acting_are_one
-(is_context[:, None] & (column <= row) | is_query[:, None] & (column < row))
+(is_context[:, None] & (column <= row) | is_query[:, None] & (column <= row))
train.py tests/test_compressed_ad.py::test_all_that_was_seen_counts
-self.length, self.used = self.length - self.forget, 0
+self.length, self.used = self.length - self.forget, self.model.n_latent + 1
train.py tests/test_compressed_ad.py::test_returns_against_a_simulation_step_by_step
-total, state = total + reward, after
+total, state = torch.maximum(total, reward), after
train.py tests/test_compressed_ad.py
-segments = SegmentDataset(histories, train_tasks, args, train=True)
+segments = SegmentDataset(histories, train_tasks + unseen_tasks, args, train=True)
train.py tests/test_compressed_ad.py::test_every_weight_learns
-first = max(1, first)
+first = first
tasks/compressed_ad/report.py tests/test_compressed_ad.py::test_rivals_find_the_best_policy
-new = np.flatnonzero(~self.known[place])
+new = np.flatnonzero(self.known[place])
tasks/compressed_ad/data.py tests/test_compressed_ad.py::test_key_to_door_by_a_walk
-with_door = np.where(after == door, after + 2 * cells, after + cells)
+with_door = np.where(after == key, after + 2 * cells, after + cells)
tasks/compressed_ad/data.py tests/test_compressed_ad.py::test_segments_reach_the_whole_history_at_every_depth
-end = least + (share * (self.histories.steps + 1 - least)).astype(np.int64)
+end = least + (share * (self.histories.steps - least)).astype(np.int64)
tasks/compressed_ad/data.py tests/test_compressed_ad.py::test_segments_are_pieces_of_the_histories
-self.pieces = max(1, histories.steps // self.n_transit) if train
+self.pieces = 1 if train
configs/slurm/train.sbatch tests/test_slurm.py::test_a_time_limit
-"$script" --resume_from auto "$@"
+"$script" "$@"
configs/slurm/train.sbatch tests/test_slurm.py::test_a_time_limit
-#SBATCH --signal=TERM@120
+#SBATCH --signal=USR1@120
configs/slurm/train.sbatch tests/test_slurm.py::test_cancelled
-((end - $(date +%s) < lead + 180))
+((end > 0))
configs/slurm/train.sbatch tests/test_slurm.py::test_wrong_input
-$code == 143
+$code != 0
configs/slurm/train.sbatch tests/test_slurm.py::test_a_time_limit
-scontrol requeue "$job" ||
+test "$job" ||
distributed_utils.py tests/test_slurm.py::test_two_nodes_are_one_process
-os.environ["GLOO_SOCKET_IFNAME"] = name
+pass
distributed_utils.py tests/test_slurm.py::test_two_scripts_in_one_job
-(job + 1009 * step)
+(job + 0 * step)
"""


def by_hand(first: int, last: int) -> int:
    """Make the mistakes `first` to `last` of the list; returns the exit code."""
    lines, seen = MISTAKES.strip().splitlines(), 0
    with copied_project() as copy:
        for number in range(first, last + 1):
            title, before, after = lines[3 * number - 3 : 3 * number]
            path, test = title.split()
            text = (copy / path).read_text()
            assert text.count(before[1:]) == 1, f"{path}: not once in it: {before}"
            (copy / path).write_text(text.replace(before[1:], after[1:]))
            # the test that is named, then the others of its file, unless they take minutes
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
    """A copy of the project in a temporary folder. Processes that are still at work in it at the end are killed."""
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


# --- by chance --------------------------------------------------------------------------------------------------------

SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
# where the tests of utils/NAME.py are not in test_NAME.py
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
    """(node, new text) for each change of one node; nothing inside an f-string, as those are messages."""
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
    """(path, line, changed source) of `count` mistakes, from the helpers' files in turn."""
    chance = random.Random(seed)
    paths = sorted(HELPERS)
    chance.shuffle(paths)
    possible = {path: list(changes(ast.parse(path.read_text()))) for path in paths}
    drawn = []
    for number in range(count):
        path = paths[number % len(paths)]
        node, new = possible[path].pop(chance.randrange(len(possible[path])))
        # the columns of a node count bytes
        source = path.read_bytes()
        lines = source.splitlines(keepends=True)
        begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
        changed = (source[:begin] + new.encode() + source[end:]).decode()
        compile(changed, path, "exec")
        drawn.append((str(path.relative_to(ROOT)), node.lineno, changed))
    return drawn


def test_file(path: str | Path) -> str:
    """The tests of a helper's file."""
    stem = Path(path).stem
    return f"tests/test_{TESTS_OF.get(stem, stem)}.py"


def check_unchanged() -> None:
    """Exit where one of the helpers' tests fails without a mistake: it would count as seeing each one."""
    with copied_project() as copy:
        command = [sys.executable, "-m", "pytest", "-qx", "-m", "not soak", *sorted(set(map(test_file, HELPERS)))]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"without a mistake: {done.stdout[-2000:]}")


def who_sees(path: str, changed: str, timeout: float = 3600) -> str:
    """The first test that fails with this source of a file, "" where none does; one that takes forever sees it, too."""
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
