"""Random cases of the whole layer over NVLink; ``python tests/stress.py --device cuda`` runs more of them."""

import json

import pytest
import stress


@pytest.mark.multi_gpu(n=2)
@pytest.mark.parametrize("world_size", [2, 4])
def test_random_cases_agree_with_the_reference(world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cases", "300", "--family", "150", "--device", "cuda", "--world-size", str(world_size)]
    status = stress.main(arguments)
    out = capsys.readouterr().out
    print(out)
    summary = json.loads(out.splitlines()[-1])
    assert (status, summary["cases"], summary["mismatches"]) == (0, 300, 0)
