"""The documentation names what the code has: settings, metrics, reasons, refused flags, files; links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hypic.check.coverage import table
from hypic.config import HypicConfig
from hypic.engine.arrival import NATIVE_REASONS
from hypic.engine.metrics import EngineMetrics
from hypic.engine.support import REFUSALS
from hypic.segment import DECLINE_REASONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
OPERATIONS = (ROOT / "docs" / "OPERATIONS.md").read_text()
API = (ROOT / "docs" / "API.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    assert not re.search(r"@@|TODO|FIXME", page.read_text())


def test_files_of_the_map_exist() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)", text)) | set(re.findall(r"`([a-z_]+/)`", text))
    assert len(named) > 25
    nowhere = [n for n in named if not any((ROOT / top / n).exists() for top in ("", "hypic", "hypic/engine/http"))]
    assert nowhere == []


def test_settings_are_documented() -> None:
    assert [name for name in HypicConfig().to_env() if f"`{name}`" not in OPERATIONS] == []


def test_metrics_are_documented() -> None:
    pytest.importorskip("prometheus_client")
    source = (ROOT / "hypic" / "engine" / "metrics.py").read_text()
    assert EngineMetrics.__doc__
    names = re.findall(r'counter\("(\w+)"', source) + re.findall(r'"hypic:(\w+)"', source)
    assert len(names) >= 9
    assert [name for name in names if f"`hypic:{name}`" not in OPERATIONS] == []


def test_reasons_are_documented() -> None:
    scheduler = re.findall(
        r'(?:"declined"|, req), "(\w+)"\)',
        "".join((ROOT / "hypic" / "engine" / name).read_text() for name in ("arrival.py", "manager.py")),
    )
    assert {"prompt_end", "arena_full", "compile_failed"} <= set(scheduler)
    reasons = {*DECLINE_REASONS, *scheduler, *(name for name, _ in NATIVE_REASONS)}
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in OPERATIONS] == []
    assert [reason for reason in DECLINE_REASONS if f"`{reason}`" not in API] == []


def test_refused_flags_are_documented() -> None:
    assert [r.flag for r in REFUSALS if f"| `{r.flag}` | {r.reason} |" not in OPERATIONS] == []


def test_the_support_table_is_what_the_tests_cover() -> None:
    """`hypic doctor --models`; tests/engine, tests/platform and tests/commands run what its two tables say."""
    assert f"\n{table()}\n" in (ROOT / "docs" / "FAMILIES.md").read_text()
