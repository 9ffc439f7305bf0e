"""One line for every load, save and export of a run, and what each process was started with. Stays on the machine."""

__all__ = ["events"]
