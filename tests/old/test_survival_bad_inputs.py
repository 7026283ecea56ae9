"""train_survival_distributed.py: what a user can get wrong ends with exit code 2 and one line, nothing written."""

import csv
import gzip
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from conftest import ROOT, tree

SURVIVAL = str(ROOT / "train_survival_distributed.py")
TINY = ["--resnet", "resnet10", "--base_channels", "8", "--image_size", "8", "8", "8"]
TINY += ["--batch_size", "4", "--epochs", "1", "--max_steps", "1", "--num_workers", "0"]


@pytest.fixture
def small(survival_data, tmp_path) -> Path:
    """A set of 16 patients that a test may spoil."""
    out = tmp_path / "set"
    (out / "scans").mkdir(parents=True)
    header, *rows = table(survival_data)

    # some of each fold, with and without an event
    rows = sorted(rows, key=lambda row: (row[4], row[3]))
    train = [row for row in rows if row[4] == "train"]
    chosen = [*rows[:6], *train[-6:], *rows[-4:]]
    save(out, [header, *chosen])
    for row in chosen:
        shutil.copy(survival_data / row[1], out / row[1])
    return out


def table(folder: Path) -> list[list[str]]:
    with open(folder / "dataset.csv", newline="") as file:
        return list(csv.reader(file))


def save(folder: Path, lines: list[list[str]]) -> None:
    with open(folder / "dataset.csv", "w", newline="") as file:
        csv.writer(file).writerows(lines)


def words_for(small: Path, flags: list) -> list:
    """The arguments of a tiny run on the set, into the folder beside it."""
    files = ["--csv_path", small / "dataset.csv", "--cache_dir", small.parent / "cache"]
    return [*files, *TINY, "--log_dir", small.parent / "run", *flags]


def run(zygote, words: list, ranks: int = 1):
    return zygote(SURVIVAL, *words, ranks=ranks)


def files_but_cache(folder: Path) -> dict[str, str]:
    """{path: content hash} of all that a failing run may not touch."""
    return {name: digest for name, digest in tree(folder).items() if not name.startswith("cache/")}


@pytest.fixture
def fails(small, zygote):
    """fails(expect, flags, ranks): checks code, the one line, and that no file but a cache appears or changes."""

    def check(expect: str, flags: list = (), ranks: int = 1) -> None:
        before = files_but_cache(small.parent)
        done = run(zygote, words_for(small, flags), ranks)
        assert done.code == 2, (done.code, done.stdout[-500:], done.stderr[-1500:])

        # one line, the right one
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        assert len(errors) == 1, done.stderr[-1500:]
        assert errors[0].startswith("error: ")
        assert re.search(expect, errors[0]), errors[0]
        assert before == files_but_cache(small.parent)

    return check


# --- rows of the table: (column, row, value, message) ----------------------------------------------------------------

ROWS = [
    # the outcome
    ("time", "", "time is missing"),
    ("time", "-3", "time '-3' is not a number of at least 0"),
    ("time", "soon", "time 'soon' is not a number"),
    ("time", "nan", "time 'nan' is not a number"),
    ("time", "inf", "time 'inf' is not a number"),
    ("time", "99999", r"99999 days are 274 years; see --time_unit"),
    ("event", "", "event is missing"),
    ("event", "2", "event '2' is neither 0"),
    ("event", "yes", "event 'yes' is neither 0"),
    ("event", "0.5", "event '0.5' is neither 0"),
    # the path of the volume
    ("NIFTI Path", "", "no path in column 'NIFTI Path'"),
    ("NIFTI Path", "../../etc/x.nii", "lies outside .*; give the folder that holds it with --data_dir"),
    ("NIFTI Path", "/etc/x.nii", "lies outside"),
    ("NIFTI Path", "scans/a\0b.nii", "holds a control character"),
    ("NIFTI Path", "scans/none.nii.gz", "none.nii.gz does not exist; replace it or remove the row"),
    ("NIFTI Path", "scans", "scans is not a readable NIfTI file"),
]


