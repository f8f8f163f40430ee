"""The call formats, one small module for each family of models, by the way they write calls."""
