"""`ckpt report`, in a real browser: the numbers, the keyboard, accessibility, and no network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import SHOTS, chromium, faults, opened
from support.commands import run_json
from support.ranks import run_ranks
from support.states import random_tensor

import ckpt
from ckpt.trainer_integration.events import Event, JsonLines

EVIL = "</script><script>window.evil=1</script><img src=x onerror='window.evil=1'>\u202e\u0000"


def _save_together(rank: int, root: str) -> None:
    state: dict[str, Any] = {
        "model": {
            f"layers.{n}.{part}.weight": random_tensor(64, 64 + 8 * rank, seed=n)
            for n in range(4)
            for part in ("up", "down")
        },
        "optim": {"state": {f"layers.{n}": {"exp_avg": random_tensor(64, 128, seed=n)} for n in range(4)}},
        "step": 1,
    }
    state["model"] = {f"rank{rank}.{name}": tensor for name, tensor in state["model"].items()}
    ckpt.save(state, f"{root}/step-1", digests=True, tags={"step": "1", "note": EVIL})
    state["model"][EVIL] = random_tensor(32, 32).bfloat16()
    ckpt.save(state, f"{root}/step-2", base=f"{root}/step-1", tags={"step": "2"})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks and two checkpoints, the second of which refers to the first, with events."""
    root = tmp_path_factory.mktemp("run")
    run_ranks(2, _save_together, str(root))
    listed = ckpt.list_checkpoints(root)
    tell = JsonLines(root / "events.jsonl")
    for each in listed:
        assert each.created_at_s is not None
        figures = {
            "upload_s": 1.25,
            "stall_s": 0.125,
            "plan_s": 0.1,
            "write_s": 1.0,
            "commit_s": 0.15,
            "size_bytes": 5.0,
        }
        tell(Event("durable", each.step, "", figures, each.created_at_s + 600 * (each.step or 0), each.url))
    tell(Event("failed", 3, EVIL, {"upload_s": 2.0}, (listed[1].created_at_s or 0) + 900))
    return root


@pytest.fixture(scope="module")
def pages(root: Path) -> dict[str, Path]:
    """The page of the run, and that of its second checkpoint."""
    made = {"run": root / "run.html", "checkpoint": root / "checkpoint.html"}
    run_json("report", root, "-o", made["run"])
    run_json("report", root / "step-2", "-o", made["checkpoint"])
    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


def _value(page: Any, name: str) -> float:
    return float(page.locator(f'[data-name="{name}"]').first.get_attribute("data-value"))


def _sums(page: Any, selector: str) -> dict[str, int]:
    listed = page.locator(f"{selector} [data-kind]").all()
    return {each.get_attribute("data-kind"): int(each.get_attribute("data-value")) for each in listed}


def test_the_numbers_are_those_of_inspect(browser: Any, root: Path, pages: dict[str, Path]) -> None:
    known = run_json("inspect", root / "step-2")
    with opened(browser, pages["checkpoint"]) as page:
        assert _value(page, "own bytes") == known["commit"]["data_bytes"]
        assert _value(page, "referred bytes") == known["referred_bytes"] > 0
        assert _value(page, "parameters") == known["parameters"]
        assert _value(page, "tensors") == len(known["tensors"])
        assert _value(page, "ranks") == known["commit"]["world_size"] == 2
        assert _value(page, "stored items") == known["stored_bytes"]
        assert _value(page, "save") == pytest.approx(sum(known["seconds"].values()))
        slowest = max(known["ranks"], key=lambda rank: rank["write_s"])
        assert (_value(page, "slowest"), _value(page, "slowest_s")) == (slowest["rank"], slowest["write_s"])
        assert _value(page, "retries") == sum(rank["retries"] for rank in known["ranks"]) == 0
        # The legend of the treemap sums its leaves: by part, by dtype (objects apart), and where the bytes lie.
        assert _sums(page, ".legend") == {
            name: nbytes for name, nbytes in known["bytes_by_part"].items() if nbytes
        }
        page.get_by_label("Colour by").get_by_label("dtype").check(force=True)
        drawn = _sums(page, ".legend")
        assert drawn.pop("object") == sum(each["length"] for each in known["objects"])
        assert drawn == known["bytes_by_dtype"]
        page.get_by_label("Colour by").get_by_label("own or referred").check(force=True)
        assert _sums(page, ".legend")["in other checkpoints"] == known["referred_bytes"]
        # The tables beside the pictures.
        page.locator("#ranks summary").click()
        page.locator("#ranks table").wait_for()
        rows = {
            int(row.locator("th").get_attribute("data-value")): row.locator("td").all()
            for row in page.locator("#ranks tbody tr").all()
        }
        assert {rank: (float(row[0].get_attribute("data-value")), int(row[1].get_attribute("data-value"))) for rank, row in rows.items()} == {
            rank["rank"]: (rank["write_s"], rank["data_bytes"]) for rank in known["ranks"]
        }  # fmt: skip
        page.locator("#save summary").click()
        page.locator("#save table").wait_for()
        phases = page.locator("#save td[data-value]").all()
        assert [float(each.get_attribute("data-value")) for each in phases[:3]] == list(
            known["seconds"].values()
        )


