"""Tables of what other libraries hold: whether it continues exactly after a resume."""
