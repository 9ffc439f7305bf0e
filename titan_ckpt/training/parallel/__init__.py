"""Parallelism of one model over many ranks. Import its modules by name; nothing is re-exported.

degrees.py has the axes and the check that they fit, ranks.py the process group and its meshes.
apply.py applies everything to a model in order; data, context and pipeline parallelism have modules of their own.
"""