@pytest.mark.parametrize(("column", "value", "message"), ROWS)
def test_a_bad_row_is_named(small, fails, column, value, message):
    lines = table(small)
    lines[3][lines[0].index(column)] = value
    save(small, lines)
    fails(rf"error: {re.escape(str(small))}/dataset.csv:4: .*{message}")


def test_a_row_with_too_few_or_too_many_cells(small, fails):
    lines = table(small)
    save(small, [*lines[:5], lines[5][:-2], *lines[6:]])
    fails(r"dataset.csv:6: 20 cells under 22 columns; correct the row")
    save(small, [*lines[:5], [*lines[5], "x"], *lines[6:]])
    fails(r"dataset.csv:6: more cells than the 22 columns")


def test_a_patient_in_both_folds(small, fails):
    lines = table(small)
    lines[1][0] = lines[-1][0]
    save(small, lines)
    fails(r"dataset.csv:2: case \d+ is in the training and, in row 17, in the validation fold")


def test_a_volume_twice(small, fails):
    lines = table(small)
    lines[2][1] = lines[1][1]
    save(small, lines)
    fails(r"dataset.csv:3: the same volume as row 2; remove one of them")
    lines[2][1] = lines[-1][1]
    save(small, lines)
    fails(r"dataset.csv:3: volume .* in the training and, in row 17, in the validation fold")


def test_folds(small, fails):
    original = table(small)
    lines = table(small)
    rows = lines[1:]
    for row in rows:
        row[3] = "0" if row[4] == "val" else row[3]
    save(small, lines)
    fails(r"validation fold of Fold_1 'val' \(\d rows from \d+ to 17\) has no event")

    # no event in the other fold
    for row in rows:
        row[3] = "0" if row[4] == "train" else "1"
    save(small, lines)
    fails(r"training fold of Fold_1 'val' \(\d+ rows .*\) has no event")

    # folds that are not there
    save(small, original)
    fails(r"no row has 'test' in Fold_1 \('train', 'val'\); check --val_fold", ["--val_fold", "test"])
    fails(r"no fold column 'Fold_9'; name it with --fold_column, or make folds", ["--fold_column", "Fold_9"])
    fails(r"\d+ cases with events for --folds 16; ask for fewer folds", ["--folds", "16"])
    fails(r"--val_fold 3: with --folds 2 it is one of 1 to 2", ["--folds", "2", "--val_fold", "3"])

    # the table without the columns of other folds
    save(small, [[*row[:5], *row[9:]] for row in original])
    fails(r"Fold_1 is one split; for --cross_validate give --folds 5", ["--cross_validate"])


def test_the_table_itself(small, fails):
    header, *rows = table(small)
    path = small / "dataset.csv"
    path.write_text("")
    fails(r"dataset.csv: is empty; give a table with a header")
    save(small, [header])
    fails(r"dataset.csv: has a header and no rows")

    # files that are none
    path.write_bytes(b"case,path\n\xff\xfe\x00,x\n")
    fails(r"dataset.csv: not a readable table .*; give a CSV in UTF-8, or an xlsx file")
    path.write_text('a,"b\n1,2\n')
    fails(r"dataset.csv: not a readable table")
    (small / "x.xlsx").write_bytes(b"PK\x03\x04 nothing")
    fails(r"x.xlsx: not a readable table", ["--csv_path", small / "x.xlsx"])
    fails(r"none.csv: cannot be read \(No such file or directory\)", ["--csv_path", small / "none.csv"])
    fails(r"set: cannot be read \(Is a directory\)", ["--csv_path", small])

    # columns that are missing, or there twice
    save(small, [["case_num", "file", *header[2:]], *rows])
    fails(r"no column for path \(NIFTI Path or .*there are case_num, file, .*--path_column")
    fails(r"no column 'scan'; .*check --path_column", ["--path_column", "scan"])
    save(small, [[*header[:-1], "Time"], *rows])
    fails(r"two columns for time \('time' and 'Time'\)")
    save(small, [["case_num", "NIFTI Path", "when", *header[3:]], *rows])
    fails(r"no column for time .*--time_column")


# --- volumes ----------------------------------------------------------------------------------------------------------


