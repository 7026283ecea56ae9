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
TINY = [
    "--resnet",
    "resnet10",
    "--base_channels",
    "8",
    "--image_size",
    "8",
    "8",
    "8",
    "--batch_size",
    "4",
    "--epochs",
    "1",
]
TINY += ["--max_steps", "1", "--num_workers", "0"]


@pytest.fixture
def small(survival_data, tmp_path) -> Path:
    """A set of 16 patients that a test may spoil."""
    out = tmp_path / "set"
    (out / "scans").mkdir(parents=True)
    with open(survival_data / "dataset.csv", newline="") as file:
        lines = list(csv.reader(file))
    rows = sorted(lines[1:], key=lambda row: (row[4], row[3]))
    rows = rows[:6] + [row for row in rows if row[4] == "train"][-6:] + rows[-4:]
    save(out, [lines[0], *rows])
    for row in rows:
        shutil.copy(survival_data / row[1], out / row[1])
    return out


def table(folder: Path) -> list[list[str]]:
    with open(folder / "dataset.csv", newline="") as file:
        return list(csv.reader(file))


def save(folder: Path, lines: list[list[str]]) -> None:
    with open(folder / "dataset.csv", "w", newline="") as file:
        csv.writer(file).writerows(lines)


def fails(zygote, folder: Path, *flags, expect: str, ranks: int = 1) -> None:
    """Runs, and checks code, the one line, and that no file but a cache appears or changes."""
    words = ["--csv_path", folder / "dataset.csv", "--cache_dir", folder.parent / "cache", *TINY]
    words += ["--log_dir", folder.parent / "run", *flags]
    before = {name: digest for name, digest in tree(folder.parent).items() if not name.startswith("cache/")}
    done = zygote(SURVIVAL, *words, ranks=ranks)
    after = {name: digest for name, digest in tree(folder.parent).items() if not name.startswith("cache/")}
    assert done.code == 2, (done.code, done.stdout[-500:], done.stderr[-1500:])
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(errors) == 1, done.stderr[-1500:]
    assert errors[0].startswith("error: ")
    assert re.search(expect, errors[0]), errors[0]
    assert before == after


# --- rows of the table: (column, row, value, message) ----------------------------------------------------------------

ROWS = [
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
    ("NIFTI Path", "", "no path in column 'NIFTI Path'"),
    ("NIFTI Path", "../../etc/x.nii", "lies outside .*; give the folder that holds it with --data_dir"),
    ("NIFTI Path", "/etc/x.nii", "lies outside"),
    ("NIFTI Path", "scans/a\0b.nii", "holds a control character"),
    ("NIFTI Path", "scans/none.nii.gz", "none.nii.gz does not exist; replace it or remove the row"),
    ("NIFTI Path", "scans", "scans is not a readable NIfTI file"),
]


@pytest.mark.parametrize(("column", "value", "message"), ROWS)
def test_a_bad_row_is_named(small, zygote, column, value, message):
    lines = table(small)
    lines[3][lines[0].index(column)] = value
    save(small, lines)
    fails(zygote, small, expect=rf"error: {re.escape(str(small))}/dataset.csv:4: .*{message}")


def test_a_row_with_too_few_or_too_many_cells(small, zygote):
    lines = table(small)
    save(small, [*lines[:5], lines[5][:-2], *lines[6:]])
    fails(zygote, small, expect=r"dataset.csv:6: 20 cells under 22 columns; correct the row")
    save(small, [*lines[:5], [*lines[5], "x"], *lines[6:]])
    fails(zygote, small, expect=r"dataset.csv:6: more cells than the 22 columns")


def test_a_patient_in_both_folds(small, zygote):
    lines = table(small)
    lines[1][0] = lines[-1][0]
    save(small, lines)
    fails(zygote, small, expect=r"dataset.csv:2: case \d+ is in the training and, in row 17, in the validation fold")


