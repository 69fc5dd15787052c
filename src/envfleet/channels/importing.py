"""Importing: what the caller's program imports from its working directory, actors import, too.

Ray brings a working directory to every node and puts it on the path of its workers; of a local Ray
it is the same directory. The directory of the script, which Python itself puts on the caller's
path, may lie below: a job that runs ``python examples/train.py`` would find its modules in the
caller alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def import_paths() -> list[str]:
    """The caller's import paths below its working directory, relative to that."""
    here = Path.cwd()
    paths = [Path(path).absolute() for path in sys.path]
    below = [path for path in paths if path != here and path.is_relative_to(here)]
    return [
        str(path.relative_to(here)) for path in below if path.is_dir() and not _is_installed(path)
    ]


def add_import_paths(paths: Sequence[str]) -> None:
    """Lets this process import from there, as far as it has these directories."""
    found = [os.path.join(os.getcwd(), path) for path in paths]
    sys.path += [path for path in found if path not in sys.path and os.path.isdir(path)]


def _is_installed(path: Path) -> bool:
    """Whether it is an environment's own: on another node that may be another one."""
    return path.is_relative_to(sys.prefix) or path.name == "site-packages"
