"""The work of the command line tools: every function returns plain facts, and titan_ckpt/cli shows them."""

__all__ = ["conversion", "difference", "inspecting", "listing", "logits", "report", "retention", "verifying"]
