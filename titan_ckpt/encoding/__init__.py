"""Bytes to values and back: strict JSON, typed JSON, strict TOML and command-line overrides."""
