"""Write the API reference from the docstrings: ``python docs/api.py FOLDER`` (needs pdoc).

What is public is what ``tests/public_names`` lists; a page per module, and one to begin with.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

NAMES = Path(__file__).parent.parent / "tests" / "public_names"


def public_modules() -> list[str]:
    """Return the modules whose names are public."""
    return sorted(path.stem for path in NAMES.glob("*.txt"))


def load(name: str) -> None:
    """Import a module and resolve its lazy names, which pdoc reads from the module itself."""
    module = importlib.import_module(name)
    for public in module.__all__:
        vars(module)[public] = getattr(module, public)


def write(folder: Path) -> None:
    """Write the pages into ``folder``."""
    import pdoc

    for name in public_modules():
        load(name)
    pdoc.render.configure(docformat="google", show_source=False, search=True)
    pdoc.pdoc(*public_modules(), output_directory=folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/api.py FOLDER")
    write(Path(sys.argv[1]))
