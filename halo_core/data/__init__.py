"""Data: from files to rows of tokens, from rows to batches, and the order in which a run sees them.

Not for what is learnt from a batch (`halo_core.methods`) nor for running it (`halo_core.trainer`).
"""

from __future__ import annotations

from halo_core.data.account import Account, PackingAccount, SplitAccount
from halo_core.data.batch import IGNORED, Batch
from halo_core.data.collate import collate
from halo_core.data.order import StepOrder, evaluation_batches, total_steps
from halo_core.data.prepare import Prepared, pad_id_of, prepare
from halo_core.data.rows import Row, Rows
from halo_core.data.units import Pack, Packs, Unit, Units, units_of

__all__ = [
    "Account",
    "Batch",
    "IGNORED",
    "Pack",
    "PackingAccount",
    "Packs",
    "Prepared",
    "Row",
    "Rows",
    "SplitAccount",
    "StepOrder",
    "Unit",
    "Units",
    "collate",
    "evaluation_batches",
    "pad_id_of",
    "prepare",
    "total_steps",
    "units_of",
]
