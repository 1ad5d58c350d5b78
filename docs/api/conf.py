"""Renders README.md, the guides and the API reference: ``make docs`` writes ``build/site``.

Every module has a page, from its docstrings; each package's page names what it exports. References
to names of the package that lead nowhere are errors, and so are links between the pages.
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
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "myst_nb"]
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/*.ipynb",
    "examples/*.ipynb",
    "docs/api/*.rst",
    "benchmarks/**.md",
    "extensions/*.md",
]
exclude_patterns = [".*", "build", "**/.*"]
html_theme = "furo"
html_title = "pyg_sar"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # tests run the notebook
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_inherit_docstrings = False
napoleon_use_ivar = True
html_show_copyright = False
# A short name of an annotation may mean an alias, too.
suppress_warnings = ["ref.python", "toc.not_included"]
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
    """Returns the line of what a package exports: its name, signature and summary."""
    found, value = place(f"{module}.{name}"), getattr(importlib.import_module(module), name)
    link = f":py:obj:`{name} <{found}>`" if found != f"{module}.{name}" else f"``{name}``"
    if not callable(value):
        return f"* {link}"
    taken = (
        f" ``({', '.join(inspect.signature(value).parameters)})``"
        if inspect.isfunction(value)
        else ""
    )
    summary = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return f"* {link}{taken}: {summary}"


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


GUIDES = {
    "Start": ["tutorial", "choosing", "faq", "how_it_works", "whole-graph", "what-runs"],
    "Train": ["training", "launching", "larger-than-memory", "link_prediction", "recipes"],
    "Before and after": ["partitioning", "planning", "verify", "inference"],
    "More": ["gpu", "versions", "results", "architecture"],
}


def add_contents(_: Any, name: str, source: list[str]) -> None:
    """Adds what the sidebar lists to the first page."""
    if name == "README":
        groups = {title: [f"docs/{page}" for page in pages] for title, pages in GUIDES.items()}
        groups["More"] += ["benchmarks/README", "CONTRIBUTING", "CHANGELOG", "SECURITY"]
        groups["Reference"] = ["docs/api/index"]
        for title, pages in groups.items():
            entries = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"


def setup(app: Any) -> None:
    app.connect("source-read", add_contents)
    app.connect("builder-inited", write_pages)
    app.connect("missing-reference", resolve)
