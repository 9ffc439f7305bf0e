"""The package's own format: one safetensors file per rank (docs/format.md)."""

__all__ = ["arena", "rank_file", "reader", "sealed_file", "writer"]
