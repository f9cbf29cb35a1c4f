"""Numbers and names in sentences."""

from __future__ import annotations

_LONGEST_QUOTED = 80


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 shard``, ``2 shards``, ``40,992 classes``; ``plural`` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def quoted(name: object) -> str:
    """``'classes'``; of a very long one its beginning and its length, for a message that people can read."""
    text = repr(name)
    if len(text) <= _LONGEST_QUOTED:
        return text
    length = len(name) if isinstance(name, str) else len(text)
    return f"{text[:_LONGEST_QUOTED]}... ({counted(length, 'character')})"
