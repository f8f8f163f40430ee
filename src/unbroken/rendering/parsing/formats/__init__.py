"""The call formats, one small module for each family of models."""
