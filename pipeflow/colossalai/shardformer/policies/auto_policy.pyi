# Written by `make stubs` from the table of the package.
from pipeflow.colossalai.policies import PolicyLocation, _POLICY_LIST as _POLICY_LIST, get_autopolicy, import_policy

__all__ = ["PolicyLocation", "get_autopolicy", "import_policy"]
