"""What travels and what is agreed: specs, requests and replies, errors, settings, placement, text."""
