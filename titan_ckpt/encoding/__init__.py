"""Bytes to values and back: strict JSON, typed JSON, strict TOML and command-line overrides."""

__all__ = ["foreign_pattern", "named", "overrides", "paths", "strict_json", "toml", "typed_json", "typed_json_reader"]