def test_a_volume_twice(small, zygote):
    lines = table(small)
    lines[2][1] = lines[1][1]
    save(small, lines)
    fails(zygote, small, expect=r"dataset.csv:3: the same volume as row 2; remove one of them")
    lines[2][1] = lines[-1][1]
    save(small, lines)
    fails(zygote, small, expect=r"dataset.csv:3: volume .* in the training and, in row 17, in the validation fold")


def test_folds(small, zygote):
    lines = table(small)
    events = [[*row[:3], "0", *row[4:]] if row[4] == "val" else row for row in lines]
    save(small, events)
    fails(zygote, small, expect=r"validation fold of Fold_1 'val' \(\d rows from \d+ to 17\) has no event")
    save(small, [[*row[:3], "0" if row[4] == "train" else row[3], *row[4:]] for row in lines])
    fails(zygote, small, expect=r"training fold of Fold_1 'val' \(\d+ rows .*\) has no event")
    save(small, lines)
    fails(
        zygote, small, "--val_fold", "test", expect=r"no row has 'test' in Fold_1 \('train', 'val'\); check --val_fold"
    )
    fails(
        zygote,
        small,
        "--fold_column",
        "Fold_9",
        expect=r"no fold column 'Fold_9'; name it with --fold_column, or make folds",
    )
    fails(zygote, small, "--folds", "16", expect=r"\d+ cases with events for --folds 16; ask for fewer folds")
    fails(zygote, small, "--folds", "2", "--val_fold", "3", expect=r"--val_fold 3: with --folds 2 it is one of 1 to 2")
    save(small, [[*row[:5], *row[9:]] for row in lines])
    fails(zygote, small, "--cross_validate", expect=r"Fold_1 is one split; for --cross_validate give --folds 5")


def test_the_table_itself(small, zygote):
    lines = table(small)
    (small / "dataset.csv").write_text("")
    fails(zygote, small, expect=r"dataset.csv: is empty; give a table with a header")
    save(small, lines[:1])
    fails(zygote, small, expect=r"dataset.csv: has a header and no rows")
    (small / "dataset.csv").write_bytes(b"case,path\n\xff\xfe\x00,x\n")
    fails(zygote, small, expect=r"dataset.csv: not a readable table .*; give a CSV in UTF-8, or an xlsx file")
    (small / "dataset.csv").write_text('a,"b\n1,2\n')
    fails(zygote, small, expect=r"dataset.csv: not a readable table")
    (small / "x.xlsx").write_bytes(b"PK\x03\x04 nothing")
    fails(zygote, small, "--csv_path", small / "x.xlsx", expect=r"x.xlsx: not a readable table")
    fails(
        zygote,
        small,
        "--csv_path",
        small / "none.csv",
        expect=r"none.csv: cannot be read \(No such file or directory\)",
    )
    fails(zygote, small, "--csv_path", small, expect=r"set: cannot be read \(Is a directory\)")
    save(small, [["case_num", "file", *lines[0][2:]], *lines[1:]])
    fails(zygote, small, expect=r"no column for path \(NIFTI Path or .*there are case_num, file, .*--path_column")
    fails(zygote, small, "--path_column", "scan", expect=r"no column 'scan'; .*check --path_column")
    save(small, [[*lines[0][:-1], "Time"], *lines[1:]])
    fails(zygote, small, expect=r"two columns for time \('time' and 'Time'\)")
    save(small, [["case_num", "NIFTI Path", "when", *lines[0][3:]], *lines[1:]])
    fails(zygote, small, expect=r"no column for time .*--time_column")


# --- volumes ----------------------------------------------------------------------------------------------------------


SHAPES = {"flat": (6, 6), "series": (6, 6, 4, 2), "without voxels": (6, 0, 4)}


