"""Numbers and names in sentences."""

from __future__ import annotations

import math
import re

_LONGEST_QUOTED = 80
# Neither passwords before @, of which one with /, ? or # puts that behind it, nor what is asked for behind ?.
_SHOWN_URL = re.compile(
    r"([a-z][a-z0-9+.-]*://)(?:(?:(?![@/?#])[!-~])*@)?((?:[A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::\d+)?(?:/[^@?#]*)?)(?:\?[^@#]*)?"
)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``1 shard``, ``2 shards``, ``40,992 classes``; ``plural`` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def sized(num_bytes: float) -> str:
    """``512 bytes``, ``1.5 MiB``, ``24.0 GiB``: in the largest unit of which there is a whole one."""
    if num_bytes < 1 << 10:
        return f"{num_bytes:.0f} bytes"
    power = min(4, (int(num_bytes).bit_length() - 1) // 10)
    return f"{num_bytes / (1 << 10 * power):,.1f} {'KMGT'[power - 1]}iB"


def lasting(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h 5 min``, ``2 days 4 h``."""
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
    """The text with whatever is no letter of a line written out, as ``\\x1b``: terminals would obey it."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def shown_url(url: str) -> str:
    """What messages may show of a URL: scheme, host, port and path; its scheme if a password may be there."""
    found = _SHOWN_URL.fullmatch(url)
    if found is not None:
        return printable(found[1] + found[2])
    scheme, mark, _ = url.partition("://")
    return f"{scheme}://..." if mark and scheme.isalpha() else "..."


def quoted(name: object) -> str:
    """``'classes'``; of a very long one its beginning and its length, for a message that people can read."""
    text = repr(name)
    if len(text) <= _LONGEST_QUOTED:
        return text
    length = len(name) if isinstance(name, str) else len(text)
    return f"{text[:_LONGEST_QUOTED]}... ({counted(length, 'character')})"


def other_format(found: object, read: object) -> str:
    """What is wrong with a file of another format than the one that is read, and what to do, after its name."""
    return f"has format {found!r}; this version of Geartrain reads format {read!r}. Use the version that wrote it"


def of_another_version(lacks: object) -> str:
    """What is wrong with a whole file that has other keys than this version writes, after its name: its checksum is
    right, so nothing is damaged."""
    return f"was made by another version of Geartrain: {lacks}. Use the version that wrote it"
