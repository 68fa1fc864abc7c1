"""The fault matrix on CPU ranks: a handful of rows always, all of them where slow tests run; and what fails a row.

Deadlines are short and the slack is long: what is named and what is computed is tested here, not this machine's speed.
"""

import math
import os
import tempfile
from pathlib import Path

import pytest
from fault_jobs import Jobs
from fault_ranks import FIRST, SECOND, Attempt, Life, judge, run_calls
from fault_rows import SENT, STRUCK, Order, Row, all_rows, note, ranks_named, unnamed
from tiers import slow_but

QUICK = [
    "exception, plan, twin",
    "out of memory, plan, reference",
    "SIGSTOP, layer 1, plain",
    "SIGKILL, backward, twin",
    "exception, backward, fused",
    "exception, decode, twin",
    "exception, decode, fused",
    "out of memory, tune, twin",
    "SIGTERM, tune, twin (job)",
]
ROWS = all_rows("cpu")
SLACK_S = float(os.environ.get("SLACK_S", "60"))  # 2 on a quiet machine
JOB_DEADLINE_S = 6  # of ranks that start and read checkpoints meanwhile
REFUSED = "StepFailedError: the forward pass failed on rank 1 (RuntimeError: injected by the fault matrix)"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.mark.parametrize("row", slow_but(QUICK, ROWS))
def test_row(row: Row, jobs: Jobs) -> None:
    folder = Path(tempfile.mkdtemp(dir=jobs.folder))
    deadline_s = JOB_DEADLINE_S if row.job else 2
    order = Order(row=row, device="cpu", deadline_s=deadline_s, slack_s=SLACK_S, folder=folder)
    finding = jobs.run(order) if row.job else run_calls(order)
    print(f"{row.name}: {finding.named()} after {finding.seconds:.1f} s")
    assert not finding.wrong, "\n".join(finding.wrong)


def order_of(row: Row, folder: Path) -> Order:
    return Order(row=row, device="cpu", deadline_s=5.0, slack_s=2.0, folder=folder)


def lived(said: str = REFUSED, *, at: float = 101.0, then: str = REFUSED, wrong: tuple[str, ...] = ()) -> Life:
    return {FIRST: Attempt(said, list(wrong), at, 1.0), SECOND: Attempt(then, [], at + 1.0, 0.1)}


@pytest.mark.parametrize(
    ("life", "message"),
    [
        (lived(), ""),
        (lived(""), ""),  # it had all it needed, and names the culprit at the next call
        (lived(at=107.5), "a survivor went on for 7.5 s, allowed are 7.0 s"),
        (lived("RuntimeError: Connection closed by peer", then=""), "rank 1 is not named"),
        (lived("CommTimeoutError: rank 0 waited 5.0 s for rank 1 (barrier)"), "no word of exception"),
        (lived("", wrong=("call 1: output: error 0.3 > 0.1",)), "rank 0: call 1: output: error 0.3 > 0.1"),
    ],
)
def test_what_fails_a_row(life: Life, message: str, tmp_path: Path) -> None:
    note(tmp_path / STRUCK, "17 100.0")
    finding = judge(order_of(Row("layer 0", "exception", "twin"), tmp_path), [life, lived()])
    assert (finding.wrong[0] if finding.wrong else "").startswith(message), finding.wrong
    assert bool(finding.wrong) == bool(message)


def test_a_row_counts_from_the_signal_and_fails_without_its_fault(tmp_path: Path) -> None:
    order = order_of(Row("layer 0", "SIGKILL", "twin"), tmp_path)
    assert judge(order, [lived(), None]).wrong == ["the fault did not happen: the phase was not reached"]
    note(tmp_path / STRUCK, "17 90.0")
    note(tmp_path / SENT, "100.0")
    assert math.isclose(judge(order, [lived(), None]).seconds, 1.0)


def test_who_is_named() -> None:
    assert ranks_named("rank 0 waited 5.0 s for rank 1 (barrier)") == {1}
    assert ranks_named("rank 0 lost rank 2 (no sign of life)") == {2}
    assert ranks_named("Connection closed by peer [127.0.0.1]:1234") == set()
    order = order_of(Row("layer 1", "SIGSTOP", "plain", job=True), Path())
    assert unnamed(order, "rank 1 (pid 5) is frozen", reason=True) == []
    assert len(unnamed(order, "rank 0 waited 5.0 s for rank 1", reason=True)) == 1
