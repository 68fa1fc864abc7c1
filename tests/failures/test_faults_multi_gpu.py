"""The fault matrix on ranks with GPUs, which they may share."""

from pathlib import Path

import pytest
from fault_ranks import run_calls
from fault_rows import Order, Row, all_rows


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize("row", all_rows("cuda"), ids=lambda row: row.name)
def test_row(row: Row, tmp_path: Path) -> None:
    finding = run_calls(Order(row=row, device="cuda", deadline_s=5.0, slack_s=2.0, folder=tmp_path))
    print(f"{row.name}: {finding.named()} after {finding.seconds:.1f} s")
    assert not finding.wrong, "\n".join(finding.wrong)
