"""Code that commands share: settings, common options, help texts, printed tables."""
