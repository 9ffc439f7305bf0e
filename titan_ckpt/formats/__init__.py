"""The formats that are read and written, one folder each; `open` finds which one lies at a path."""