def test_modules_open_by_keyboard_and_by_click(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["checkpoint"]) as page:
        crumbs = page.locator(".crumbs")
        page.locator(".map [tabindex='0']").focus()
        assert page.locator(".map [tabindex='0']").count() == 1  # one stop on the way through the page
        first = page.evaluate("document.activeElement.dataset.name")
        page.keyboard.press("End")
        assert page.evaluate("document.activeElement.dataset.name") != first
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        moved = page.evaluate("document.activeElement.dataset.name")
        assert moved != first
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        assert crumbs.inner_text().split() == ["everything", first]
        assert page.evaluate("document.activeElement.classList.contains('tile')")
        page.keyboard.press("Escape")
        assert crumbs.inner_text().split() == ["everything"]
        page.locator(f".tile[data-name='{moved}']").click(position={"x": 6, "y": 6})
        assert moved in crumbs.inner_text()
        crumbs.get_by_role("button", name="everything").click()
        assert crumbs.inner_text().split() == ["everything"]


def test_what_is_stored_is_text_and_nothing_else(browser: Any, pages: dict[str, Path]) -> None:
    for path in pages.values():
        with opened(browser, path) as page:
            assert page.evaluate("window.evil") is None
            assert page.locator("img").count() == 0
            page.locator("#contents summary").click()
    with opened(browser, pages["run"]) as page:
        assert "</script><script>window.evil=1" in page.locator("#failures").inner_text()
        assert "\\u{202e}\\u{0}" in page.locator("#failures").inner_text()


def test_the_policy_of_the_page_lets_no_other_script_run(browser: Any, pages: dict[str, Path]) -> None:
    """Whatever the page did wrong with a name."""
    with opened(browser, pages["checkpoint"], faultless=False) as page:
        page.evaluate(
            """() => {
            const script = document.createElement("script");
            script.textContent = "window.evil = 1";
            document.body.append(script);
            document.body.insertAdjacentHTML("beforeend", "<img src='https://example.com/x' onerror='window.evil = 1'>");
        }"""
        )
        page.wait_for_timeout(200)
        assert page.evaluate("window.evil") is None


def test_a_run_shows_its_history(browser: Any, root: Path, pages: dict[str, Path]) -> None:
    listed = run_json("ls", root)["checkpoints"]
    with opened(browser, pages["run"]) as page:
        assert _value(page, "checkpoints") == len(listed) == 2
        assert _value(page, "failed saves") == 1
        assert _value(page, "interval") == pytest.approx(
            listed[1]["created_at_s"] - listed[0]["created_at_s"] + 600
        )
        assert _value(page, "their own bytes") == sum(each["size_bytes"] for each in listed)
        rows = page.locator("#history tbody tr").all()
        assert [int(row.locator("td").nth(2).get_attribute("data-value")) for row in rows] == [
            each["size_bytes"] for each in reversed(listed)
        ]
        assert [row.locator("th").inner_text() for row in rows] == ["step-2 (latest)", "step-1"]
        page.locator("#age summary").click()
        page.locator("#age table").wait_for()
        assert page.locator("#age tbody tr").count() == 2
        assert float(page.locator("#age td[data-value]").first.get_attribute("data-value")) == pytest.approx(
            _value(page, "interval") + 1.25
        )
        assert "Latest: step-2" in page.locator("h1").nth(1).inner_text()
        assert _value(page, "stall_s") == 0.125


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_keeps_people_out(browser: Any, pages: dict[str, Path], scheme: str, width: int) -> None:
    for name, path in pages.items():
        with opened(browser, path, width=width, scheme=scheme, inspected=True) as page:
            if SHOTS.name:
                page.screenshot(path=SHOTS / f"{name}-{scheme}-{width}.png", full_page=True)
            for summary in page.locator("summary").all():
                summary.click()
            assert faults(page) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_colours_can_be_chosen(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["checkpoint"], scheme="dark") as page:
        background = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(background)
        page.get_by_label("Light").check(force=True)
        light = page.evaluate(background)
        assert light != dark
        page.get_by_label("System").check(force=True)
        assert page.evaluate(background) == dark
