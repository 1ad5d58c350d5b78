"""The house rules: order of modules, no hidden state, no side effects, commands that exist."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from pyg_sar import usage

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "pyg_sar"

# Each wing (a folder of the package, or a module at its top) imports only wings before it.
WINGS = (
    *("usage", "errors", "wording", "files", "policy", "ledger", "kernels", "functional", "store"),
    *(
        "comm",
        "exchange",
        "space",
        "tensors",
        "reduction",
        "partition",
        "message",
        "engine",
        "nn",
        "convert",
        "train",
        "tools",
        "lightning",
    ),
    *("pyg_sar", "__main__"),
)

# What may be called at module level: it gives constants and types.
CONSTANT_CALLS = {"TypeVar", "frozenset", "getattr", "namedtuple", "newer", "re.compile", "tuple"}
MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop"),
    *("popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update"),
}


def module_name(path: Path) -> str:
    """``pyg_sar/nn/norm.py`` as ``nn.norm``, ``pyg_sar/nn/__init__.py`` as ``nn``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__":
        return ".".join(parts[:-1]) or "pyg_sar"
    return ".".join(parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}


# Wings whose docstrings say what comes out, in sentences.
SENTENCES = tuple(
    wing
    for wing in WINGS
    if wing not in ("kernels", "functional", "tensors", "pyg_sar", "__main__")
)


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each module of this package that is imported, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "pyg_sar":
                    yield node.lineno, alias.name.removeprefix("pyg_sar.")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if (node.module or "").split(".")[0] != "pyg_sar":
                continue
            base = (node.module or "").removeprefix("pyg_sar").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                yield node.lineno, inner if inner in MODULES else base or "pyg_sar"


def wing(name: str) -> str:
    """``nn`` of ``nn.norm``."""
    return name.split(".")[0]


def violations(name: str, tree: ast.AST, wings: tuple[str, ...] = WINGS) -> list[str]:
    """A module's imports of a wing that stands after its own, or in no place."""
    if wing(name) not in wings:
        return [f"{name} is in no wing"]
    here = wings.index(wing(name))
    return [
        f"{name}:{line} imports {other}"
        for line, other in imported(tree)
        if wing(other) not in wings or wings.index(wing(other)) > here
    ]


def circle(trees: Mapping[str, ast.AST]) -> list[str]:
    """Modules that import each other in a circle, if there are any."""
    try:
        TopologicalSorter(
            {name: {o for _, o in imported(tree) if o != name} for name, tree in trees.items()}
        ).prepare()
    except CycleError as found:
        return list(found.args[1])
    return []


def test_every_wing_is_there():
    assert {wing(name) for name in MODULES} == set(WINGS)


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_only_wings_before_theirs(name):
    assert violations(name, TREES[name]) == []


def test_no_import_is_a_circle():
    assert circle(TREES) == []


def test_an_upward_import_would_be_found():
    for code in (
        "from pyg_sar.tools.cli import main",
        "import pyg_sar.tools.cli",
        "from pyg_sar.tools import cli",
    ):
        hidden = ast.parse(f"def f():\n    {code}")
        assert violations("errors", hidden) == ["errors:2 imports tools.cli"]
        assert violations("__main__", hidden) == []
    assert violations("nn.norm", ast.parse("import pyg_sar")) == ["nn.norm:1 imports pyg_sar"]


def test_a_circle_would_be_found():
    names = ("nn.norm", "nn.pool")
    trees = {
        name: ast.parse(f"if TYPE_CHECKING:\n    from pyg_sar.{other} import X")
        for name, other in zip(names, reversed(names), strict=True)
    }
    assert set(circle(trees)) == set(names)
    assert circle({"nn.norm": trees["nn.norm"], "nn.pool": ast.parse("")}) == []


# Docstrings ###################################################################


