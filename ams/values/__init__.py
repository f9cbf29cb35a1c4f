"""Values that roles and clients share: specs, requests and replies, errors, settings, placement, text."""
