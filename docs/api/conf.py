"""Renders the API reference from the docstrings: ``make docs`` writes it to ``build/api``.

Every module has a page; each package's page names what it exports. References to names of the
package that lead nowhere are errors.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

project = "pyg_sar"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_inherit_docstrings = False
napoleon_use_ivar = True
html_show_copyright = False
# A short name of an annotation may mean an alias, too.
suppress_warnings = ["ref.python"]
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!pyg_sar\.).*"),  # Other packages' names.
    (r"py:.*", r"pyg_sar\.(.*\.)?(_\w+|T)"),  # Private names and type variables.
]


def modules() -> list[str]:
    paths = sorted((ROOT / "pyg_sar").rglob("*.py"))
    # Those in Triton's language need Triton to be imported, and have no reader but its compiler.
    paths = [path for path in paths if not path.name.startswith("triton_")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [n.removesuffix(".__init__") for n in names if not n.endswith("__main__")]


def place(name: str) -> str:
    """Returns where a name of a package is defined."""
    module, _, attribute = name.rpartition(".")
    value: Any = getattr(importlib.import_module(module), attribute)
    if inspect.ismodule(value):
        return str(value.__name__)
    home, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{home}.{own}" if home and own else name


def entry(module: str, name: str) -> str:
    """Returns the line of what a package exports."""
    found = place(f"{module}.{name}")
    return f"* :py:obj:`{name} <{found}>`" if found != f"{module}.{name}" else f"* ``{name}``"


def page(name: str) -> str:
    title = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n"
    module = importlib.import_module(name)
    if not hasattr(module, "__path__"):
        return f"{title}   :members:\n   :show-inheritance:\n"
    exported = [entry(name, own) for own in getattr(module, "__all__", ())]
    below = [n for n in modules() if re.fullmatch(rf"{re.escape(name)}\.\w+", n)]
    tree = "\n.. toctree::\n   :maxdepth: 1\n\n" + "".join(f"   {n}\n" for n in below)
    return f"{title}   :no-members:\n\n" + "\n".join(exported) + "\n" + tree


def write_pages(_: Any) -> None:
    for name in modules():
        path, text = HERE / f"{name}.rst", page(name)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def resolve(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Finds what a package exports under the name that it is exported by."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("pyg_sar."):
        return None
    try:
        found = place(target)
    except (AttributeError, ImportError):
        return None
    kind = "mod" if found in sys.modules else "obj"
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, kind, found, node, content)


def setup(app: Any) -> None:
    app.connect("builder-inited", write_pages)
    app.connect("missing-reference", resolve)
