"""Formatting of numbers and names in messages."""

from __future__ import annotations

import math
import re

_LONGEST_QUOTED = 80
# Neither passwords before @, even with /, ? or # in them, nor the query after ?.
_SHOWN_URL = re.compile(
    r"([a-z][a-z0-9+.-]*://)(?:(?:(?![@/?#])[!-~])*@)?((?:[A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::\d+)?(?:/[^@?#]*)?)(?:\?[^@#]*)?"
)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 shard``, ``2 shards``, ``40,992 classes``; ``plural`` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def sized(num_bytes: float) -> str:
    """Return ``512 bytes``, ``1.5 MiB``, ``24.0 GiB``: in the largest unit that it reaches."""
    if num_bytes < 1 << 10:
        return f"{num_bytes:.0f} bytes"
    power = min(4, (int(num_bytes).bit_length() - 1) // 10)
    return f"{num_bytes / (1 << 10 * power):,.1f} {'KMGT'[power - 1]}iB"


def lasting(seconds: float) -> str:
    """Return ``45 s``, ``12 min``, ``3 h 5 min``, ``2 days 4 h``."""
    if seconds < 100 or not math.isfinite(seconds):
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} days {hours % 24} h"


def printable(text: str) -> str:
    """Return the text with control characters escaped, as ``\\x1b``: terminals would execute them."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def shown_url(url: str) -> str:
    """Return the scheme, host, port and path of a URL for messages; the scheme alone if there may be a password.

    A text without any sign of a URL stays as it is.
    """
    found = _SHOWN_URL.fullmatch(url)
    if found is not None:
        return printable(found[1] + found[2])
    scheme, mark, _ = url.partition("://")
    if not (mark or "@" in url or "?" in url):
        return printable(url)
    return f"{scheme}://..." if mark and scheme.isalpha() else "..."


def quoted(name: object) -> str:
    """Return ``'classes'``; of a very long name the beginning and the length, for readable messages."""
    text = repr(name)
    if len(text) <= _LONGEST_QUOTED:
        return text
    length = len(name) if isinstance(name, str) else len(text)
    return f"{text[:_LONGEST_QUOTED]}... ({counted(length, 'character')})"


def other_format(found: object, read: object) -> str:
    """Return the error, after its name, for a file of another format than the one read, with the remedy."""
    return f"has format {found!r}; this version of Geartrain reads format {read!r}. Use the version that wrote it"


def of_another_version(lacks: object) -> str:
    """Return the error, after its name, for an intact file with other keys than this version writes."""
    return f"was made by another version of Geartrain: {lacks}. Use the version that wrote it"
