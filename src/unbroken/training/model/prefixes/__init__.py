"""Shared prefixes computed once: the rows of a pass as a tree (docs/design/0018-shared-prefixes.md)."""