def spoil(path: Path, kind: str) -> None:
    values, content = np.zeros((6, 6, 4), np.float32), path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "text":
        path.write_text("not a volume")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "NaN":
        values[1, 2, 3] = np.nan
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)
    elif kind == "constant":
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)
    elif kind == "infinite":
        values[0] = np.inf
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)
    else:
        nibabel.save(nibabel.Nifti1Image(np.zeros(SHAPES[kind], np.int16), np.eye(4)), path)


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
def test_a_bad_volume_is_named_with_its_row(small, zygote, kind, message):
    lines = table(small)
    spoil(small / lines[4][1], kind)
    fails(
        zygote,
        small,
        expect=rf"dataset.csv:5: {re.escape(str(small / lines[4][1]))} {message}.*; replace it or remove the row",
    )


def test_several_bad_volumes_over_two_ranks(small, zygote):
    lines = table(small)
    for row in (2, 3, 8):
        spoil(small / lines[row][1], "NaN")
    (small / lines[9][1]).unlink()
    fails(
        zygote,
        small,
        ranks=2,
        expect=r"dataset.csv:3: .* \(and 3 more: row 4: .*; row 9: .*; row 10: .* does not exist\)",
    )


def test_a_bad_volume_met_in_training_ends_all_ranks(small, zygote):
    """Without the check, or broken since: the same line, from the step that needs it."""
    lines = table(small)
    victim = next(row for row in lines[1:] if row[4] == "train")
    spoil(small / victim[1], "truncated")
    words = ["--csv_path", small / "dataset.csv", *TINY, "--max_steps", "0", "--skip_data_check", "--cache", "none"]
    for ranks, more in ((2, []), (1, ["--use_smart_cache", "--cache_rate", "1"])):
        done = zygote(SURVIVAL, *words, "--log_dir", small.parent / f"run{ranks}", *more, ranks=ranks)
        assert done.code == 2
        assert re.fullmatch(
            rf"error: .*dataset.csv:\d+: .*{victim[1]} cannot be used \(.*\); replace it or remove the row\n",
            done.stderr,
        )


def test_a_volume_without_an_affine(small, zygote):
    lines = table(small)
    path = small / lines[1][1]
    nibabel.save(nibabel.Nifti1Image(np.arange(144, dtype=np.int16).reshape(6, 6, 4), np.eye(4)), path)
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[296:312] = bytes(16)  # the second row of the affine
    path.write_bytes(gzip.compress(bytes(content)))
    fails(zygote, small, "--orientation", "RAS", expect=r"dataset.csv:2: .* has no usable affine, which --spacing")


# --- flags ------------------------------------------------------------------------------------------------------------

