"""Helpers that several test files share: local tokenizers, tiny models, templates."""
