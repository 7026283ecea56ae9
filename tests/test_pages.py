"""What the pages name exists: links, files and flags; each demo has its settings in one file."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tasks.prs_med import rivals

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "prs_med": "train_prs_med.py",
    "mimic_cxr": "train_mimic_cxr.py",
    "survival": "train_survival_distributed.py",
    "cascade": "train_accelerate.py",
    "compressed_ad": "train.py",
}
TASKS = tuple(SCRIPTS)
TASK_PAGES = {f"tasks/{task}/README.md": SCRIPTS[task] for task in TASKS}
PAGES = ["README.md", *TASK_PAGES]
PAGES += [f"docs/{name}.md" for name in ("running", "clusters", "new_task", "determinism")]
GUIDE_TABLE = "As the guide writes it, and as it works here"

# Their flags are not ours, and need not be checked.
OTHER_PROGRAMS = ("torchrun", "accelerate", "deepspeed", "srun", "nvidia-smi", "tensorboard", "hf")
OTHER_PROGRAMS += ("sbatch", "kubectl", "docker")
OTHER_FLAGS = ("--master_port", "--node_rank", "--num_processes", "--standalone", "--signal", "--rdzv_conf")
# A path that begins so is a file of this repository; a user's own data lie elsewhere.
OUR_FOLDERS = ("configs/", "docs/", "tests/", "tasks/", "benchmarks/", "tools/", "utils/", "examples/")
# What a run writes there, and the example of a sixth task.
NOT_YET_THERE = ("benchmarks/gpu", "my_task", "<", "*")


def find(path: str) -> Path:
    """The file that a page names."""
    return ROOT / path


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    """What stands under a heading of the second level."""
    return read(page).split(f"\n## {title}\n")[1].split("\n## ")[0]


def prose(page: str) -> str:
    """The page without its blocks of code and without the guide's own words, the first column of its table."""
    text = re.sub("^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)
    if page in TASK_PAGES:
        table = section(page, GUIDE_TABLE)
        text = text.replace(table, re.sub(r"^\| .*? \| ", "| ", table, flags=re.MULTILINE))
    return text


def inline_code(page: str) -> list[str]:
    return re.findall("`([^`]+)`", prose(page))


def command_lines(page: str) -> list[list[str]]:
    """The words of each command in the page's blocks of shell, and in its text."""
    lines = inline_code(page)
    for block in re.findall("^```bash\n(.*?)^```$", read(page), flags=re.DOTALL | re.MULTILINE):
        # A variable such as T="train.py --config FILE" holds a part of a command.
        for name, value in re.findall(r'(\w+)="(\w+\.py [^"]*)"', block):
            block = block.replace(f"${name} ", f"{value} ")
        lines += block.replace("\\\n", " ").splitlines()

    # A place to fill in, such as <node0_ip>, is no redirection, and `& rem` begins a comment in a .bat line.
    lines = [line.replace("<", "").replace(">", "").split("& rem")[0] for line in lines]
    return [shlex.split(line.replace("'", ""), comments=True) for line in lines]


def split_command(words: list[str]) -> tuple[str, list[str]]:
    """(the script or launcher of ours on a command line, the words behind it); ("", words) without one."""
    for place, word in enumerate(words):
        name = re.sub(r"^tools\.(\w+)$", r"tools/\1.py", word.removeprefix("./"))
        if name.endswith((".py", ".sh", ".bat")) and (ROOT / name).is_file():
            return name, words[place + 1 :]
    return "", words


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text))


@cache
def help_flags(*command: str) -> set[str]:
    """Every flag in the --help of a script of ours, or of a module such as tools.sample_data."""
    if command[0].startswith("tools."):
        command = ("-m", *command)
    done = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return flags_in(done.stdout)


def script_flags(scripts: Iterable[str] = tuple(SCRIPTS.values())) -> set[str]:
    """The flags of these training scripts together; of all five if none are given."""
    return {flag for script in scripts for flag in help_flags(script)}