SHAPES = {"flat": (6, 6), "series": (6, 6, 4, 2), "without voxels": (6, 0, 4)}


def save_volume(values: np.ndarray, path: Path) -> None:
    volume = nibabel.Nifti1Image(values, np.eye(4))
    nibabel.save(volume, path)


def spoil(path: Path, kind: str) -> None:
    content = path.read_bytes()
    values = np.zeros((6, 6, 4), np.float32)
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "text":
        path.write_text("not a volume")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "constant":
        save_volume(values, path)

    # values that are not finite, and shapes of no volume
    elif kind == "NaN":
        values[1, 2, 3] = np.nan
        save_volume(values, path)
    elif kind == "infinite":
        values[0] = np.inf
        save_volume(values, path)
    else:
        save_volume(np.zeros(SHAPES[kind], np.int16), path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", r"is not a readable NIfTI file, truncated perhaps \(Compressed file ended"),
        ("text", "is not a readable NIfTI file"),
        ("empty", "is not a readable NIfTI file"),
        ("NaN", "holds 1 values that are NaN or infinite"),
        ("infinite", "holds 24 values that are NaN or infinite"),
        ("constant", "holds one value everywhere"),
        ("flat", r"has 2 dimensions \(6, 6\), not three"),
        ("without voxels", r"has no voxels: its shape is \(6, 0, 4\)"),
        ("series", r"has 4 dimensions \(6, 6, 4, 2\), not three"),
    ],
)
def test_a_bad_volume_is_named_with_its_row(small, fails, kind, message):
    lines = table(small)
    path = small / lines[4][1]
    spoil(path, kind)
    fails(rf"dataset.csv:5: {re.escape(str(path))} {message}.*; replace it or remove the row")


def test_several_bad_volumes_over_two_ranks(small, fails):
    lines = table(small)
    for row in (2, 3, 8):
        spoil(small / lines[row][1], "NaN")
    (small / lines[9][1]).unlink()
    fails(r"dataset.csv:3: .* \(and 3 more: row 4: .*; row 9: .*; row 10: .* does not exist\)", ranks=2)


def test_a_bad_volume_met_in_training_ends_all_ranks(small, zygote):
    """Without the check, or broken since: the same line, from the step that needs it."""
    victim = next(row for row in table(small) if row[4] == "train")
    spoil(small / victim[1], "truncated")
    unchecked = ["--max_steps", "0", "--skip_data_check", "--cache", "none"]
    reason = rf"{victim[1]} cannot be used \(.*\); replace it or remove the row"
    for ranks, more in ((2, []), (1, ["--use_smart_cache", "--cache_rate", "1"])):
        out = small.parent / f"run{ranks}"
        done = run(zygote, words_for(small, [*unchecked, "--log_dir", out, *more]), ranks)
        assert done.code == 2
        assert re.fullmatch(rf"error: .*dataset.csv:\d+: .*{reason}\n", done.stderr)


def test_a_volume_without_an_affine(small, fails):
    lines = table(small)
    path = small / lines[1][1]
    values = np.arange(144, dtype=np.int16)
    save_volume(values.reshape(6, 6, 4), path)

    # the second row of the affine
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[296:312] = bytes(16)
    path.write_bytes(gzip.compress(bytes(content)))
    fails(r"dataset.csv:2: .* has no usable affine, which --spacing", ["--orientation", "RAS"])


# --- flags ------------------------------------------------------------------------------------------------------------

