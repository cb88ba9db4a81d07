"""`ckpt.install`: unmodified DCP calls use this library, until `ckpt.uninstall`."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.strict_s3 import StrictS3

# As frameworks do, long before `install`.
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckpt
from ckpt.errors import ConfigurationError, LoadFailed, NotFound, SaveFailed, UnsafeContent
from ckpt.reading.reader import CheckpointReader
from ckpt.torch_private import fsspec_storage
from ckpt.writing.writer import CheckpointWriter

FsspecWriter, FsspecReader = fsspec_storage()


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    ckpt.uninstall()


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((300,), value), "step": int(value)}


def is_ours(place: Path) -> bool:
    return (place / "commit.json").exists()


def loads(place: Any, value: float) -> bool:
    state = state_of(-1)
    dcp.load(state, checkpoint_id=place)
    return bool((state["weight"] == value).all()) and state["step"] == value


@pytest.mark.parametrize("kind", [str, Path])
def test_save_and_load(tmp_path: Path, kind: Any) -> None:
    ckpt.install()
    place = kind(tmp_path / "a")
    dcp.save(state_of(1), checkpoint_id=place)
    assert is_ours(tmp_path / "a")
    assert loads(place, 1)
    dcp.async_save(state_of(2), checkpoint_id=place).result()  # type: ignore[union-attr]
    assert is_ours(tmp_path / "a")
    assert loads(place, 2)
    dcp.save(state_of(3), checkpoint_id=tmp_path / "b", no_dist=True)
    assert is_ours(tmp_path / "b")


def test_object_storage_with_options(server: StrictS3) -> None:
    ckpt.install(storage_options=server.options)
    place = "s3://bucket/run/step-1"
    dcp.save(state_of(1), checkpoint_id=place)
    assert loads(place, 1)
    (found,) = ckpt.list_checkpoints(place, storage_options=server.options)
    assert found.state == "committed"


def test_wrong_arguments_change_nothing(tmp_path: Path) -> None:
    ckpt.install()
    with pytest.raises(ConfigurationError, match="trusted_objects must be a list of names"):
        ckpt.install(trusted_objects="x")
    dcp.save(state_of(1), checkpoint_id=tmp_path / "a")
    assert is_ours(tmp_path / "a")


def test_uninstall_undoes_it(tmp_path: Path) -> None:
    signatures = list(map(inspect.signature, STOCK))
    ckpt.install()
    ckpt.install()
    ours = FileSystemWriter(tmp_path / "ours")
    ckpt.uninstall()
    ckpt.uninstall()
    assert list(map(inspect.signature, STOCK)) == signatures
    dcp.save(state_of(1), checkpoint_id=tmp_path / "after")
    dcp.save(state_of(1), storage_writer=FileSystemWriter(tmp_path / "stock"))
    assert type(FileSystemReader(tmp_path)) is FileSystemReader
    assert not is_ours(tmp_path / "after")
    assert not is_ours(tmp_path / "stock")
    dcp.save(state_of(1), storage_writer=ours)
    assert is_ours(tmp_path / "ours")


def test_nowhere_to_save() -> None:
    ckpt.install()
    with pytest.raises(RuntimeError, match="checkpoint_id"):
        dcp.save(state_of(1))


# -- writers and readers that a framework makes ----------------------------------------------------------

STOCK: tuple[Any, ...] = (FileSystemWriter, FileSystemReader, FsspecWriter, FsspecReader)


def with_dcp(state: dict[str, Any], writer: Any) -> None:
    dcp.save(state, storage_writer=writer)


def with_the_old_function(state: dict[str, Any], writer: Any) -> None:
    with pytest.warns(FutureWarning):
        dcp.save_state_dict(state, writer, no_dist=True)


def in_the_background(state: dict[str, Any], writer: Any) -> None:
    dcp.async_save(state, storage_writer=writer).result()  # type: ignore[union-attr]


@pytest.mark.parametrize("save", [with_dcp, with_the_old_function, in_the_background])
@pytest.mark.parametrize(
    ("writer", "reader"), [(FileSystemWriter, FileSystemReader), (FsspecWriter, FsspecReader)]
)
def test_frameworks(tmp_path: Path, writer: Any, reader: Any, save: Callable[..., None]) -> None:
    """Whatever it does with the writer and reader that it makes itself, they are this library's."""
    ckpt.install()
    made = writer(str(tmp_path / "a"), single_file_per_rank=True)
    assert isinstance(made, writer | FileSystemWriter)
    assert made.path == tmp_path / "a"
    save(state_of(1), made)
    assert is_ours(tmp_path / "a")
    state = state_of(-1)
    dcp.load(state, storage_reader=reader(str(tmp_path / "a")))
    assert bool((state["weight"] == 1).all())
    dcp.save(state_of(2), storage_writer=made, checkpoint_id=tmp_path / "b")
    assert made.path == tmp_path / "b"
    assert loads(tmp_path / "b", 2)
    opened = reader(str(tmp_path / "b"))
    metadata = opened.read_metadata()
    assert "weight" in metadata.state_dict_metadata
    stored = metadata.storage_meta
    assert stored == StorageMeta(str(tmp_path / "b"), made.save_id, opened.load_id)
    with pytest.raises(
        (TypeError, ConfigurationError), match=r"unexpected keyword argument|unknown storage option"
    ):
        writer(str(tmp_path / "a"), nonsense=1)


