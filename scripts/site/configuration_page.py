"""The page of the settings, from their models."""

from __future__ import annotations

import json
import re

from pydantic.fields import FieldInfo

from geartrain.ams.values.config import ClusterConfig
from geartrain.launch import configuration

INTRODUCTION = """# Configuration

```yaml
# cluster.yaml: geartrain up -f cluster.yaml
scheduler:
  num_shards: 4
server:
  shards: 2  # in one process each, so two server processes
```

A setting comes from one YAML file, then from the environment, then from a flag; each overrides the one before. The
setting `server.memory_bytes` is `memory_bytes` in the section `server` of the file, and
`GEARTRAIN_SERVER__MEMORY_BYTES` in the environment; the command of a role has a flag for every key of its section, as
`geartrain server --memory-bytes`. A mistyped key is an error that suggests the right one.

`geartrain config show` prints the settings in force, as a file with comments. `geartrain config validate FILE`
says whether a file is right.
"""


def render() -> str:
    """Return the page: a table for each section."""
    whole = {key: ClusterConfig.model_fields[key] for key in configuration.WHOLE_KEYS}
    parts = [INTRODUCTION, "## Keys of no section", _table(whole)]
    for name, section in configuration.sections().items():
        parts += [f"## `{name}`", " ".join((section.__doc__ or "").split()), _table(section.model_fields)]
    return "\n\n".join(parts) + "\n"


def _table(fields: dict[str, FieldInfo]) -> str:
    lines = ["| Key | Default | What it is |", "|---|---|---|"]
    for key, field in fields.items():
        description = " ".join((field.description or "").split())
        lines.append(f"| `{key}` | {_default(field)} | {_escaped(description)} |")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "" if value is None else f"`{json.dumps(value)}`"


def _escaped(text: str) -> str:
    return re.sub(r"([|<*_])", r"\\\1", text)
