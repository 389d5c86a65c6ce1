# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.policies import ModulePolicyDescription, Policy, SubModuleReplacementDescription

__all__ = ["ModulePolicyDescription", "Policy", "SubModuleReplacementDescription"]
