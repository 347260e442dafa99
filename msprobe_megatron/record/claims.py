"""Which job a run directory belongs to: one empty file in it whose name every rank of the job can make up by itself.

No rank talks to another: each makes the file or finds it there before it claims its own number.
"""

from __future__ import annotations

import hashlib
import os

from msprobe_megatron.record.safe_files import create_file

_MARK, _RANK = "job_", "rank_"


def claim_job(ranks: int, job: str) -> None:
    """Take the open directory ``ranks`` for ``job``; FileExistsError if another job has been there.

    Example::

        claim_job(folder, "2 ranks, port 29500")
    """
    mark = _MARK + hashlib.sha256(job.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    before = os.listdir(ranks)
    try:
        os.close(create_file(mark, ranks))
        made = True
    except FileExistsError:
        made = False
    # Ranks of this job make the mark before their own files: files that were here before the mark are older.
    older = made and any(name.startswith(_RANK) for name in before)
    if older or any(name.startswith(_MARK) and name != mark for name in os.listdir(ranks)):
        if made:
            os.unlink(mark, dir_fd=ranks)
        raise FileExistsError(mark)
