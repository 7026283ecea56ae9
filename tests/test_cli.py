"""utils/cli.py: flags, config files, one-line errors, and exit codes."""

import os

import pytest
import yaml

from utils import cli
from utils.cli import Parser, add_common_arguments


@pytest.fixture
def parser():
    parser = Parser("Title\n\n    example")
    add_common_arguments(parser, output_dir="out", num_epochs=3, learning_rate=1e-4, batch_size=8)
    parser.add_argument("--names", nargs="+", default=[])
    return parser


@pytest.fixture
def error_of(parser, capsys):
    def parse(*words) -> str:
        with pytest.raises(SystemExit, match="2"):
            parser.parse(list(map(str, words)))
        return capsys.readouterr().err

    return parse


def test_command_line_overrides_file_overrides_default(parser, tmp_path):
    file = tmp_path / "c.json"
    file.write_text(
        '{"learning_rate": 1e-3, "batch_size": 4, "names": ["a", "b"], "auto_batch": false, // a comment\n'
        '"compile": false, "output_dir": "http://x", "script": "x"}'
    )
    args = parser.parse(["--config", str(file), "--batch_size", "2"])
    assert (args.batch_size, args.learning_rate, args.num_epochs, args.output_dir) == (2, 1e-3, 3, "http://x")
    assert (args.names, args.auto_batch, args.compile) == (["a", "b"], False, False)


@pytest.mark.parametrize(("variable", "codes"), [("RANK", [3]), ("SLURM_PROCID", [3]), ("HOME", [])])
def test_ranks_skip_pythons_shutdown(variable, codes, monkeypatch):
    """torch's threads may abort in it."""
    ended = []
    monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(SystemExit, match="3"):
        cli.run_main(lambda _: 3, None)
    assert ended == codes


def test_training_with_wandb_needs_wandb(parser, error_of, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda _: None)
    assert error_of("--wandb").startswith("error: --wandb: it is not installed; pip install")
    # an evaluation logs nothing to wandb
    assert parser.parse(["--wandb", "--eval_only"]).wandb == "out"


def test_flags_of_the_guides(parser):
    args = parser.parse("--checkpoint_dir x --epochs 7 --lr 8 --train_batch_size 9 --local-rank 1".split())
    found = (args.output_dir, args.num_epochs, args.learning_rate, args.batch_size, args.local_rank)
    assert found == ("x", 7, 8, 9, 1)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("batch_size: 0", "argument --batch_size/--train_batch_size: must be a whole number of at least 1, not '0'"),
        ("batchsize: 1", "unknown key batchsize; did you mean batch_size?"),
        ("compil: false", "unknown key compil; did you mean compile?"),
        ("- a", "must hold `flag: value` lines"),
        ("seed: !!python/object/apply:os.system [echo]", "not valid YAML or JSON"),
    ],
)
def test_bad_config_file(error_of, tmp_path, content, line):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    text = error_of("--config", file)
    assert text.startswith(f"error: {file}")
    assert line in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--batchsize", "1"], "unknown flag --batchsize; did you mean --batch_size?"),
        (["--lr", "nan"], "argument --learning_rate/--lr: must be a number above 0 to inf, not 'nan'"),
        (["--lr", "0"], "must be a number above 0"),
        (["--gpu_shares", "2,0"], "must be equal, auto or one whole number per process, as 2,1"),
        (["--profile", "4:3"], "argument --profile: must be the first and the last step, as 10:12, not '4:3'"),
        (["--config", "no.yaml"], "no.yaml: cannot be read"),
    ],
)
def test_bad_flag(error_of, words, line):
    text = error_of(*words)
    assert line in text
    assert text.count("\n") == 1


def test_other_ranks_wait_silently_for_rank_0(error_of, monkeypatch):
    """A launcher stops all ranks once one exits, so rank 0 must print its error first."""
    monkeypatch.setenv("RANK", "1")
    pauses = []
    monkeypatch.setattr(cli.time, "sleep", pauses.append)
    assert error_of("--batch_size", 0) == ""
    assert pauses == [5]


def test_args_yaml_is_a_config(parser, tmp_path):
    """The args.yaml of a run, given as --config, starts the same run again."""
    args = parser.parse(["--names", "a b", "--compile", "--grad_clip", "0.25", "--no-auto_batch"])
    values = {name: value for name, value in vars(args).items() if name not in ("config", "local_rank")}
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(values | {"script": "x.py"}))
    again = parser.parse(["--config", str(tmp_path / "args.yaml")])
    assert vars(again) | {"config": None} == vars(args)