FLAGS = [
    (["--batch_size", "5"], 2, r"--batch_size 5: the total over 2 processes cannot be split evenly; take 4 or 6"),
    (["--batch_size", "2"], 3, r"--batch_size 2: the total over 3 processes cannot be split evenly; take 3"),
    (["--image_size", "64", "64"], 1, "expected 3 arguments"),
    (["--image_size", "4", "64", "64"], 1, "--image_size: must be a whole number of at least 8"),
    (["--resnet", "resnet17"], 1, "invalid choice: 'resnet17'"),
    (["--base_channels", "12"], 1, "--base_channels 12: must be a multiple of 8"),
    (["--cache_rate", "0"], 1, "--cache_rate: must be a number above 0 and at most 1"),
    (["--replace_rate", "1.5"], 1, "--replace_rate: must be a number above 0 and at most 1"),
    (["--hu_window", "100", "100"], 1, "--hu_window: the first value must be below the second"),
    (["--eta_min", "1"], 1, "--eta_min 1: must not be above --lr"),
    (["--orientation", "RAX"], 1, "--orientation RAX: three letters"),
    (["--spacing", "1", "1", "0"], 1, "--spacing: must be a number above 0"),
    (["--init", "pretrained"], 1, "--init pretrained and --pretrained_path go together"),
    (["--pretrained_path", "x.pt"], 1, "--init pretrained and --pretrained_path go together"),
    (["--init", "pretrained", "--pretrained_path", "none.pth"], 1, "none.pth: no such file; check --pretrained_path"),
    (["--use_smart_cache", "--event_balanced"], 1, "--event_balanced draws from the whole fold"),
    (["--task", "pretrain", "--cox_memory", "4"], 1, "--cox_memory: belongs to the Cox loss"),
    (["--norm", "batch", "--gradient_accumulation_steps", "2"], 1, "--norm batch: accumulation"),
    (["--norm", "batch", "--auto_batch"], 1, "--norm batch: --auto_batch would change its statistics"),
    (["--norm", "batch"], 2, "--norm batch: statistics over several processes need GPUs"),
    (["--norm", "batch", "--batch_size", "64"], 1, "--batch_size 64: larger than the 12 cases"),
    (["--backend", "nccl"], 1, "--backend nccl: needs GPUs"),
    (["--mixed_precision", "fp16"], 1, "--mixed_precision fp16: needs a GPU"),
    (["--amp", "--mixed_precision", "no"], 1, "--amp and --mixed_precision no exclude each other"),
    (["--max_grad_norm", "2", "--grad_clip", "1.5"], 1, "--max_grad_norm and --grad_clip are the same thing"),
    (["--folds", "1"], 1, "--folds 1: there must be at least 2"),
    (["--eval_years", "0"], 1, "--eval_years: must be a number above 0"),
    (["--eval_only"], 1, "best.pt: no such checkpoint; check --resume_from"),
    (["--predict", "new.csv"], 1, "best.pt: no such checkpoint; check --resume_from"),
    (["--eval_only", "--predict", "new.csv"], 1, "--eval_only and --predict exclude each other"),
    (["--cross_validate", "--resume_from", "x.pt"], 1, "resume with --resume_from auto"),
    (["--overwrite", "--resume_from", "auto"], 1, "--overwrite starts afresh"),
    (["--resume_from", "none.pt"], 1, "none.pt: no such checkpoint; check --resume_from"),
    (["--use_smart_cash"], 1, "unknown argument '--use_smart_cash', nearest is --use_smart_cache"),
    (["--use_smart_cache"], 13, "--use_smart_cache: 12 training cases for 13 processes; use fewer"),
]


@pytest.mark.parametrize(("flags", "ranks", "message"), FLAGS, ids=[" ".join(flags) for flags, *_ in FLAGS])
def test_a_bad_flag(small, zygote, flags, ranks, message):
    if ranks == 13:
        ranks, lines = 5, table(small)
        chosen = [row for row in lines[1:] if row[4] == "train"]
        few = [*chosen[:2], *chosen[-2:]]
        save(small, [lines[0], *few, *(row for row in lines[1:] if row[4] == "val")])
        flags, message = [*flags, "--batch_size", "5"], message.replace("12", "4").replace("13", "5")
    fails(zygote, small, *flags, expect=message, ranks=ranks)


def test_a_config_file(small, zygote):
    config = small / "c.yaml"
    for text, message in (
        ("image_size: [8, 8]", "c.yaml: image_size: must be a list"),
        ("use_smart_cache: 1", "c.yaml: use_smart_cache: must be true or false"),
        ("batchsize: 4", "c.yaml: unknown key 'batchsize'; did you mean 'batch_size'"),
    ):
        config.write_text(text)
        fails(zygote, small, "--config", config, expect=message)


