"""Text, tokens and batches of the trainer. To import this package, the extra `train` must be installed."""

from titan_ckpt.errors import ConfigError

try:
    import tokenizers  # noqa: F401 - imported for the error below
    import torchdata  # noqa: F401
except ImportError as error:
    problem = f'this needs the extra: pip install "titan-ckpt[train]" ({error})'
    raise ConfigError([problem], "titan_ckpt.training") from error
