"""Rules that a reader relies on: who imports whom, no print, nothing of one machine, no tensor hidden on a context."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowtide

PACKAGE = Path(lowtide.__file__).parent
REPOSITORY = Path(__file__).parents[1]
FILES = sorted(PACKAGE.rglob("*.py"))

# what reference and lean both speak of: descriptions without arithmetic, which cannot make both wrong together
WORDS = {"errors", "levels", "parts", "sequence_split", "sgconv_form", "steps", "stream_state"}
LAYERS = {"reference", "lean", "kernels", "functional", "nn", "models", "convert", "plan", "train", "stream", "cli"}
INSTRUMENTS = {"measure", "verify"}

# part -> the parts that it may import beside itself and WORDS
MAY_IMPORT: dict[str, set[str]] = {
    "words": set(),
    "reference": set(),
    "kernels": set(),
    "lean": {"kernels"},
    "functional": {"reference", "lean"},
    "nn": {"functional"},
    "models": {"nn", "functional"} | INSTRUMENTS,
    "convert": {"nn", "functional"},
    "plan": {"nn", "functional", "models", "kernels", "convert"} | INSTRUMENTS,
    "stream": {"nn", "functional", "models"} | INSTRUMENTS,
    "measure": set(),
    "verify": {"measure"},
    "data": {"measure"},
    "distributed": set(),
    "train": (LAYERS - {"reference", "lean", "kernels", "cli"}) | INSTRUMENTS | {"data", "distributed"},
    "cli": LAYERS | INSTRUMENTS | {"data", "distributed", "root"},
    "root": LAYERS | INSTRUMENTS,  # public names
}


def part_of(module: str) -> str:
    """The part that a module belongs to: `lowtide.lean.stem` is of lean, `lowtide.dense_functions` of functional."""
    names = module.split(".")
    name = names[1] if len(names) > 1 else "root"
    if name in WORDS:
        return "words"
    if name.endswith("_functions"):
        return "functional"
    return "cli" if name == "__main__" else name


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module of lowtide that is imported anywhere in the file, inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "lowtide")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "lowtide":
                # `from lowtide import __version__` is a name of the root, `from lowtide import nn` a module
                for alias in node.names:
                    is_module = (PACKAGE / alias.name).is_dir() or (PACKAGE / f"{alias.name}.py").exists()
                    yield f"lowtide.{alias.name}" if is_module else "lowtide.errors"
            elif node.module and node.module.split(".")[0] == "lowtide":
                yield node.module


def wrong_imports(source: str, module: str) -> list[str]:
    own = part_of(module)
    allowed = MAY_IMPORT[own] | {own, "words"}
    return [name for name in imported(ast.parse(source)) if part_of(name) not in allowed]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_who_imports_whom(path: Path) -> None:
    assert part_of(module_name(path)) in MAY_IMPORT, "a new part: say in MAY_IMPORT what it may import"
    assert wrong_imports(path.read_text(), module_name(path)) == []


@pytest.mark.parametrize(
    ("module", "line", "right"),
    [
        ("lowtide.lean.stem", "from lowtide.reference.stem import stem", False),
        ("lowtide.reference.stem", "from lowtide.lean import stem", False),
        ("lowtide.lean.stem", "def f():\n    import lowtide.reference", False),
        ("lowtide.lean.stem", "from lowtide import reference", False),
        ("lowtide.kernels.native", "from lowtide.lean.maps import x", False),
        ("lowtide.verify.run", "from lowtide.nn import DenseBlock", False),
        ("lowtide.measure.run", "from lowtide.functional import dense_block", False),
        ("lowtide.data.idx", "from lowtide.train.run import Run", False),
        ("lowtide.nn.dense", "from lowtide.models import densenet", False),
        ("lowtide.parts", "from lowtide.kernels import select", False),
        ("lowtide.lean.stem", "from lowtide.kernels import select\nfrom lowtide.parts import Stem", True),
        ("lowtide.dense_functions", "import lowtide.reference.dense_block, lowtide.lean.dense_block", True),
        ("lowtide.train.checkpoint", "from lowtide import __version__", True),
        ("lowtide.lean.stem", "import torch", True),
    ],
)
def test_the_import_rule_can_fail(module: str, line: str, right: bool) -> None:
    assert (wrong_imports(line, module) == []) is right


def calls_of(tree: ast.AST, roots: set[str]) -> list[str]:
    """Calls such as torch.sum(...) or F.relu(...): those whose first name is in `roots`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base = node.func
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in roots:
                found.append(ast.unparse(node.func))
    return found


