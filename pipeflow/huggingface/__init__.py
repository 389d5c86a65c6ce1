"""Models of transformers in pipelines: loaded, trained and saved, of which each rank makes its own part alone. The
library is an optional extra, `pipeflow[huggingface]`, which is imported when a function here first needs it.
"""

from pipeflow.huggingface.loading import from_config, from_pretrained
from pipeflow.huggingface.saving import save_pretrained

__all__ = ["from_config", "from_pretrained", "save_pretrained"]
