"""The table of what cannot go together: COMPATIBILITY.md lists it, and a refusal says feature, value, where and why."""

from pathlib import Path

import pytest

from comet.capabilities import MISSING, NEUTRAL, missing, refuse

TEXT = (Path(__file__).parents[2] / "COMPATIBILITY.md").read_text()


@pytest.mark.parametrize("where", MISSING)
def test_compatibility_lists_the_table(where: str) -> None:
    rows = [
        f"| {where} | {', '.join(f'`{name}`' for name in names.split())} | {reason} |"
        for reason, names in MISSING[where].items()
    ]
    assert "\n".join(rows) in TEXT, "COMPATIBILITY.md, What cannot go together: must have these rows"


@pytest.mark.parametrize("where", MISSING)
def test_a_feature_that_is_asked_for_is_refused_by_name(where: str) -> None:
    for name, reason in missing(where).items():
        refuse(where, **{name: None})
        refuse(where, **{name: NEUTRAL.get(name, False)})
        with pytest.raises(ValueError, match=f"^{name}='x' must be left out {where}: ") as caught:
            refuse(where, **{name: "x"})
        assert str(caught.value).endswith(reason)