# -- asynchronous saves ----------------------------------------------------------------------------------


def hard_to_copy(value: int) -> dict[str, torch.Tensor]:
    """Make tensors that PyTorch's `DefaultStager` copies with other values, or not at all."""
    number = torch.tensor([value + 2j])
    scales, zeros = torch.full((2,), 0.5), torch.zeros(2)
    return {
        "conjugated": number.conj(),
        "negated": number.conj().imag,
        "not_cloned": torch.quantize_per_channel(
            torch.full((2, 2), value / 1), scales, zeros, 0, torch.quint8
        ),
    }


def values(state: dict[str, torch.Tensor]) -> list[Any]:
    return [(t.dequantize() if t.is_quantized else t).tolist() for t in state.values()]


def writer_made_by_a_framework(place: Path) -> dict[str, Any]:
    writer = FileSystemWriter(place, cache_staged_state_dict=True)
    assert isinstance(writer, AsyncStager)
    return {"storage_writer": writer}


def no_writer(place: Path) -> dict[str, Any]:
    return {"checkpoint_id": place}


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
@pytest.mark.parametrize("arguments", [writer_made_by_a_framework, no_writer])
def test_the_copy_of_an_asynchronous_save_is_right(
    tmp_path: Path, arguments: Callable[[Path], dict[str, Any]]
) -> None:
    ckpt.install()
    for value in (1, 2):
        saved = hard_to_copy(value)
        future: Any = dcp.async_save(saved, **arguments(tmp_path / "a"))
        expected = values(saved)
        saved["conjugated"].zero_()
        future.result()
        state = hard_to_copy(9)
        dcp.load(state, storage_reader=FileSystemReader(tmp_path / "a"))
        assert values(state) == expected


class OwnStager(BlockingAsyncStager):
    staged = 0

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.staged += 1
        return super().stage(state_dict)


@pytest.mark.parametrize("arguments", [writer_made_by_a_framework, no_writer])
def test_a_stager_that_is_given_is_used(tmp_path: Path, arguments: Callable[[Path], dict[str, Any]]) -> None:
    ckpt.install()
    stager = OwnStager()
    dcp.async_save(state_of(1), **arguments(tmp_path / "a"), async_stager=stager).result()  # type: ignore[union-attr]
    assert stager.staged == 1
    assert is_ours(tmp_path / "a")
    assert loads(tmp_path / "a", 1)


# -- how it is told --------------------------------------------------------------------------------------


def test_arguments_of_frameworks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt.dcp_hook")
    ckpt.install()
    for _ in range(2):
        dcp.save(
            state_of(1),
            storage_writer=FileSystemWriter(tmp_path, sync_files=False, thread_count=3, overwrite=True),
        )
        FileSystemReader(tmp_path)
        loads(tmp_path, 1)
    assert caplog.messages == [
        f"FileSystemWriter in {__name__} is taken over; without effect: sync_files",
        f"FileSystemReader in {__name__} is taken over",
        f"loads with a checkpoint_id in {__name__} are taken over",
    ]
    with pytest.raises(CheckpointException, match="committed here already"):
        dcp.save(state_of(2), storage_writer=FileSystemWriter(tmp_path, overwrite=False))