def vague_docstrings(tree: ast.AST) -> list[str]:
    """Returns docstrings that begin with "What" or "Whether": they name no act and no result."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in found if re.match(r"(What|Whether)\b", text)]


@pytest.mark.parametrize("name", [name for name in MODULES if wing(name) in SENTENCES])
def test_docstrings_are_sentences(name):
    assert vague_docstrings(TREES[name]) == []


def test_a_vague_docstring_would_be_found():
    for first, count in (("What it holds.", 1), ("Whether it is.", 1), ("Returns whether.", 0)):
        assert len(vague_docstrings(ast.parse(f'def f():\n    """{first}"""'))) == count


# State ########################################################################


def star_imports(tree: ast.AST) -> list[str]:
    return [
        f"line {node.lineno}: from {node.module} import *"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
    ]


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names that are bound at module level, and to what."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.Assign) and node.col_offset == 0:
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
        elif isinstance(node, ast.AnnAssign) and node.col_offset == 0 and node.value is not None:
            yield ast.unparse(node.target), node.value


def root_name(node: ast.expr) -> str | None:
    """``a`` of ``a[0].b``."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def is_table(value: ast.expr) -> bool:
    """Whether a value is a list, dict or set that is written out."""
    kinds = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
    return isinstance(value, kinds)


def mutable_state(tree: ast.Module, *, context_variables: bool = False) -> list[str]:
    """What makes a module hold process-wide state.

    Tables (lists, dicts, sets that are written out) are constants: named in capitals, and filled
    at module level only, if need be by a decorator of the module's functions. Other objects that
    calls make are refused, but for constants and types.
    """
    found, tables = [], set()
    allowed = CONSTANT_CALLS | ({"ContextVar"} if context_variables else set())
    for name, value in assigned(tree):
        if is_table(value):
            tables.add(name)
            if not (name.lstrip("_").isupper() or name == "__all__"):
                found.append(f"'{name}' is a mutable table not named in capitals")
        elif isinstance(value, ast.Call) and ast.unparse(value.func) not in allowed:
            found.append(f"'{name}' holds an object made by {ast.unparse(value.func)}()")
    functions = [
        n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    registering = {
        root_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
        for function in tree.body
        if isinstance(function, ast.FunctionDef)
        for decorator in function.decorator_list
    }
    inner = {n for f in functions if f.name in registering for n in ast.walk(f)}
    for function in functions:
        if function not in inner:
            found.extend(changes(function, tables))
    return list(dict.fromkeys(found))


def changes(scope: ast.AST, tables: set[str]) -> Iterator[str]:
    """Where a function changes a table of its module, or rebinds a global name."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            targets = [node.func] if node.func.attr in MUTATORS else []
        for target in targets:
            if isinstance(target, (ast.Subscript, ast.Attribute)) and root_name(target) in tables:
                yield f"line {target.lineno}: changes {ast.unparse(target)}"


@pytest.mark.parametrize("name", MODULES)
def test_no_star_import_and_no_mutable_global(name):
    assert star_imports(TREES[name]) == []
    assert mutable_state(TREES[name], context_variables=name == "comm.group") == []


@pytest.mark.parametrize(
    "code",
    [
        "registry = {}",
        "CACHE: dict[int, int] = {}\ndef f(x):\n    CACHE[x] = 1",
        "CACHE = []\ndef f(x):\n    CACHE.append(x)",
        "_SEEN = set()",
        "_LOCK = threading.Lock()",
        "current = ContextVar('current')",
        "_pool = ThreadPoolExecutor()",
        "if True:\n    pass\nstate = collections.defaultdict(list)",
        "count = 0\ndef f():\n    global count\n    count += 1",
        "class A:\n    def f(self):\n        del TABLE[0]\nTABLE = [1]",
    ],
)
def test_mutable_state_would_be_found(code):
    assert len(mutable_state(ast.parse(code))) == 1


def test_constants_are_let_through():
    code = "T = TypeVar('T')\nNAMES = ('a',)\nTABLE = {'a': 1}\n__all__ = ['f']\nA = B = 1\n"
    code += "def known(f):\n    def g():\n        TABLE['b'] = f\n    return g\n"
    code += "@known\ndef h():\n    pass\n"
    code += "def f():\n    table = {}\n    table['a'] = TABLE['a']\n    return table"
    assert mutable_state(ast.parse(code)) == []
    assert mutable_state(ast.parse("c = ContextVar('c')"), context_variables=True) == []


# Files of others ##############################################################


def unsafe_reads(tree: ast.AST) -> list[str]:
    """Calls that would run code out of a file."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        call = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if (
            re.search(r"pickle\.(load|loads|Unpickler)$", call)
            or (call == "torch.load" and given.get("weights_only") != "True")
            or (call in ("np.load", "numpy.load") and given.get("allow_pickle") != "False")
        ):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("name", [name for name in MODULES if name != "comm.launch"])
