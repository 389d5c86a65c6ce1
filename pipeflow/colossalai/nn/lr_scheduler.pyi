# Written by `make stubs` from the table of the package.
from pipeflow.training.optim import CosineAnnealingWarmupLR, FlatAnnealingLR, FlatAnnealingWarmupLR, LinearWarmupLR, MultiStepWarmupLR, PolynomialWarmupLR

__all__ = ["CosineAnnealingWarmupLR", "FlatAnnealingLR", "FlatAnnealingWarmupLR", "LinearWarmupLR", "MultiStepWarmupLR", "PolynomialWarmupLR"]
