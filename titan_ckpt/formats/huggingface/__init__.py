"""Hugging Face model folders and PEFT adapter folders."""

__all__ = ["export", "peft", "peft_fields", "reader"]
