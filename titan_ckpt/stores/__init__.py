"""Buckets of S3, GCS and Azure: objects instead of files, conditional puts instead of renames. Knows no checkpoints."""

__all__ = ["answers", "bucket", "object_files", "objects", "store"]
