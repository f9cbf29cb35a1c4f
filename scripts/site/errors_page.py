"""The page of the errors, from their module."""

from __future__ import annotations

import inspect

from geartrain.ams.values import errors

INTRODUCTION = """# Errors

```python
import geartrain as gt

with gt.local() as cluster:
    table = cluster.create_table("t", num_rows=10, dim=4, optimizer=gt.SGD(0.1))
    try:
        table.pull([3, 10])
    except gt.errors.InvalidIds as error:
        print(error)  # names the id, what is legal, and the remedy
```

All that Geartrain raises on purpose is a `gt.errors.GeartrainError`. A caller's mistake is a `ValueError`, too; a
role that does not answer is a `ConnectionError`. Over the wire an error travels by its name.
"""


def render() -> str:
    """Return the page: the tree as the module draws it, then each error."""
    _, _, tree = inspect.getdoc(errors).partition("\n\n")  # type: ignore[union-attr]
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.GeartrainError)]
    parts = [INTRODUCTION, "## The tree", f"```text\n{tree}\n```", "## Each of them"]
    parts += [f"::: {errors.__name__}.{c.__name__}\n    options:\n      heading_level: 3" for c in classes]
    return "\n\n".join(parts) + "\n"