class OwnWriter(FileSystemWriter):
    """As s3torchconnector's, or that for Hugging Face's format."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        (Path(self.path) / "own").mkdir(parents=True)
        return super().prepare_local_plan(plan)


def test_other_writers_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt.dcp_hook")
    early = FileSystemWriter(tmp_path / "early")
    ckpt.install()
    safe = FileSystemWriter(tmp_path / "safe", serialization_format=SerializationFormat.SAFETENSORS)
    assert type(safe) is type(copy.copy(early)) is FileSystemWriter
    for place in ("own", "own2"):
        dcp.save(state_of(1), storage_writer=OwnWriter(tmp_path / place))
        assert (tmp_path / place / "own").exists()
        assert not is_ours(tmp_path / place)
        assert loads(tmp_path / place, 1), "what stock PyTorch saved loads"
    dcp.save(state_of(1), storage_writer=early)
    assert not is_ours(tmp_path / "early")
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    own, stock = f"{__name__}.OwnWriter", "torch.distributed.checkpoint.filesystem.FileSystemWriter"
    assert [text.partition(" is ")[0] for text in warnings] == [
        f"FileSystemWriter(serialization_format=...) in {__name__}",
        own,
        stock,
    ]
    assert "made before ckpt.install()" in warnings[2]


def test_object_storage_through_fsspec(server: StrictS3) -> None:
    """Options of the writer's own are added to those of `install`, which plain paths do not get."""
    url = "s3://bucket/run/step-1"
    options = dict(server.options)
    secret = options.pop("secret")
    ckpt.install(storage_options=options)
    dcp.save(state_of(1), storage_writer=FsspecWriter(url, secret=secret))
    state = state_of(-1)
    dcp.load(state, storage_reader=FsspecReader(url, secret=secret))
    assert bool((state["weight"] == 1).all())
    assert "run/step-1/commit.json" in server.objects


def test_options_are_for_urls(tmp_path: Path, server: StrictS3) -> None:
    ckpt.install(storage_options=server.options)
    dcp.save(state_of(1), checkpoint_id=tmp_path / "a")
    dcp.save(state_of(1), storage_writer=FileSystemWriter(tmp_path / "b"))
    assert is_ours(tmp_path / "a")
    assert is_ours(tmp_path / "b")
    with pytest.raises(ConfigurationError, match="went through pathlib"):
        FileSystemWriter(Path("s3://bucket/run"))


def test_who_asks_a_reader_itself_hears_the_error(tmp_path: Path) -> None:
    """DCP keeps only the text of an error that `read_metadata` raises, so there it comes later."""
    ckpt.install()
    reader = FileSystemReader(tmp_path / "nothing")
    with pytest.raises(NotFound):
        reader.read_metadata()
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state_of(1), storage_reader=reader)
    assert isinstance(caught.value.failures[0][0], NotFound)
    with pytest.raises(NotFound):
        reader.read_metadata()


# -- objects ---------------------------------------------------------------------------------------------


def test_objects_can_be_trusted(tmp_path: Path) -> None:
    now = SimpleNamespace(day=28)
    dcp.save({"when": now}, checkpoint_id=tmp_path)
    ckpt.install()
    for reader in (None, FileSystemReader(tmp_path)):
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"when": None}, checkpoint_id=tmp_path, storage_reader=reader)
        assert isinstance(caught.value.failures[0][0], UnsafeContent)
    ckpt.install(trusted_objects=["wh*"])
    for reader in (None, FileSystemReader(tmp_path)):
        state = {"when": None}
        dcp.load(state, checkpoint_id=tmp_path, storage_reader=reader)
        assert state["when"] == now
    with pytest.raises(ConfigurationError, match="trusted_objects must be a list"):
        ckpt.install(trusted_objects="when")


# -- in another process ----------------------------------------------------------------------------------


