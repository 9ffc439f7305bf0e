"""Bytes and the kernel. Knows no checkpoint and no tensor."""