FLAGS = [
    # the batch, and values that cannot be
    ("--batch_size 5", 2, r"--batch_size 5: the total over 2 processes cannot be split evenly; take 4 or 6"),
    ("--batch_size 2", 3, r"--batch_size 2: the total over 3 processes cannot be split evenly; take 3"),
    ("--image_size 64 64", 1, "expected 3 arguments"),
    ("--image_size 4 64 64", 1, "--image_size: must be a whole number of at least 8"),
    ("--resnet resnet17", 1, "invalid choice: 'resnet17'"),
    ("--base_channels 12", 1, "--base_channels 12: must be a multiple of 8"),
    ("--cache_rate 0", 1, "--cache_rate: must be a number above 0 and at most 1"),
    ("--replace_rate 1.5", 1, "--replace_rate: must be a number above 0 and at most 1"),
    ("--hu_window 100 100", 1, "--hu_window: the first value must be below the second"),
    ("--eta_min 1", 1, "--eta_min 1: must not be above --lr"),
    # the volumes, and the weights to start from
    ("--orientation RAX", 1, "--orientation RAX: three letters"),
    ("--spacing 1 1 0", 1, "--spacing: must be a number above 0"),
    ("--init pretrained", 1, "--init pretrained and --pretrained_path go together"),
    ("--pretrained_path x.pt", 1, "--init pretrained and --pretrained_path go together"),
    ("--init pretrained --pretrained_path none.pth", 1, "none.pth: no such file; check --pretrained_path"),
    ("--use_smart_cache --event_balanced", 1, "--event_balanced draws from the whole fold"),
    # what does not go together
    ("--task pretrain --cox_memory 4", 1, "--cox_memory: belongs to the Cox loss"),
    ("--norm batch --gradient_accumulation_steps 2", 1, "--norm batch: accumulation"),
    ("--norm batch --auto_batch", 1, "--norm batch: --auto_batch would change its statistics"),
    ("--norm batch", 2, "--norm batch: statistics over several processes need GPUs"),
    ("--norm batch --batch_size 64", 1, "--batch_size 64: larger than the 12 cases"),
    ("--backend nccl", 1, "--backend nccl: needs GPUs"),
    ("--mixed_precision fp16", 1, "--mixed_precision fp16: needs a GPU"),
    # flags of which one is enough
    ("--amp --mixed_precision no", 1, "--amp and --mixed_precision no exclude each other"),
    ("--max_grad_norm 2 --grad_clip 1.5", 1, "--max_grad_norm and --grad_clip are the same thing"),
    ("--folds 1", 1, "--folds 1: there must be at least 2"),
    ("--eval_years 0", 1, "--eval_years: must be a number above 0"),
    # the checkpoint that is used
    ("--eval_only", 1, "best.pt: no such checkpoint; check --resume_from"),
    ("--predict new.csv", 1, "best.pt: no such checkpoint; check --resume_from"),
    ("--eval_only --predict new.csv", 1, "--eval_only and --predict exclude each other"),
    ("--cross_validate --resume_from x.pt", 1, "resume with --resume_from auto"),
    ("--overwrite --resume_from auto", 1, "--overwrite starts afresh"),
    ("--resume_from none.pt", 1, "none.pt: no such checkpoint; check --resume_from"),
    ("--use_smart_cash", 1, "unknown argument '--use_smart_cash', nearest is --use_smart_cache"),
    ("--use_smart_cache", 13, "--use_smart_cache: 12 training cases for 13 processes; use fewer"),
]


@pytest.mark.parametrize(("flags", "ranks", "message"), FLAGS, ids=[case[0] for case in FLAGS])
def test_a_bad_flag(small, fails, flags, ranks, message):
    # 13 ranks are too many for this machine: fewer of each
    flags = flags.split()
    if ranks == 13:
        ranks = 5
        flags += ["--batch_size", "5"]
        message = message.replace("12", "4").replace("13", "5")
        header, *rows = table(small)
        train = [row for row in rows if row[4] == "train"]
        val = [row for row in rows if row[4] == "val"]
        save(small, [header, *train[:2], *train[-2:], *val])
    fails(message, flags, ranks=ranks)


def test_a_config_file(small, fails):
    config = small / "c.yaml"
    mistakes = {
        "image_size: [8, 8]": "c.yaml: image_size: must be a list",
        "use_smart_cache: 1": "c.yaml: use_smart_cache: must be true or false",
        "batchsize: 4": "c.yaml: unknown key 'batchsize'; did you mean 'batch_size'",
    }
    for text, message in mistakes.items():
        config.write_text(text)
        fails(message, ["--config", config])


