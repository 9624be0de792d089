import importlib.metadata

project = "opfuse"
author = "The opfuse developers"
copyright = author
release = importlib.metadata.version("opfuse")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"opfuse {release}"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False

autodoc_default_options = {"member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3


def setup(app):
    def attributes(
        app, what, name, obj, options, lines
    ):  # "Class attributes that ...:" is a section too
        lines[:] = [
            "Attributes:" if line.startswith("Class attributes ") else line for line in lines
        ]

    app.connect("autodoc-process-docstring", attributes, priority=400)  # before napoleon