def test_checkpoints_and_weights_of_something_else(small, zygote):
    run = small.parent / "run"
    words = ["--csv_path", small / "dataset.csv", "--cache_dir", small.parent / "cache", *TINY, "--log_dir", run]
    assert zygote(SURVIVAL, *words).code == 0
    fails(zygote, small, expect="run: holds a run already; go on with --resume_from auto, or --overwrite it")
    again = ["--resume_from", "auto"]
    fails(zygote, small, *again, "--cross_validate", expect="run: holds a single run; choose another --log_dir")
    fails(
        zygote, small, *again, "--val_fold", "train", expect="a run with --val_fold val, now train; leave the flag out"
    )
    trained = ["--eval_only", "--fold_column", "Fold_2"]
    fails(
        zygote,
        small,
        *trained,
        expect=r"case \d+ and \d+ more of Fold_2 'val' were trained on by .*best.pt; evaluate on",
    )
    fails(zygote, small, *again, "--batch_size", "6", expect="a run with effective batch size 4, now 6")
    fails(zygote, small, *again, "--seed", "1", expect="a run with seed 0, now 1")
    fails(
        zygote,
        small,
        *again,
        "--resnet",
        "resnet18",
        expect="a run with --resnet resnet10, now resnet18; leave the flag out",
    )
    fails(zygote, small, *again, "--image_size", "8", "8", "9", expect=r"a run with --image_size \[8, 8, 8\], now")
    fails(zygote, small, *again, "--use_smart_cache", expect="a run with smart cache off, now rates and processes")
    fails(
        zygote, small, *again, "--optimizer", "sgd", expect="a run with optimizer adamw, now sgd; give the same again"
    )
    lines = table(small)
    lines[1][2] = str(int(lines[1][2]) + 1)
    save(small, lines)
    fails(zygote, small, *again, expect="a run with training data [0-9a-f]{12}, now")
    start = ["--log_dir", small.parent / "other", "--init", "pretrained", "--pretrained_path"]
    wide = ["--base_channels", "16"]
    fails(zygote, small, *start, run / "best.pt", *wide, expect=r"weights of another net \(backbone.conv1.weight")
    torch.save([1, 2], small / "list.pt")
    fails(zygote, small, *start, small / "list.pt", expect="list.pt: not a readable file of weights")
    (small / "text.pth").write_text("no weights")
    fails(zygote, small, *start, small / "text.pth", expect="text.pth: not a ")
    torch.save({"format": "prs_med/2", "step": 1, "rng": []}, small / "foreign.pt")
    foreign = ["--resume_from", small / "foreign.pt", "--eval_only"]
    fails(zygote, small, *foreign, expect="foreign.pt: checkpoint of prs_med/2, not of survival/1")
    fails(zygote, small, "--predict", small / "none.csv", "--eval_years", "1", expect="none.csv: cannot be read")


def test_an_error_is_one_line_whatever_the_table_holds(small, zygote):
    lines = table(small)
    save(small, [["case_num", "NIFTI\nfile", *lines[0][2:]], *lines[1:]])
    fails(zygote, small, expect=r"no column for path .*NIFTI file")


def test_splits_that_overlap_cannot_be_pooled(small, zygote):
    lines = table(small)
    save(small, [[*row[:5], "Fold_2" if row is lines[0] else row[4], *row[9:]] for row in lines])
    fails(
        zygote,
        small,
        "--cross_validate",
        expect=r"validated in Fold_1 .val. and in Fold_2 .val., so .* cannot be pooled",
    )


@pytest.mark.soak
def test_overwrite_deletes_nothing_before_the_last_check(small, zygote, monkeypatch):
    """wandb without an account is found wrong last of all; the old run is still there."""
    run = small.parent / "run"
    words = ["--csv_path", small / "dataset.csv", "--cache_dir", small.parent / "cache", *TINY, "--log_dir", run]
    assert zygote(SURVIVAL, *words).code == 0
    kept = {name: digest for name, digest in tree(run).items() if "wandb" not in name}
    done = subprocess.run(
        [sys.executable, SURVIVAL, *map(str, words), "--overwrite", "--wandb"], capture_output=True, text=True,
        cwd=ROOT, env={**os.environ, "WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(small)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert re.search("^error: --wandb: ", done.stderr, re.MULTILINE)
    assert {name: digest for name, digest in tree(run).items() if "wandb" not in name} == kept


def test_pretraining_columns(small, zygote):
    flags = ["--task", "pretrain", "--feature_columns", "Age", "Fold_2"]
    fails(zygote, small, *flags, expect=r"no column 'Fold_2' with numbers .*there are Age, isFemale, Ag")


def test_pretraining_without_features(small, zygote):
    save(small, [[*row[:5]] for row in table(small)])
    fails(
        zygote,
        small,
        "--task",
        "pretrain",
        expect="no numeric column that varies in the training fold; --task pretrain",
    )
