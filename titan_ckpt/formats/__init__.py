"""The formats that are read and written, one folder each; `open` finds which one lies at a path."""

__all__ = ["dcp", "huggingface", "native", "open", "publish", "reading"]
