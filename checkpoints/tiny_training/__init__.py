"""How `checkpoints/tiny-dsa` was trained; `train_tiny_dsa.py` is its command line.

corpus -> documents -> feeder -> loop -> evaluate -> export -> report; what a step computes stands
in model (with attention, selection), losses and optimiser. `documents` and what it imports are free
of jax: worker processes run them.
"""
