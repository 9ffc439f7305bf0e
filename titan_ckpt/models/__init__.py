"""Model definitions, one architecture per module, each with its key table. Imported by name; nothing is re-exported."""
