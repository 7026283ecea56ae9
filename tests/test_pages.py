"""The pages: links, files, commands and flags that they name, the demos' configs and tables."""

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from utils.cli import ADVANCED

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "prs_med": "train_prs_med.py",
    "mimic_cxr": "train_mimic_cxr.py",
    "survival": "train_survival_distributed.py",
    "cascade": "train_accelerate.py",
    "compressed_ad": "train.py",
}
PAGES = ["README.md", *(f"tasks/{task}/README.md" for task in SCRIPTS), "docs/running.md", "docs/new_task.md"]
# programs whose flags are not checked
OTHER_PROGRAMS = "torchrun accelerate deepspeed srun nvidia-smi tensorboard hf sbatch kubectl docker pip".split()
# flags of torchrun, SLURM, the launchers and the tools
OTHER_FLAGS = {"--master_port", "--node_rank", "--num_processes", "--standalone", "--signal", "--rdzv_conf"}
OTHER_FLAGS |= {"--gpu_memory", "--gpus", "--script", "--steps", "--tolerance", "--num_gpus", "--method"}
# folders of this repository; users' data are in other folders
OUR_FOLDERS = ("configs/", "docs/", "tests/", "tasks/", "benchmarks/", "tools/", "utils/", "examples/")
NOT_YET_THERE = ("benchmarks/gpu/", "<", "*")


@cache
def help_flags(*command: str) -> set[str]:
    """Return the flags in the --help of a script or tool, including the keys of a --config file."""
    if command[0].startswith("tools"):
        command = ("-m", *command)
    command = [sys.executable, *command, "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    shown, _, advanced = text.partition(ADVANCED)
    keys = [key for line in re.findall(r"^  ([\w-]+(?:, [\w-]+)*)", advanced, re.MULTILINE) for key in line.split(", ")]
    return flags_in(shown) | {f"--{key}" for key in keys}


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text))


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    """Return the text under a second-level heading."""
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def prose(page: str) -> str:
    """Return a page without code blocks and without the first column of the guide's table, which quotes the guide."""
    text = re.sub("^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)
    before, title, table = text.partition("as it works here\n")
    table, heading, after = table.partition("\n## ")
    return before + title + re.sub(r"^\| .*? \| ", "| ", table, flags=re.MULTILINE) + heading + after


def commands(page: str) -> list[list[str]]:
    """Return the words of each command in a page's shell blocks, and of each `code` in its text."""
    lines = re.findall("`([^`]+)`", prose(page))
    for block in re.findall("^```bash\n(.*?)^```$", read(page), flags=re.DOTALL | re.MULTILINE):
        # replace variables such as RUN="train.py --config FILE"
        for name, value in re.findall(r'(\w+)="([^"]*)"', block):
            block = block.replace(f"${name}", value)
        lines += block.replace("\\\n", " ").replace("\\", "/").splitlines()
    # <node0_ip> is a placeholder, not a redirection
    return [shlex.split(re.sub("[<>']", "", line), comments=True) for line in lines]


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    for target in re.findall(r"\]\(([^)]+)\)", read(page)):
        if not target.startswith("https://"):
            path, _, heading = target.partition("#")
            linked = (ROOT / page).parent / path if path else ROOT / page
            assert linked.exists(), target
            titles = re.findall("^#+ (.*)$", linked.read_text(), re.MULTILINE) if heading else []
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not heading or heading in anchors, target


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page):
    for word in {word.removeprefix("./") for words in commands(page) for word in words}:
        if word.startswith(OUR_FOLDERS) or re.fullmatch(r"(train|run_|launch_)\w*\.(py|sh|bat)", word):
            assert (ROOT / word).exists() or any(part in word for part in NOT_YET_THERE), word


@pytest.mark.parametrize("page", PAGES)
def test_named_flags_exist(page):
    """Flags after a script's name are that script's flags; other flags are of the page's script, or of any script."""
    ours = [SCRIPTS[task] for task in SCRIPTS if f"tasks/{task}/" in page] or list(SCRIPTS.values())
    tools = [("tools.sample_data", task) for task in SCRIPTS]
    tools += [("tools.prepare_data", task) for task in ("prs_med", "mimic_cxr")]
    anywhere = OTHER_FLAGS | flags_in(read("launch_distributed_training.sh") + read("benchmarks/gpu.py"))
    anywhere = anywhere.union(*map(help_flags, ours), *(help_flags(*tool) for tool in tools))
    for words in commands(page):
        script = next((word for word in words if word in SCRIPTS.values()), None)
        tool = next((tool for tool in tools if words[2:4] == list(tool)), None)
        if script or tool or not words or words[0] not in OTHER_PROGRAMS:
            known = help_flags(script) | OTHER_FLAGS if script else help_flags(*tool) if tool else anywhere
            flags = flags_in(" ".join(words[words.index(script) :] if script else words))
            assert flags <= known, f"{' '.join(words)}: {flags - known}"


@pytest.mark.parametrize("task", SCRIPTS)
def test_demo(task):
    """The Makefile and the page use the same config, and the page's table fits into a terminal."""
    (config,) = (ROOT / "configs").glob(f"{task}_demo.*")
    target = read("Makefile").split(f"\ndemo-{task}:", 1)[1].split("\n\n")[0]
    assert f"--config configs/{config.name}" in target
    page = read(f"tasks/{task}/README.md")
    assert f"configs/{config.name}" in page
    table = section(page, "What it prints").split("\n```\n")[1]
    assert max(map(len, table.splitlines())) <= 100
    if task == "prs_med":
        excerpt = section(read("README.md"), "What the demo prints").split("```\n")[1]
        assert set(excerpt.splitlines()) < set(table.splitlines())
