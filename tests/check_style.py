"""What `make lint` holds of the way this project is written, where a linter has no rule for it.

    python tests/check_style.py

Dense files are hard to read, and become so one line at a time: the limits are those of the densest file there was when
they were set. parse_args is a list of flags, and may be long.
"""

import ast
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# limits, of a file and of one function
TOKENS_PER_LINE = {"tests": 12.0, "else": 9.5}
PARAGRAPH = 16
PACKED = 3
STARRED = 2
FUNCTION = 60
SCRIPT = {"train_survival_distributed.py": 650, "train_accelerate.py": 650, "else": 600}
# what is no name, number or sign
LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines of all docstrings, which count neither as code nor as a paragraph."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines.update(range(first.lineno, first.end_lineno + 1))
    return lines


def tokens_per_line(path: Path, docstrings: set[int]) -> float:
    """The mean number of names, numbers and signs on a line of code."""
    with tokenize.open(path) as file:
        tokens = [token.start[0] for token in tokenize.generate_tokens(file.readline) if token.type not in LAYOUT]
    lines = [line for line in tokens if line not in docstrings]
    return len(lines) / max(1, len(set(lines)))


def longest_paragraph(text: str, docstrings: set[int]) -> int:
    """The most lines in a row without a blank line, a comment, a docstring, or the head of a function."""
    longest = length = 0
    for number, line in enumerate(text.splitlines(), start=1):
        begins = line.strip().startswith(("#", "def ", "class ", "@")) or number in docstrings
        length = 0 if begins or not line.strip() else length + 1
        longest = max(longest, length)
    return longest


def packs_values(node: ast.AST) -> bool:
    """Whether this is `a, b = x, y`."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def hides_arguments(node: ast.AST) -> bool:
    """Whether this is `f(*x)`."""
    if not isinstance(node, ast.Call):
        return False
    return any(isinstance(argument, ast.Starred) for argument in node.args)


def measure(path: Path) -> dict[str, tuple[float, float]]:
    """{what: (how much a file has of it, the most that it may)}."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    docstrings = docstring_lines(tree)
    density = tokens_per_line(path, docstrings)

    # of the whole file
    figures = {
        "tokens a line": (round(density, 1), TOKENS_PER_LINE.get(path.parent.name, TOKENS_PER_LINE["else"])),
        "lines in a paragraph": (longest_paragraph(text, docstrings), PARAGRAPH),
        "assignments of several values": (sum(map(packs_values, nodes)), PACKED),
        "calls f(*x)": (sum(map(hides_arguments, nodes)), STARRED),
    }

    # of each function, and of a script
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name != "parse_args":
            length = node.end_lineno - node.lineno + 1
            figures[f"lines in {node.name}()"] = (length, FUNCTION)
    if path.parent == ROOT and path.name.startswith("train"):
        length = len(text.splitlines())
        figures["lines"] = (length, SCRIPT.get(path.name, SCRIPT["else"]))
    return figures


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in listed.stdout.split() if (ROOT / name).is_file()]
    beyond = 0
    for name in files:
        for what, (value, most) in measure(ROOT / name).items():
            if value > most:
                print(f"{name}: {value} {what}, at most {most}")
                beyond += 1
    print(f"{len(files)} files, {beyond} figures beyond their limits")
    return int(beyond > 0)


if __name__ == "__main__":
    sys.exit(main())
