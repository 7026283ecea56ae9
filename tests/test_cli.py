"""Flags, config files and one-line errors, as a script's parser gives them."""

import json
import os

import pytest
import yaml

from utils import cli
from utils.cli import Parser, add_common_arguments, first_line, read_config


@pytest.fixture
def parser():
    parser = Parser("Title\n\n    example")
    add_common_arguments(parser, output_dir="out", num_epochs=3, learning_rate=1e-4, batch_size=8)
    parser.add_argument("--names", nargs="+", default=[])
    return parser


@pytest.fixture
def refused(parser, capsys):
    def parse(*words) -> str:
        with pytest.raises(SystemExit, match="2"):
            parser.parse(list(map(str, words)))
        return capsys.readouterr().err

    return parse


def test_command_line_over_file_over_default(parser, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("learning_rate: 1e-3\nbatch_size: 4\nnames: [a, b]\nauto_batch: false\ncompile: false\nscript: x")
    args = parser.parse(["--config", str(file), "--batch_size", "2"])
    assert (args.batch_size, args.learning_rate, args.num_epochs) == (2, 1e-3, 3)
    assert (args.names, args.auto_batch, args.compile) == (["a", "b"], False, False)


DEFAULTS = {
    # the run
    "output_dir": "out", "num_epochs": 3, "seed": 0, "max_steps": 0, "resume_from": None, "overwrite": False,
    "eval_only": False, "eval_every_steps": 0, "save_every": None, "keep_last": 2,
    # optimization
    "batch_size": 8, "gradient_accumulation_steps": 1, "effective_batch_size": None, "learning_rate": 1e-4,
    "grad_clip": 1.0, "max_bad_steps": 10,
    # speed and memory
    "mixed_precision": "auto", "auto_batch": None, "gpu_shares": "equal", "num_workers": 4, "compile": False,
    "deterministic": False, "profile": None,
    # logging and launch
    "log_every": 10, "wandb": None, "world_size": None, "dist_timeout": 600, "local_rank": None,
}  # fmt: skip
# what each number may be at least
SMALLEST = {
    0: "max_steps eval_every_steps save_every num_workers grad_clip",
    1: "num_epochs keep_last batch_size gradient_accumulation_steps effective_batch_size max_bad_steps log_every "
    "world_size dist_timeout",
}


def test_defaults_of_the_common_flags(parser):
    assert vars(parser.parse([])) == DEFAULTS | {"config": None, "names": []}


def test_smallest_numbers(parser, refused):
    for smallest, names in SMALLEST.items():
        for name in names.split():
            assert getattr(parser.parse([f"--{name}", str(smallest)]), name) == smallest
            assert f"argument --{name}" in refused(f"--{name}", smallest - 1)


@pytest.mark.parametrize("of_all", [False, True])
def test_help_says_whose_batch_size_it_is(of_all):
    parser = Parser("Title\n\n    example")
    add_common_arguments(parser, "out", num_epochs=3, learning_rate=1e-4, batch_size=8, batch_of_all=of_all)
    text = " ".join(parser.format_help().split())
    assert f"samples {'over ALL GPUs' if of_all else 'PER GPU'} and forward pass" in text
    assert f"default: batch size x accumulation{'' if of_all else ' x GPUs'} at the first start" in text


def test_a_rank_ends_at_once_with_its_code(monkeypatch):
    """Under every launcher, without the shutdown of Python, in which torch's threads may abort."""
    for name, codes in (("RANK", [3]), ("SLURM_PROCID", [3]), ("HOME", [])):
        ended = []
        with monkeypatch.context() as patch:
            patch.delenv("RANK", raising=False)
            patch.delenv("SLURM_PROCID", raising=False)
            patch.setenv(name, "0")
            patch.setattr(os, "_exit", ended.append)
            with pytest.raises(SystemExit, match="3"):
                cli.run_main(lambda _: 3, None)
        assert ended == codes


def test_wandb_must_be_installed_to_train_with_it(parser, refused, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda _: None)
    line = "error: --wandb: it is not installed; pip install -r requirements-wandb.txt; see --help\n"
    assert refused("--wandb") == line
    # an evaluation logs nothing
    assert parser.parse(["--wandb", "--eval_only"]).wandb == "out"
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: name)
    assert parser.parse(["--wandb", "mine"]).wandb == "mine"


def test_names_of_the_guides(parser):
    flags = {
        "checkpoint_dir": "output_dir",
        "log_dir": "output_dir",
        "epochs": "num_epochs",
        "lr": "learning_rate",
        "train_batch_size": "batch_size",
        "local-rank": "local_rank",
    }
    for flag, name in flags.items():
        assert str(getattr(parser.parse([f"--{flag}", "7"]), name)).startswith("7")


def test_json_with_comments(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"output_dir": "http://x" // why\n, "seed": 1}')
    assert read_config(str(file)) == {"output_dir": "http://x", "seed": 1}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("batch_size: 0", "argument --batch_size/--train_batch_size: must be a whole number of at least 1, not '0'"),
        ("batchsize: 1", "unknown key batchsize; did you mean batch_size?"),
        ("compil: false", "unknown key compil; did you mean compile?"),
        ("- a", "must hold `flag: value` lines"),
        ("a: [", "not valid YAML or JSON"),
        ("mixed_precision: bf17", "invalid choice: 'bf17'"),
        ("seed: !!python/object/apply:os.system [echo]", "not valid YAML or JSON"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_it(refused, tmp_path, content, line):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    told = refused("--config", file)
    assert told.startswith(f"error: {file}")
    assert line in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--batchsize", "1"], "unknown flag --batchsize; did you mean --batch_size?"),
        (["--lr", "nan"], "argument --learning_rate/--lr: must be a number above 0 to inf, not 'nan'"),
        (["--lr", "0"], "must be a number above 0"),
        (["--seed", "1.0"], "must be a whole number"),
        (["--gpu_shares", "2,0"], "must be equal, auto or one whole number per process, as 2,1"),
        (["--profile", "4:3"], "argument --profile: must be the first and the last step, as 10:12, not '4:3'"),
        (["--config", "no.yaml"], "no.yaml: cannot be read"),
    ],
)
def test_a_mistaken_flag_is_one_line(refused, words, line):
    told = refused(*words)
    assert line in told
    assert told.count("\n") == 1


def test_other_ranks_say_nothing_and_wait_for_the_first(refused, monkeypatch):
    """Whoever ends first ends all: a launcher stops the others, before they may have said why."""
    monkeypatch.setenv("RANK", "1")
    waits = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    assert refused("--batch_size", 0) == ""
    assert waits == [5]


def test_args_yaml_is_a_config(parser, tmp_path):
    """The flags that a run writes down start the same run again."""
    args = parser.parse(["--names", "a b", "--compile", "--grad_clip", "0.25", "--no-auto_batch"])
    values = {name: value for name, value in vars(args).items() if name not in ("config", "local_rank")}
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(values | {"script": "x.py"}))
    again = parser.parse(["--config", str(tmp_path / "args.yaml")])
    assert json.dumps(vars(again) | {"config": None}) == json.dumps(vars(args))


def test_an_error_in_one_line():
    errors = ValueError("\n  cut off\nat byte 7"), MemoryError(), OSError("x" * 999)
    assert [first_line(error) for error in errors] == ["cut off", "MemoryError", "x" * 150]
