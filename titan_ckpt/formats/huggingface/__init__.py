"""Hugging Face model folders and PEFT adapter folders."""
