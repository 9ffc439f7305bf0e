"""How one model is laid out over many ranks. Imported by module; nothing is re-exported.

config.py: the settings. degrees.py: which ranks make which axis, and what fits. ranks.py: the process group and its
meshes. apply.py: the order in which everything is done to a model; one module beside it for each thing that is done.
"""
