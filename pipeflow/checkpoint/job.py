"""What one rank does to write a checkpoint: agree on its part, write it, and, the last of all, complete the folder."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from pipeflow.checkpoint import files
from pipeflow.checkpoint.files import Digest, Manifest
from pipeflow.checkpoint.pieces import Described, described_everywhere
from pipeflow.checkpoint.plans import Content, SavePlanner, divide, write, write_metadata
from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.parallel.layout import Layout
from pipeflow.parallel.transport.agreement import all_gather_object

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank writes. It meets the other ranks in the folder alone, so that it can run beside training: the one
    that finds everybody's part there completes the checkpoint.
    """

    path: Path
    temporary: Path
    rank: int
    layout: Layout
    step: int
    keep: int | None
    plan: SavePlan
    planner: SavePlanner
    metadata: Metadata

    @classmethod
    def agreed(
        cls,
        context: Context,
        path: StrPath,
        content: Content,
        described: list[Described],
        *,
        step: int,
        keep: int | None,
        copying: bool,
    ) -> Job:
        """What this rank is to write of `content`, which the ranks settle together; with `copying`, in memory of its
        own, which training does not change. Removes what earlier saves left behind.

        Raises UsageError when the ranks' names or parts do not fit each other.
        """
        path, planner = Path(path), SavePlanner(content)
        if context.rank == 0:
            files.clean(path.parent)
        told = (planner.create_local_plan(), described, files.temporary_for(path))
        everyone: list[Any] = all_gather_object(context.world, told)
        plans, descriptions, temporaries = map(list, zip(*everyone, strict=True))
        described_everywhere(descriptions)
        divided, metadata = divide(plans)
        plan = divided[context.rank]
        planner = SavePlanner(content.restricted(plan)) if copying else planner
        return cls(path, temporaries[0], context.rank, context.layout, step, keep, plan, planner, metadata)

    def run(self) -> None:
        """Writes this rank's part, and where it is the last, the rest. Raises UsageError naming the path."""
        try:
            self._write()
            if all((self.temporary / f"part-{rank}").exists() for rank in range(self.layout.world_size)):
                self.complete()
        except Exception as error:  # torch wraps some of the file system's
            raise UsageError(f"writing checkpoint {self.path} failed: {error}") from error

    def _write(self) -> None:
        self.temporary.mkdir(parents=True, exist_ok=True)
        results = write(self.temporary, self.rank, self.plan, self.planner)
        names = {result.storage_data.relative_path for result in results}
        digests = {name: Digest.of(self.temporary / name) for name in names}
        files.write_durably(self.temporary / f"part-{self.rank}", pickle.dumps((results, digests)))

    def complete(self) -> None:
        """Gives the checkpoint its name; the first that asks does it."""
        folder = files.claim(self.temporary)
        if folder is None:
            return
        results: list[list[WriteResult]] = []
        digests: dict[str, Digest] = {}
        for rank in range(self.layout.world_size):
            part = folder / f"part-{rank}"
            written, of_rank = pickle.loads(part.read_bytes())
            part.unlink()
            results.append(written)
            digests |= of_rank
        write_metadata(folder, self.metadata, results)
        digests[".metadata"] = Digest.of(folder / ".metadata")
        Manifest(self.step, self.layout, digests).write(folder)
        files.publish(folder, self.path)
        if self.keep is not None:
            files.keep_newest(self.path, self.keep)
