"""The package's own format: one safetensors file per rank (docs/format.md)."""