def save_in_a_process(rank: int, place: str, makes_writer: bool) -> bool:
    ckpt.install()
    for value in (1, 2):
        future = dcp.async_save(
            {f"part{rank}": torch.full((300,), float(rank + value)), **hard_to_copy(value)},
            checkpoint_id=None if makes_writer else place,
            storage_writer=FileSystemWriter(place) if makes_writer else None,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        future.result()  # type: ignore[union-attr]
    state = {"part0": torch.zeros(300), "part1": torch.zeros(300)}
    hard = hard_to_copy(9)
    dcp.load({**state, **hard}, checkpoint_id=place)
    assert values(hard) == values(hard_to_copy(2))
    return bool((state["part0"] == 2).all() and (state["part1"] == 3).all())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
@pytest.mark.parametrize("makes_writer", [False, True])
def test_process_mode(tmp_path: Path, makes_writer: bool) -> None:
    """The process that saves is another one, in which nothing is installed."""
    save = functools.partial(save_in_a_process, place=str(tmp_path / "a"), makes_writer=makes_writer)
    assert run_ranks(2, save) == [True, True]
    assert is_ours(tmp_path / "a")


# -- parts: what a rank gives stands for all ---------------------------------------------------------------


class Position:
    def __init__(self, value: int, *, fails: bool = False) -> None:
        self.value = value
        self.fails = fails

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            raise ValueError("no position")
        return {"position": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["position"]


def _own_parts(rank: int, root: str) -> None:
    ckpt.install()
    calls: tuple[Any, ...] = (dcp.save, dcp.async_save)
    for call in calls:
        with pytest.raises(SaveFailed, match=r"other values of 'loader\.position'"):
            call({"loader": Position(rank)}, checkpoint_id=f"{root}/a")
        with pytest.raises(SaveFailed, match="rank 1: ValueError: no position"):
            call({"loader": Position(0, fails=rank == 1)}, checkpoint_id=f"{root}/a")
    dcp.save({"loader": ckpt.per_rank(Position(rank))}, checkpoint_id=f"{root}/a")
    own = Position(7)
    dcp.load({"loader": ckpt.per_rank(own)}, checkpoint_id=f"{root}/a")
    assert own.value == rank


def test_parts_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _own_parts, str(tmp_path), timeout_s=100)


def test_a_part_of_a_model_loads_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ckpt.install()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    dcp.save({"model": model}, checkpoint_id=tmp_path / "a")
    first = torch.nn.Sequential(torch.nn.Linear(2, 2))
    dcp.load({"model": first}, checkpoint_id=tmp_path / "a")
    assert torch.equal(first.state_dict()["0.weight"], model.state_dict()["0.weight"])
    assert "no place for 2 key(s): model.1.bias, model.1.weight" in caplog.text
    with pytest.raises(LoadFailed, match="lacks") as seen:
        dcp.load({"model": torch.nn.ModuleDict({"x": model})}, checkpoint_id=tmp_path / "a")
    assert "strict" not in str(seen.value), "dcp.load has no such option"


# -- folders of saves that have begun ------------------------------------------------------------------------


@pytest.mark.parametrize("makes_writer", [False, True])
def test_the_folder_exists_when_an_asynchronous_save_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makes_writer: bool
) -> None:
    """A trainer that keeps two counts three folders, and removes the oldest; none is a checkpoint without its commit."""
    ckpt.install()
    may_go_on = threading.Event()
    look = CheckpointWriter.look

    def look_late(self: CheckpointWriter) -> None:
        assert may_go_on.wait(60)
        look(self)

    for step in (1, 2):
        dcp.save(state_of(step), checkpoint_id=tmp_path / f"step-{step:08d}")
    monkeypatch.setattr(CheckpointWriter, "look", look_late)
    writer = FileSystemWriter(tmp_path / "step-00000003") if makes_writer else None
    future: Any = dcp.async_save(state_of(3), checkpoint_id=tmp_path / "step-00000003", storage_writer=writer)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000002",
        "step-00000003",
    ]
    assert [each.path for each in ckpt.list_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]
    ckpt.collect_garbage(tmp_path, grace_s=-1)
    with pytest.raises(NotFound):
        ckpt.load(state_of(-1), tmp_path / "step-00000003")
    with ckpt.CheckpointManager(tmp_path, save=1, preflight=False) as manager:
        restored = manager.restore(state_of(-1), step=2, rng=False)
        assert restored is not None
    may_go_on.set()
    future.result(60)
    assert [each.path for each in ckpt.list_checkpoints(tmp_path)] == [
        "step-00000001",
        "step-00000002",
        "step-00000003",
    ]
    assert loads(tmp_path / "step-00000003", 3)


def test_a_writer_that_still_saves_makes_the_folder_of_its_next_save(tmp_path: Path) -> None:
    ckpt.install()
    writer = FileSystemWriter(tmp_path / "step-1")
    futures: list[Any] = []
    for step in (1, 2, 3):
        place = tmp_path / f"step-{step}"
        futures.append(dcp.async_save(state_of(step), checkpoint_id=place, storage_writer=writer))
        assert place.is_dir()
        futures[-1].result(60)
    assert all(loads(tmp_path / f"step-{step}", step) for step in (1, 2, 3))


def test_ids_of_saves_and_loads(tmp_path: Path) -> None:
    """As PyTorch's writer and reader have them, also where our classes are named in their place."""
    writer = CheckpointWriter(tmp_path / "a")
    assert writer.storage_meta().save_id == writer.save_id
    dcp.save(state_of(1), storage_writer=writer, no_dist=True)
    reader = CheckpointReader(tmp_path / "a")
    before = reader.load_id
    stored = reader.read_metadata().storage_meta
    assert stored == StorageMeta(str(tmp_path / "a"), writer.save_id, reader.load_id)
    assert reader.load_id != before
