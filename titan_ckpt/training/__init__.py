"""The training loop of train.py. No other module of titan_ckpt imports it."""
