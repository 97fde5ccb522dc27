"""What every test starts with: one thread, no network, quiet libraries. Not for fixtures: those stand beside tests."""

from __future__ import annotations

import os

# Before the first import of torch: two workers on two cores are slower with more threads than cores, and the
# order of a sum, so its last bits, depends on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
