"""Commands on a checkpoint of thousands of ranks: a screen of output, and few requests."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from support.commands import run, run_json
from support.many_ranks import save_as_many_ranks
from support.servers import ACCESS_KEY, SECRET_KEY
from support.strict_s3 import StrictS3

from ckpt.backends.registry import open_store
from ckpt.errors import AccessDenied

pytestmark = pytest.mark.long
SCREEN_LINES = 40
RANKS = 2048


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "step-1"
    save_as_many_ranks(str(folder), RANKS)
    return folder


def lines(*arguments: object, code: int = 0) -> list[str]:
    ran = run(*arguments)
    assert ran.code == code, (ran.out, ran.err)
    printed = ran.out.splitlines() + ran.err.splitlines()
    assert len(printed) <= SCREEN_LINES, "\n".join(printed)
    return printed


def test_output_fits_a_screen(many: Path, tmp_path: Path) -> None:
    assert any(f"{RANKS:,}" in line for line in lines("ls", many.parent))
    assert any(f"in {RANKS:,} files" in line for line in lines("inspect", many))
    assert f"... and {RANKS - 24:,} more slices" in lines("inspect", many, "--tensor", "layers.3.weight")
    assert any(line.startswith("... and 1") for line in lines("inspect", many, "--tensor", "*"))
    assert lines("verify", "--quick", many)[0].startswith("ok: ")
    assert lines("verify", many)[0].startswith("ok: ")
    assert f"... and {2 * RANKS + 3 - 24:,} more; --json shows them" in lines("rm", "--dry-run", many)
    copy = tmp_path / "step-2"
    lines("cp", many, copy)
    assert lines("diff", many, copy)[0].startswith("same by their records")


def test_everything_is_there_on_request(many: Path) -> None:
    ran = run("inspect", many, "--tensor", "layers.3.weight", "--all")
    assert len(ran.out.splitlines()) > RANKS
    assert len(run_json("inspect", many, "--tensor", "layers.3.weight")["tensors"][0]["slices"]) == RANKS
    assert len(run_json("rm", "--dry-run", many)["keys"]) == 2 * RANKS + 3


def test_damages_and_leftovers_fit_a_screen(many: Path, tmp_path: Path) -> None:
    broken = tmp_path / "step-3"
    shutil.copytree(many, broken)
    for rank in range(0, RANKS, 2):
        for path in (broken / f"rank-{rank:05d}").glob("*.distcp"):
            path.unlink()
    text = "\n".join(lines("verify", "--quick", broken, code=1))
    assert "more; --json shows them" in text
    (broken / "commit.json").unlink()
    found = lines("gc", "--dry-run", "--grace", "0s", broken)
    assert any("more; --json shows them" in line for line in found)
    found = lines("gc", "--grace", "0s", broken)
    assert found[-1].startswith(f"removed {3 * RANKS // 2 + 2:,} leftovers")


def test_requests_to_a_bucket(server: StrictS3) -> None:
    """What looks at all asks by listing, and deletes by a thousand; only the records of ranks are read one by one."""
    ranks, objects = 600, 2 * 600 + 3
    options = {**server.options, "key": ACCESS_KEY, "secret": SECRET_KEY}
    url, words = "s3://bucket/runs/step-1", [f"{name}={value}" for name, value in options.items()]
    more = [word for each in words for word in ("--storage-options", each)]
    save_as_many_ranks(url, ranks, tensors=2, options=options)

    def requests(*arguments: object) -> int:
        server.requests.clear()
        ran = run(*arguments, *more)
        assert ran.code == 0, (ran.out, ran.err)
        return len(server.requests)

    pages = -(-objects // 1000)
    assert requests("ls", "s3://bucket/runs") <= 15 + 4 * pages
    assert requests("inspect", url) <= 10
    assert requests("verify", "--quick", url) <= 3 * ranks + 20
    assert requests("rm", url) <= 15 + 2 * pages
    assert len(server.sent("DeleteObjects")) == -(-objects // 250)  # so that it can be told how far it is
    assert not server.objects


def test_deletes_go_on_at_the_same_time_and_name_what_fails(server: StrictS3) -> None:
    keys = [f"rank-00000/{number:05}" for number in range(3500)]
    with contextlib.closing(open_store("s3://bucket/root", server.options)) as store:
        server.objects.update({f"root/{key}": b"x" for key in keys})
        store.delete(keys)
        assert len(server.sent("DeleteObjects")) == 4
        assert not server.objects
        server.rule = lambda request: (403, "AccessDenied")
        with pytest.raises(AccessDenied):
            store.delete(keys)


def test_many_files_are_deleted(tmp_path: Path) -> None:
    keys = [f"rank-{number % 7:05}/{number}" for number in range(1000)]
    for key in keys:
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).touch()
    with contextlib.closing(open_store(tmp_path)) as store:
        store.delete([*keys, "rank-00000/never-was"])
        assert [*store.list()] == []
