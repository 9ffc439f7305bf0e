"""The package's own format: one safetensors file per rank, as docs/format.md describes it. Owns only the two names."""

from titan_ckpt.storage.native_reader import NativeReader
from titan_ckpt.storage.native_writer import NativeWriter, rank_file_name

__all__ = ["NativeReader", "NativeWriter", "rank_file_name"]
