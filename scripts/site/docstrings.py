"""A griffe extension: docstrings as Markdown, and a complaint about each public name without one."""

from __future__ import annotations

import logging
import re
from typing import Any

import griffe

logger = logging.getLogger("mkdocs.geartrain")
ROLE = re.compile(r":(?:class|meth|func|attr|mod|data|exc):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    """Roles of reStructuredText become code, and a public name without a docstring a warning, which fails the build."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Look at each public name and at what belongs to it."""
        if pkg.path != "geartrain":
            return
        for name in pkg.exports or ():
            member = pkg.members[str(name)]
            if isinstance(member, griffe.Alias):
                found = loader.modules_collection[member.target_path]
                for undocumented in _without_docstring(found):
                    logger.warning(f"{undocumented.path} is public and has no docstring")


def _without_docstring(found: griffe.Object | griffe.Alias) -> list[griffe.Object | griffe.Alias]:
    if found.is_module:
        return []
    members = (
        [m for n, m in found.members.items() if not n.startswith("_") and (m.is_function or m.is_class)]
        if (found.is_class)
        else []
    )
    return [each for each in (found, *members) if not each.has_docstring]
