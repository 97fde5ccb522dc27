"""kill -9 at any instant of a save, then resume: equal to the run never killed. The trials run in `killed_runs.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_killed_save_leaves_the_old_or_the_new_checkpoint_and_a_resume_equals_the_run_never_killed(
    tmp_path: Path,
) -> None:
    script = Path(__file__).with_name("killed_runs.py")
    ran = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "all equal" in ran.stdout