def test_nothing_is_read_by_pickle(name):
    """``launch`` hands functions to its own workers through its own pipe."""
    assert unsafe_reads(TREES[name]) == []


def test_unsafe_reads_would_be_found():
    for code in ("torch.load(f)", "torch.load(f, weights_only=False)", "pickle.loads(b)"):
        assert len(unsafe_reads(ast.parse(code))) == 1
    assert unsafe_reads(ast.parse("torch.load(f, weights_only=True)")) == []


# Importing ####################################################################

IMPORT = """
import atexit, os, random, signal, sys, threading, warnings
import numpy, torch, torch_geometric, torch_geometric.nn

def state():
    from torch_geometric.nn import MessagePassing
    return {
        "threads": [thread.name for thread in threading.enumerate()],
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "hooks": (sys.excepthook, threading.excepthook, sys.stdout, sys.stderr),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "path": list(sys.path),
        "exit functions": atexit._ncallbacks(),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch defaults": (torch.get_default_dtype(), torch.is_grad_enabled()),
        "random states": (
            random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state())
        ),
        "safe classes": set(torch.serialization.get_safe_globals()),
        "process group": torch.distributed.is_initialized(),
        "MessagePassing": dict(vars(MessagePassing)),
        "Tensor": dict(vars(torch.Tensor)),
        "Module": dict(vars(torch.nn.Module)),
    }

import safetensors.torch, tqdm, torch_geometric.transforms  # Have side effects of their own.
before, modules = state(), set(sys.modules)
import pyg_sar
for name in dir(pyg_sar):
    getattr(pyg_sar, name)
after = state()
changed = [name for name in before if before[name] != after[name]]
own = {name for name in sys.modules if name.split(".")[0] == "pyg_sar"}
more = set(sys.modules) - modules - own
unwanted = {"matplotlib", "ogb", "oneccl_bindings_for_pytorch", "IPython", "pymetis"}
print("changed:", *changed)
print("imported:", *sorted(unwanted & set(sys.modules)))
# Few modules besides those of torch_geometric: importing takes little longer.
print("modules:", len(modules), "few" if len(more) < 20 and len(own) < 250 else (own, more))
"""


def test_importing_the_package_has_no_side_effect():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    *found, modules = done.stdout.splitlines()
    assert found == ["changed:", "imported:"]
    assert re.fullmatch(r"modules: \d{4} few", modules), modules


# Public names #################################################################

TOP = {
    *("DistMessagePassing", "Ledger", "SARPolicy", "Trainer", "distribute"),
    "from_local",
    *(
        "infer",
        "init",
        "launch",
        "load_partition",
        "edges",
        "plan",
        "run",
        "scatter",
        "verify",
        "write_partitions",
    ),
}


def test_the_names_at_the_top():
    import pyg_sar

    assert set(pyg_sar.__all__) == TOP and len(pyg_sar.__all__) == len(TOP)
    modules = {name.split(".")[0] for name in MODULES}
    public = {name for name in dir(pyg_sar) if not name.startswith("_")}
    helpers = {"Any", "TYPE_CHECKING", "import_module"}
    assert public - modules - helpers == TOP and {"errors", "functional"} <= public
    for node in ast.walk(TREES["pyg_sar"]):  # What type checkers see is what is given.
        if isinstance(node, ast.ImportFrom) and node.module.startswith("pyg_sar."):
            for alias in node.names:
                assert f"pyg_sar.{pyg_sar._MODULES[alias.name]}" == node.module, alias.name
    for name in TOP:
        assert callable(getattr(pyg_sar, name)), name


