# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.layers import CosineAnnealingLR, ExponentialLR, LambdaLR, MultiStepLR, MultiplicativeLR, OneCycleLR, PolynomialLR, StepLR
from pipeflow.training.optim import CosineAnnealingWarmupLR, FlatAnnealingLR, FlatAnnealingWarmupLR, LinearWarmupLR, MultiStepWarmupLR, PolynomialWarmupLR

__all__ = ["CosineAnnealingLR", "CosineAnnealingWarmupLR", "ExponentialLR", "FlatAnnealingLR", "FlatAnnealingWarmupLR", "LambdaLR", "LinearWarmupLR", "MultiStepLR", "MultiStepWarmupLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "PolynomialWarmupLR", "StepLR"]
