"""Text, tokens and batches of the trainer. To import this package, the extra `train` must be installed."""

from importlib.util import find_spec

from titan_ckpt.errors import ConfigError

try:
    import tokenizers  # noqa: F401 - imported for the error below
    import torchdata  # noqa: F401

    if find_spec("datasets") is None:  # its import takes seconds, and only files need it
        raise ImportError("No module named 'datasets'")
except ImportError as error:
    problem = f'this needs the extra: pip install "titan-ckpt[train]" ({error})'
    raise ConfigError([problem], "titan_ckpt.training") from error
