"""The package's own format: one safetensors file per rank (docs/format.md)."""

__all__ = ["arena", "layout", "rank_file", "reader", "verify", "writer"]
