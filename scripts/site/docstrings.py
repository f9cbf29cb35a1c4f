"""A griffe extension: docstrings as Markdown, and a complaint about each public name without one."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import api_pages
import griffe

import geartrain

logger = logging.getLogger("mkdocs.geartrain")
ROLE = re.compile(r":(?:class|meth|func|attr|mod|data|exc):`~?([^`]+)`")
FIELD_DEFAULT = re.compile(r"^Field\(default=([^,)]+).*$")


class Docstrings(griffe.Extension):
    """Roles of reStructuredText become code, fields a table; a public name without a docstring fails the build."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Look at each public name and at what belongs to it."""
        if pkg.path != "geartrain":
            return
        returned = [loader.modules_collection[path] for page in api_pages.PAGES for path in page.returned]
        for member in [*(pkg.members[name] for name in geartrain._HOMES), *returned]:
            found = loader.modules_collection[member.target_path] if isinstance(member, griffe.Alias) else member
            found = found.final_target if isinstance(found, griffe.Alias) else found
            if isinstance(found, griffe.Class):
                _inherit_docstrings(found)
            for undocumented in _without_docstring(found):
                logger.warning(f"{undocumented.path} is public and has no docstring")
            if isinstance(found, griffe.Class):
                _put_fields_into_a_table(found)
            for function in (found, found.members.get("__init__")):
                if isinstance(function, griffe.Function):
                    _name_defaults(function)


def _inherit_docstrings(found: griffe.Class) -> None:
    """A method without a docstring does what the method that it overrides says."""
    for name, member in found.members.items():
        if member.is_function and member.docstring is None:
            overridden = (base.members[name].docstring for base in found.mro() if name in base.members)
            member.docstring = next((docstring for docstring in overridden if docstring is not None), None)


def _without_docstring(found: griffe.Object | griffe.Alias) -> Iterator[griffe.Object | griffe.Alias]:
    if found.is_attribute:  # a constant, such as the version
        return
    members = found.members.items() if found.is_class else ()
    public = [
        member for name, member in members if not name.startswith("_") and (member.is_function or member.is_class)
    ]
    yield from (each for each in (found, *public) if not each.has_docstring)


def _name_defaults(function: griffe.Function) -> None:
    """A default that is a constant of the module is shown as what it is."""
    for parameter in function.parameters:
        constant = function.module.members.get(str(parameter.default))
        if isinstance(constant, griffe.Attribute):
            parameter.default = constant.value


def _put_fields_into_a_table(found: griffe.Class) -> None:
    """Fields that are documented one by one, as those of dataclasses are, take a line each instead of a section."""
    fields = {
        name: member
        for name, member in found.members.items()
        if member.is_attribute and member.docstring is not None and not (member.labels & {"property"} or name[0] == "_")
    }
    if not fields or found.docstring is None:
        return
    lines = []
    for name, field in fields.items():
        default = "" if field.value is None else FIELD_DEFAULT.sub(r"\1", str(field.value))
        text = " ".join(field.docstring.value.split())
        lines.append(f"    {name}: {text}{f' Default: `{default}`.' if default else ''}")
        field.docstring = None  # shown above, so not once more
    found.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)
