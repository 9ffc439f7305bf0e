"""One save at a time: staged, written, agreed upon and committed; and the last step, which RunGuard can still save."""

__all__ = ["saver", "step"]
