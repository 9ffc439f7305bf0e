"""How a run is started from a shell: its command line, its log, and the reference of its settings."""
