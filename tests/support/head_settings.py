"""Settings of a head by name, whichever of ``ClassHead`` and ``HeadConfig`` takes them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from geartrain.bridge.head.config import HeadConfig

_OF_CONFIG = {field.name for field in fields(HeadConfig)}


def head_settings(**settings: Any) -> dict[str, Any]:
    """The keywords of ``ClassHead``, those of its ``config`` put there."""
    config = {name: settings.pop(name) for name in _OF_CONFIG & settings.keys()}
    return {**settings, "config": HeadConfig(**config)} if config else settings