def test_checkpoints_and_weights_of_something_else(small, fails, zygote):
    run_folder = small.parent / "run"
    assert run(zygote, words_for(small, [])).code == 0
    fails("run: holds a run already; go on with --resume_from auto, or --overwrite it")

    # a run with other flags
    again = ["--resume_from", "auto"]
    fails("run: holds a single run; choose another --log_dir", [*again, "--cross_validate"])
    fails("a run with --val_fold val, now train; leave the flag out", [*again, "--val_fold", "train"])
    trained = ["--eval_only", "--fold_column", "Fold_2"]
    fails(r"case \d+ and \d+ more of Fold_2 'val' were trained on by .*best.pt; evaluate on", trained)
    fails("a run with effective batch size 4, now 6", [*again, "--batch_size", "6"])
    fails("a run with seed 0, now 1", [*again, "--seed", "1"])
    fails("a run with --resnet resnet10, now resnet18; leave the flag out", [*again, "--resnet", "resnet18"])
    fails(r"a run with --image_size \[8, 8, 8\], now", [*again, "--image_size", "8", "8", "9"])
    fails("a run with smart cache off, now rates and processes", [*again, "--use_smart_cache"])
    fails("a run with optimizer adamw, now sgd; give the same again", [*again, "--optimizer", "sgd"])

    # a run on other data
    lines = table(small)
    days = int(lines[1][2])
    lines[1][2] = str(days + 1)
    save(small, lines)
    fails("a run with training data [0-9a-f]{12}, now", again)

    # weights that do not fit
    start = ["--log_dir", small.parent / "other", "--init", "pretrained", "--pretrained_path"]
    wide = ["--base_channels", "16"]
    fails(r"weights of another net \(backbone.conv1.weight", [*start, run_folder / "best.pt", *wide])
    torch.save([1, 2], small / "list.pt")
    fails("list.pt: not a readable file of weights", [*start, small / "list.pt"])
    (small / "text.pth").write_text("no weights")
    fails("text.pth: not a ", [*start, small / "text.pth"])

    # a checkpoint of another script
    torch.save({"format": "prs_med/2", "step": 1, "rng": []}, small / "foreign.pt")
    foreign = ["--resume_from", small / "foreign.pt", "--eval_only"]
    fails("foreign.pt: checkpoint of prs_med/2, not of survival/1", foreign)
    fails("none.csv: cannot be read", ["--predict", small / "none.csv", "--eval_years", "1"])


def test_an_error_is_one_line_whatever_the_table_holds(small, fails):
    header, *rows = table(small)
    save(small, [["case_num", "NIFTI\nfile", *header[2:]], *rows])
    fails(r"no column for path .*NIFTI file")


def test_splits_that_overlap_cannot_be_pooled(small, fails):
    header, *rows = table(small)
    header = [*header[:5], "Fold_2", *header[9:]]
    save(small, [header, *([*row[:5], row[4], *row[9:]] for row in rows)])
    fails(r"validated in Fold_1 .val. and in Fold_2 .val., so .* cannot be pooled", ["--cross_validate"])


@pytest.mark.soak
def test_overwrite_deletes_nothing_before_the_last_check(small, zygote):
    """wandb without an account is found wrong last of all; the old run is still there."""
    run_folder = small.parent / "run"
    words = words_for(small, [])
    assert run(zygote, words).code == 0
    kept = files_but_wandb(run_folder)

    # no account of the user is to be found
    environment = os.environ | {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(small)}
    command = [sys.executable, SURVIVAL, *(str(word) for word in words), "--overwrite", "--wandb"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 2, done.stderr
    assert re.search("^error: --wandb: ", done.stderr, re.MULTILINE)
    assert files_but_wandb(run_folder) == kept


def files_but_wandb(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in tree(folder).items() if "wandb" not in name}


def test_pretraining_columns(small, fails):
    flags = ["--task", "pretrain", "--feature_columns", "Age", "Fold_2"]
    fails(r"no column 'Fold_2' with numbers .*there are Age, isFemale, Ag", flags)


def test_pretraining_without_features(small, fails):
    save(small, [[*row[:5]] for row in table(small)])
    fails("no numeric column that varies in the training fold; --task pretrain", ["--task", "pretrain"])
