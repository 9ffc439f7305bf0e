"""The work of the command line tools: every function returns plain facts, and titan_ckpt/cli shows them."""
