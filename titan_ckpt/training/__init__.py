"""The training loop of train.py. No other module of titan_ckpt imports it."""

__all__ = ["config", "data", "launch", "model_folder", "run_file", "trainer"]