@pytest.mark.parametrize("name", sorted(WORDS))
def test_what_reference_and_lean_share_holds_no_arithmetic(name: str) -> None:
    path = PACKAGE / f"{name}.py"
    assert path.is_file()
    assert calls_of(ast.parse(path.read_text()), {"torch", "F", "nn"}) == []
    assert calls_of(ast.parse("y = torch.fft.rfft(x) + F.relu(x)"), {"torch", "F"}) == ["torch.fft.rfft", "F.relu"]


def prints(source: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


@pytest.mark.parametrize("path", [p for p in FILES if part_of(module_name(p)) != "cli"], ids=module_name)
def test_the_library_does_not_print(path: Path) -> None:
    assert prints(path.read_text()) == []
    assert prints("x = 1\nprint(x)") == [2]


def _is_tensor(annotation: str) -> bool:
    return "Tensor" in annotation and not annotation.startswith("Callable")


def hidden_tensors(source: str) -> list[str]:
    """Assignments `ctx.NAME = x` where x is an argument annotated as Tensor (alone or in a tuple): they bypass
    save_for_backward, so autograd does not see them and the meter cannot count them."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        tensors = {
            a.arg
            for a in [*function.args.args, *function.args.kwonlyargs, *filter(None, [function.args.vararg])]
            if a.annotation is not None and _is_tensor(ast.unparse(a.annotation))
        }
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                pairwise = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                values = node.value.elts if pairwise else [node.value] * len(names)
                for name, value in zip(names, values, strict=False):
                    on_ctx = isinstance(name, ast.Attribute) and ast.unparse(name.value) == "ctx"
                    inside = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
                    if on_ctx and any(isinstance(v, ast.Name) and v.id in tensors for v in inside):
                        found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_tensors_are_kept_by_save_for_backward_only(path: Path) -> None:
    """What the source shows; tests/test_saved_on_ctx.py looks at the contexts of real graphs."""
    assert hidden_tensors(path.read_text()) == []


@pytest.mark.parametrize(
    ("line", "n"),
    [
        ("ctx.x = x", 1),
        ("ctx.a, ctx.x = 1, x", 1),
        ("ctx.both = (1, x)", 1),
        ("ctx.shape = x.shape", 0),
        ("ctx.n = n", 0),
    ],
)
def test_the_rule_of_the_context_can_fail(line: str, n: int) -> None:
    assert len(hidden_tensors(f"def forward(ctx, x: Tensor, n: int):\n    {line}\n")) == n


# written in two pieces, so that this file does not hold what it looks for
OF_ONE_MACHINE = ["/wo" + "rk/", "/ro" + "ot/", "/opt/py" + "pi", "index" + "-url", "arti" + "factory", "nexus" + "."]


def repository_files() -> list[Path]:
    """Tracked text files; in an unpacked source archive, all of them."""
    if (REPOSITORY / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.split("\0")
        paths = [REPOSITORY / name for name in listed if name]
    else:
        folders = ("src", "tests", "docs", "benchmarks")
        paths = [p for folder in folders for p in (REPOSITORY / folder).rglob("*") if p.is_file()]
        paths += [p for p in REPOSITORY.iterdir() if p.is_file()]
    return [p for p in paths if p.is_file() and "__pycache__" not in p.parts]


def test_nothing_of_one_machine_is_in_the_repository() -> None:
    files = repository_files()
    assert len(files) > 50
    found = []
    for path in files:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(REPOSITORY)}: {word}" for word in OF_ONE_MACHINE if word in text]
    assert found == []