def known_flags(name: str) -> set[str]:
    """The flags that may stand behind the name of this script or launcher."""
    if name == "tools/sample_data.py":
        return {flag for task in TASKS for flag in help_flags("tools.sample_data", task)}
    if name == "tools/prepare_data.py":
        return {flag for task in ("prs_med", "mimic_cxr") for flag in help_flags("tools.prepare_data", task)}
    if name in SCRIPTS.values():
        return help_flags(name)

    # A launcher passes on what it does not know; the help of other programs takes seconds, as they import torch first.
    return flags_in(read(name.replace(".bat", ".sh"))) | script_flags()


@pytest.mark.parametrize("task", TASKS)
def test_the_demos_flags_stand_in_its_config(task):
    """The Makefile's target uses the file."""
    (config,) = (ROOT / "configs").glob(f"{task}_demo.*")
    makefile = read("Makefile")
    target = makefile.split(f"\ndemo-{task}:\n")[1].split("\n\n")[0]
    variables = "".join(re.findall(rf"^demo-{task}: \w+ := .*$", makefile, flags=re.MULTILINE))
    assert re.search(rf"-m tools.sample_data {task} (data/demo/{task}|\$\(D\)/\w+)( --source search)?\n", target)
    assert f"--config configs/{config.name}" in target + variables
    assert f"\t$(MAKE) demo TASK={task}\n" in makefile


@pytest.mark.parametrize("task", TASKS)
def test_no_task_imports_another(task):
    folder = ROOT / "tasks" / task
    others = "|".join(name for name in TASKS if name != task)
    for path in folder.glob("*.py"):
        assert not re.search(rf"^\s*(from|import) tasks\.({others})\b", path.read_text(), flags=re.MULTILINE), path


def anchors(page: str) -> set[str]:
    """The names by which links reach the page's headings."""
    headings = re.findall("^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)]+)\)", read(page)):
        if target.startswith("https://"):
            continue
        path, _, heading = target.partition("#")
        linked = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        name = linked.relative_to(ROOT).as_posix()
        assert find(name).exists(), target
        assert not heading or heading in anchors(name), target


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    words = {word.removeprefix("./") for line in command_lines(page) for word in line}
    at_the_top = re.compile(r"(train|\w+_train|launch_)\w*\.(py|sh|bat)|requirements\S*\.txt")
    named = [word for word in words if word.startswith(OUR_FOLDERS) or at_the_top.fullmatch(word)]
    for name in named:
        assert find(name).exists() or any(part in name for part in NOT_YET_THERE), name
    assert named


@pytest.mark.parametrize("page", PAGES)
def test_flags_that_a_page_names_exist(page):
    """On a command line behind the script's name; else of the page's script, or of any where the page is of all."""
    others = read("launch_distributed_training.sh") + read("utils/launch_4gpu.py") + read("utils/hardware_utils.py")
    scripts = [TASK_PAGES[page]] if page in TASK_PAGES else SCRIPTS.values()
    anywhere = script_flags(scripts) | flags_in(others) | set(OTHER_FLAGS) | known_flags("tools/prepare_data.py")
    anywhere |= known_flags("tools/sample_data.py")
    for words in command_lines(page):
        name, behind = split_command(words)
        if not name and words and words[0] in OTHER_PROGRAMS:
            continue
        unknown = flags_in(" ".join(behind)) - (known_flags(name) if name else anywhere)
        assert not unknown, f"{' '.join(words)}: {unknown}"


def test_both_pages_show_the_demos_table():
    """The same one, with the network's row and those of all that it is compared with."""
    tables = [re.findall("(?<=^```\n)test  .*?^(?=```$)", read(page), re.DOTALL | re.MULTILINE) for page in PAGES[:2]]
    assert tables[0] == tables[1]
    titles = [line[:20].strip() for line in tables[0][0].splitlines()]
    assert titles[:2] == ["test", "network"]
    assert titles[5:] == ["blank image", "shuffled image", *(name.replace("_", " ") for name in rivals.NAMES)]


def test_survivals_page_shows_its_demos_table():
    page = read(ROOT / "tasks/survival/README.md")
    rows = re.findall(r"^([a-z][a-z ]+?)  +0\.\d{3} \(0\.\d{3} to 0\.\d{3}\)", page, re.MULTILINE)
    rivals = ["other run", "kaplan meier", "clinical", "image numbers", "clinical and image numbers"]
    assert rows == ["network", *rivals, "true risk"]
