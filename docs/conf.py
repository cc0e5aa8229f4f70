"""Settings of the site; `bash run.sh docs` builds it. Nothing is downloaded, no notebook is run."""

import dataclasses
import gc
import inspect
import re
import shutil
from pathlib import Path

from sphinx.domains.python import PyObject
from sphinx.util import logging
from sphinx.util.inspect import stringify_signature

import sparsity

DOCS = Path(__file__).parent
# Sphinx reads below this folder only; ignored by git.
shutil.rmtree(DOCS / "notebooks", ignore_errors=True)
shutil.copytree(DOCS.parent / "colabs", DOCS / "notebooks")

project = "sparsity"
author = "The authors of sparsity"
copyright = author
release = version = sparsity.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"sparsity {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False

nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}  # no notebook has widgets, whose scripts would come from elsewhere
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

default_role = "code"  # docstrings put code into single backticks
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_attr_annotations = False  # the signature has the types
napoleon_use_ivar = True
napoleon_use_rtype = False
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

_log = logging.getLogger(__name__)

gc.disable()  # the trees of pages are many objects: collections take a third of a build


def escape_markup(app, what, name, obj, options, lines):
    """Escapes what reST would take for markup in docstrings, outside of code and programs."""
    blocks = re.split(r"(^ *>>>.*?(?:\n *$|\Z))", "\n".join(lines), flags=re.DOTALL | re.MULTILINE)
    for i in range(0, len(blocks), 2):
        parts = re.split(r"(`[^`]*`)", blocks[i])
        parts[::2] = [re.sub(r"([*|]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
        blocks[i] = re.sub(r"(?<=\w)`(?=\w)", r"`\\ ", "".join(parts))  # `Array`s
    lines[:] = "".join(blocks).split("\n")


def show_fields(app, what, name, obj, options, signature, result):
    """The signature of a dataclass: its fields; of an algorithm those that are not the base's.

    A class that users do not make ("Made by `trace`."), a protocol and the base of patterns show
    none.
    """
    is_unmade = getattr(obj, "_is_protocol", False) or "Made by `" in (obj.__doc__ or "")
    if obj is sparsity.SparsityType or (what == "class" and is_unmade):
        return ("", None) if signature else None  # a class without a signature has none to hide
    if what != "class" or not dataclasses.is_dataclass(obj):
        return None
    if not issubclass(obj, sparsity.BaseUpdater):
        plain = inspect.signature(obj).replace(return_annotation=inspect.Signature.empty)
        return stringify_signature(plain, unqualified_typehints=True), None
    base = inspect.signature(sparsity.BaseUpdater.__init__).parameters
    fields = list(inspect.signature(obj.__init__).parameters.values())[1:]
    if obj is not sparsity.BaseUpdater:
        fields = [x for x in fields if x.name not in base or x.default != base[x.name].default]
        fields.append(inspect.Parameter("fields", inspect.Parameter.VAR_KEYWORD))
    return stringify_signature(inspect.Signature(fields), show_annotation=False), None


def check_public_names(app, env):
    """Warns of public names that no page documents; the build makes errors of warnings."""
    documented = env.domains.python_domain.objects
    for name in sparsity.__all__:
        if f"sparsity.{name}" not in documented:
            _log.warning("sparsity.%s is on no page of docs/api", name)


# Docstrings list attributes; the site says so.
for field in PyObject.doc_field_types:
    if field.name == "variable":
        field.label = "Attributes"


def setup(app):
    app.connect("autodoc-process-docstring", escape_markup, priority=400)  # before napoleon, 500
    app.connect("autodoc-process-signature", show_fields)
    app.connect("env-check-consistency", check_public_names)