def test_errors_are_at_one_place():
    """Exceptions that a user may catch by name are in ``errors``."""
    import pyg_sar

    for name in ("comm", "nn", "partition", "reduction", "space", "tools", "train"):
        module = importlib.import_module(f"pyg_sar.{name}")
        for public in module.__all__:
            value = getattr(module, public)
            assert not (isinstance(value, type) and issubclass(value, Exception)), public
    assert issubclass(pyg_sar.errors.CheckpointError, pyg_sar.errors.PygSarError)


# Commands #####################################################################

HELP = """
import sys
from pyg_sar.__main__ import main
try:
    sys.exit(main(sys.argv[1:]))
finally:
    assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("--help", 0, "predict memory, bytes"),
        ("--version", 0, "torch 2."),
        ("--wrong", 2, "(pyg-sar --"),
        *((f"{command} --help", 0, f"usage: pyg-sar {command}") for command in usage.COMMANDS),
        ("train", 2, "required: --parts"),
        ("train --parts p --epoch 3", 2, "--epoch: there is no such option; did you mean 'epochs'"),
        ("train --config no.json", 2, "--config no.json: No such file"),
    ],
)
def test_help_and_mistakes_in_options_do_without_pytorch(line, code, said):
    done = subprocess.run(
        [sys.executable, "-c", HELP, *line.split()], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert "AssertionError" not in done.stderr, done.stderr
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def test_options_name_what_there_is():
    from pyg_sar.tools import cli, run

    assert (*run.LOSSES,) == usage.LOSSES and (*cli._RUNNERS,) == (*usage.COMMANDS,)


def test_commands_run_from_a_checkout_that_is_not_installed(monkeypatch, capsys):
    def version(name: str) -> str:
        if name == "pyg_sar":
            raise PackageNotFoundError(name)
        return "2.0"

    monkeypatch.setattr(usage, "version", version)
    with pytest.raises(SystemExit) as ended:
        usage.command_parser().parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "torch 2.0, torch_geometric 2.0\n"


def shell_lines(text: str) -> list[str]:
    """The lines of a document's shell blocks, continued lines joined."""
    blocks = re.findall(r"```(?:bash|sh|console|shell)\n(.*?)```", text, flags=re.DOTALL)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_commands_of_the_documents_exist(document, capsys):
    from pyg_sar.__main__ import main

    text = (REPOSITORY / document).read_text()
    made = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", "\n".join(shell_lines(text)) + text, re.M)
    assert made and set(made) <= make_targets()
    for command in set(re.findall(r"pyg-sar ([a-z][a-z-]*)", text)):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0, command
    assert document != "README.md" or "usage: pyg-sar" in capsys.readouterr().out
    for path in re.findall(r"\b((?:examples|docs|benchmarks)/[\w/.-]+\.\w+)", text):
        assert (REPOSITORY / path).exists(), f"{document} names {path}"


def test_make_knows_its_targets_and_ci_runs_the_tests():
    assert {"venv", "demo", "test", "test-full", "lint", "clean", "help"} <= make_targets()
    done = subprocess.run(
        ["make", "-n", *sorted(make_targets() - {"help"})],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "--durations=10" in done.stdout  # CI names the slowest tests.
    script = REPOSITORY / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    lines = script.read_text().splitlines()
    assert "set -e" in lines and [line for line in lines if "make" in line] == ["make test"]


def test_nothing_switches_pytorch_for_all_threads():
    """``check_invariants=True`` does, while it runs, and overlapping calls may leave it on."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.keyword) and node.arg == "check_invariants"), name


def test_no_file_of_the_kernels_is_long():
    files = [*REPOSITORY.glob("extensions/*.cpp"), *REPOSITORY.glob("extensions/*.h")]
    assert [path.name for path in files if len(path.read_text().splitlines()) > 400] == []


def test_documents_show_all_pictures():
    """What a script has left is no part of the project."""
    done = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a checkout of git")
    files = [Path(name) for name in done.stdout.splitlines()]
    texts = [(REPOSITORY / path).read_text() for path in files if path.suffix in (".md", ".ipynb")]
    pictures = [path for path in files if path.suffix in (".jpg", ".pdf", ".png", ".svg")]
    assert [path for path in pictures if not any(path.name in text for text in texts)] == []
