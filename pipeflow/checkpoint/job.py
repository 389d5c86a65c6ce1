"""Job: one rank's work in a save. It agrees on its part with the other ranks and writes it; the last rank completes the
folder.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeflow.checkpoint import folders
from pipeflow.checkpoint.division import Division, offers_of
from pipeflow.checkpoint.index import TORCHS, Where
from pipeflow.checkpoint.manifest import INDEX, Digest, Manifest, read_json
from pipeflow.checkpoint.newest import keep_newest, next_sequence
from pipeflow.checkpoint.pieces import TensorSpec, whole_model
from pipeflow.checkpoint.storage import RankContent, write
from pipeflow.core.errors import UsageError
from pipeflow.parallel.context import Context
from pipeflow.parallel.layout import WorldLayout
from pipeflow.parallel.transport.agreement import all_gather_object

# Theory of operation
#
# A checkpoint is a folder that is whole or not there. Ranks write into a hidden folder, and a rename makes it visible.
# They agree once, before anything is written: on the name of the hidden folder, on the sequence number, and on who
# writes which part (`Division`). After that they need no messages, so the writing can run on threads during training,
# whose collectives must keep their order.
#
# Each rank writes its data, then `part-N` with the places and digests, atomically. Whoever sees all parts after its own
# tries to complete the checkpoint. Several ranks may see this at once, so the first one claims the folder by renaming
# it; for the others the rename fails, and they are done. It then writes the index and the manifest and publishes the
# folder.
#
# A process may be killed at any moment. Until the last rename the old checkpoint is untouched, or waits under the name
# `previous`. The next save finds leftovers by their names, and removes or restores them (`folders.clean`).

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's part of a save. `run` communicates with the other ranks only through the folder, so it can run during
    training: the rank that finds all parts there completes the checkpoint.
    """

    path: Path
    temporary: Path
    rank: int
    layout: WorldLayout
    step: int | None
    sequence: int
    keep: int | None
    division: Division
    content: RankContent

    @classmethod
    def agreed(
        cls,
        context: Context,
        path: StrPath,
        content: RankContent,
        specs: list[TensorSpec],
        *,
        step: int | None,
        keep: int | None,
        copying: bool,
    ) -> Job:
        """Makes this rank's Job; the ranks agree on who writes which part of `content`. With `copying`, the content is
        copied, so training cannot change it. Raises UsageError if the ranks' names or parts do not fit together.
        """
        path = Path(path)
        sequence = next_sequence(path.parent) if context.rank == 0 else 0
        told = offers_of(content), list(map(tuple, specs)), sequence, folders.temporary_for(path, sequence).name
        everyone: list[Any] = all_gather_object(context.world, told)
        offers, all_specs, sequences, names = zip(*everyone, strict=True)
        whole_model(all_specs)
        division = Division.of(offers)
        division.require_whole()
        share = division.share(context.rank, content)
        share = share.copied() if copying else share
        temporary = path.with_name(names[0])
        if context.rank == 0:
            with suppress(OSError):  # run reports it
                temporary.mkdir(parents=True)  # from now on the next save sees the sequence number
        return cls(path, temporary, context.rank, context.layout, step, sequences[0], keep, division, share)

    def run(self) -> None:
        """Writes this rank's part; the last rank completes the checkpoint. Raises UsageError that names the path."""
        try:
            if self.rank == 0:
                folders.clean(self.path.parent)
            self._write()
            if all(self._part(rank).exists() for rank in range(self.layout.world_size)):
                self.complete()
        except Exception as error:
            folders.mark_failed(self.temporary)
            raise UsageError(f"checkpoint {self.path} could not be written: {error}; nothing was saved") from error

    def _write(self) -> None:
        self.temporary.mkdir(parents=True, exist_ok=True)
        file = self.temporary / _data_file(self.rank)
        places, digest = write(file, self.content)
        part = {"digest": asdict(digest), "places": {name: astuple(where)[1:] for name, where in places.items()}}
        folders.write_durably(self._part(self.rank), json.dumps(part).encode())

    def _part(self, rank: int, folder: Path | None = None) -> Path:
        return (folder or self.temporary) / f"part-{rank}"

    def complete(self) -> None:
        """Adds index and manifest and renames the checkpoint; done by the first caller only."""
        folder = folders.claim(self.temporary)
        if folder is None:
            return
        files: dict[str, Digest] = {}
        places = []
        for rank in range(self.layout.world_size):
            part, file = self._part(rank, folder), _data_file(rank)
            files[file], written = read_json(part, part.read_bytes, partial(_read_part, file))
            places.append(written)
            part.unlink()
        index = self.division.index(places)
        index.write_for_torch(folder)
        folders.write_durably(folder / INDEX, json.dumps(index.content()).encode())
        files |= {name: Digest.of(folder / name) for name in (INDEX, TORCHS)}
        Manifest(self.step, self.sequence, self.layout, files).write(folder)
        folders.publish(folder, self.path)
        if self.keep is not None:
            keep_newest(self.path, self.keep)


def _data_file(rank: int) -> str:
    return f"__{rank}_0.distcp"  # torch.distributed.checkpoint's name


def _read_part(file: str, content: Any) -> tuple[Digest, dict[str, Where]]:
    digest = Digest.read(content["digest"])
    places = {name: Where.read([file, *place], {file: digest}) for name, place in content["places"].items()}
    return digest, places
