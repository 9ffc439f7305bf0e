"""The components of a run beside its weights, one file each; item.py has what all of them answer."""
